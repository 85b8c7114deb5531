"""Plans written by hand: small enough to follow, with every kind of task in them."""

from math import prod

from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import parse_layout
from mpiflow.plan.records import (
    DataSet,
    Field,
    Output,
    Plan,
    Program,
    Register,
    Settings,
    Shard,
    Task,
    Variable,
)
from mpiflow.plan.slice import itemsize
from mpiflow.plan.verify_layout import largest_shape


class Maker:
    """Makes tensors of one mesh; `program` collects the tasks into the order given."""

    def __init__(self, mesh):
        self.mesh = parse_mesh(mesh)

    def tensor(self, name, shape, layout, offset, dtype="float32", *, kind=Register, **more):
        layout = parse_layout(layout)
        nbytes = prod(largest_shape(shape, layout, self.mesh)) * itemsize(dtype)
        return kind(name, shape, dtype, layout, offset, nbytes, **more)

    def variable(self, name, shape, layout, offset, **more):
        return self.tensor(name, shape, layout, offset, kind=Variable, **more)

    def plan(self, variables, programs, arena, data=()):
        return Plan(
            job="handmade", version="0.1.0", numpy="2.0", mesh=self.mesh, device="host",
            machine="laptop", numerics="fast", seed=0,
            identity=(("model", "matmul"), ("optimizer", "SGD(lr=0.1)"), ("batch", "5")),
            variables=tuple(variables), arenas=(("host", arena),), process_bytes=arena + 1_000_000,
            data=data, settings=Settings(epochs=2, steps_per_epoch=7), programs=tuple(programs),
            notes=("the last 2 rows of an epoch are left out",),
        )  # fmt: skip


def compute(name, op, inputs, outputs, seconds=1e-3, **more):
    return Task(name, "compute", "compute", op, tuple(inputs.split()), tuple(outputs.split()),
                seconds=seconds, where=f"digits.py:{10 + len(name)}", **more)  # fmt: skip


def collective(name, op, axis, inputs, outputs, seconds=1e-3, **more):
    return Task(name, "collective", f"comm.{axis}", op, tuple(inputs.split()),
                tuple(outputs.split()), axis=axis, seconds=seconds, **more)  # fmt: skip


def read(name, outputs, seconds=1e-3):
    return Task(name, "read", "read", "read", (), tuple(outputs.split()), seconds=seconds)


def write(name, inputs, seconds=1e-3):
    return Task(name, "write", "write", "write", tuple(inputs.split()), seconds=seconds)


def program(name, registers, tasks, **more):
    """A program whose streams fire their tasks as listed."""
    streams = sorted({task.stream for task in tasks})
    order = tuple(
        (s, tuple(i for i, task in enumerate(tasks) if task.stream == s)) for s in streams
    )
    return Program(name, 5, tuple(registers), tuple(tasks), order, **more)


def data_set():
    return DataSet(
        "train", "digits/train-*.h5",
        (Field("image", (4,), "float32"), Field("label", (), "int64")),
        (Shard("digits/train-0.h5", 20, 8), Shard("digits/train-1.h5", 17, 8)),
        37, 5, True, 0, 4, 2, "ab12",
    )  # fmt: skip


def dense():
    """Data parallel on two ranks: a fused all_reduce, an in-place op, reads two steps ahead."""
    m = Maker("data=2")
    w = m.variable("w", (4, 4), "B", 0, where="digits.py:12")
    b = m.variable("b", (4,), "B", 64, where="digits.py:12")
    init = program("initialise", [], [
        compute("i0", "normal", "", "w", attributes={"key": 1, "scale": 0.5}),
        compute("i1", "zeros", "", "b"),
    ])  # fmt: skip
    registers = [
        m.tensor("x", (5, 4), "S(0)", 128, slots=2),
        m.tensor("y", (5,), "S(0)", 224, "int64", slots=2),
        m.tensor("h", (5, 4), "S(0)", 320),
        m.tensor("dh", (5, 4), "S(0)", 320, aliases="h"),
        m.tensor("l", (), "P", 272),
        m.tensor("loss", (), "B", 276),
        m.tensor("gw", (4, 4), "P", 384),
        m.tensor("gb", (4,), "P", 448),
        m.tensor("gw.sum", (4, 4), "B", 384, aliases="gw"),
        m.tensor("gb.sum", (4,), "B", 448, aliases="gb"),
        m.tensor("norm", (), "B", 272),
    ]
    tasks = [
        read("r0", "x y"),
        compute("t1", "matmul", "x w b", "h", workspace=(464, 16), nbytes=144),
        compute("t2", "cross_entropy", "h y", "l"),
        compute("t3", "cross_entropy_grad", "h y", "dh"),
        compute("t4", "matmul", "x dh", "gw"),
        compute("t5", "reduce_sum", "dh", "gb"),
        collective("c1", "all_reduce", "data", "gw gb", "gw.sum gb.sum", nbytes=80,
                   attributes={"reduce": "sum"}),
        collective("c0", "all_reduce", "data", "l", "loss", nbytes=4,
                   attributes={"reduce": "sum"}),
        compute("t6", "sgd", "w gw.sum", "w", attributes={"lr": 0.1, "nesterov": False}),
        compute("t7", "sum_squares", "gb.sum", "norm", after=("c0",)),
        compute("t8", "clipped_sgd", "b gb.sum norm", "b"),
    ]  # fmt: skip
    train = program("train", registers, tasks, outputs=(Output("loss", "loss"),), data="train",
                    seconds=0.01)  # fmt: skip
    save = program("save", [m.tensor("w.copy", (4, 4), "B", 480)], [
        compute("s0", "copy", "w", "w.copy"), write("s1", "w.copy"), write("s2", "b"),
    ])  # fmt: skip
    return m.plan([w, b], [init, train, save], 544, (data_set(),))


def sharded():
    """Six ranks on two axes, every collective, 5 rows over 2 x 3 parts."""
    m = Maker("data=2,model=3")
    v = m.variable("v", (6, 4), "B S(0)", 0)
    init = program("initialise", [], [compute("i0", "normal", "", "v")])
    registers = [
        m.tensor("x", (5, 4), "S(0) B", 32, slots=3),
        m.tensor("v.all", (6, 4), "B B", 176),
        m.tensor("h", (5, 6), "S(0) S(1)", 272),
        m.tensor("h.rows", (5, 6), "S(0) S(0)", 296),
        m.tensor("g", (6, 4), "P P", 176),
        m.tensor("g.part", (6, 4), "P S(0)", 320),
        m.tensor("g.sum", (6, 4), "B S(0)", 320, aliases="g.part"),
        m.tensor("l", (), "P P", 272),
        m.tensor("l.data", (), "B P", 276),
        m.tensor("l.all", (), "B B", 280),
    ]
    tasks = [
        read("r0", "x"),
        collective("c0", "all_gather", "model", "v", "v.all", attributes={"dim": 0}),
        compute("t1", "matmul", "x v.all", "h"),
        collective("c1", "all_to_all", "model", "h", "h.rows", workspace=(176, 48),
                   attributes={"source": 1, "target": 0}),
        compute("t2", "matmul", "x h.rows", "g"),
        collective("c2", "reduce_scatter", "model", "g", "g.part", attributes={"dim": 0}),
        collective("c3", "all_reduce", "data", "g.part", "g.sum", attributes={"reduce": "sum"}),
        compute("t3", "reduce_sum", "h.rows", "l"),
        collective("c4", "all_reduce", "data", "l", "l.data"),
        collective("c5", "all_reduce", "model", "l.data", "l.all"),
        compute("t4", "sgd", "v g.sum", "v"),
    ]  # fmt: skip
    train = program("train", registers, tasks, outputs=(Output("loss", "l.all", total=True),),
                    data="train")  # fmt: skip
    evaluate = program("evaluate", [m.tensor("l", (), "B B", 352)],
                       [compute("e0", "norm", "v", "l")],
                       outputs=(Output("norm", "l"),))  # fmt: skip
    return m.plan([v], [init, train, evaluate], 356, (data_set(),))


def flattened():
    """Six ranks on two axes, of which every collective takes both; 5 rows over 2 x 3 parts."""
    m = Maker("data=2,model=3")
    v = m.variable("v", (6, 4), "S(0) S(0)", 0)
    init = program("initialise", [], [compute("i0", "normal", "", "v")])
    registers = [
        m.tensor("x", (5, 4), "S(0) S(0)", 16, slots=3),
        m.tensor("v.all", (6, 4), "B B", 64),
        m.tensor("h", (5, 6), "S(0) S(1)", 160),
        m.tensor("h.turned", (5, 6), "S(1) S(0)", 184),
        m.tensor("g", (6, 4), "P P", 256),
        m.tensor("g.part", (6, 4), "S(0) S(0)", 352),
        m.tensor("l", (), "P P", 368),
        m.tensor("l.all", (), "B B", 372),
    ]
    tasks = [
        read("r0", "x"),
        collective("c0", "all_gather", "data,model", "v", "v.all", attributes={"dim": 0}),
        compute("t1", "matmul", "x v.all", "h"),
        collective("c1", "exchange", "data,model", "h", "h.turned", workspace=(208, 48)),
        compute("t2", "matmul", "x h.turned", "g"),
        collective("c2", "reduce_scatter", "data,model", "g", "g.part",
                   attributes={"dim": 0, "reduce": "sum"}),
        compute("t3", "reduce_sum", "h.turned", "l"),
        collective("c3", "all_reduce", "data,model", "l", "l.all", attributes={"reduce": "sum"}),
        compute("t4", "sgd", "v g.part", "v"),
    ]  # fmt: skip
    train = program("train", registers, tasks, outputs=(Output("loss", "l.all", total=True),),
                    data="train")  # fmt: skip
    return m.plan([v], [init, train], 376, (data_set(),))


def chain(length, streams=1):
    """`length` tasks of which each reads the one before, in two alternating buffers."""
    m = Maker("data=2")
    names = [f"a{i}" for i in range(length)]
    registers = [m.tensor(n, (), "B", 4 * (i % 2)) for i, n in enumerate(names)]
    tasks = [
        compute(f"t{i}", "relu", names[i - 1] if i else "", name) for i, name in enumerate(names)
    ]
    return m.plan([], [program("train", registers, tasks, outputs=(Output("y", names[-1]),))], 8)
