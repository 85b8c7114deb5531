"""The steps from a lowered program to a placed one: fuse, bucket, schedule, memory."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from jobs import CLASSES, classifier_plan, compile_for, digits, digits_plan
from mutants import Facts

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.bucket import bucket
from mpiflow.compiler.build import Builder
from mpiflow.compiler.fuse import fuse
from mpiflow.compiler.machine import Link, find_machine
from mpiflow.compiler.memory import blocks_of, plan_memory
from mpiflow.compiler.order import in_order
from mpiflow.compiler.schedule import schedule
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import B, P
from mpiflow.ops import Fill
from mpiflow.ops.elementwise import Add, Scale
from mpiflow.ops.reduction import Expand, ReduceSum
from mpiflow.ops.shape import Reshape, StopGradient
from mpiflow.plan.records import Output, Program, Task
from mpiflow.plan.verify import verify

MACHINE = find_machine("cpu")
# Messages between nodes take so long that a sum over two axes is done on one after the other.
NODES = replace(MACHINE, devices_per_node=2, outer=Link(1e-4, 1e12, call=1e-4))
PLANS = {
    "digits": lambda: digits_plan("data=2"),
    "data": lambda: classifier_plan("data=3", 130),
    "model": lambda: classifier_plan("model=3", 130),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


class Draft:
    """Builds a program of float32 tensors on two ranks."""

    def __init__(self):
        self.build = Builder(parse_mesh("data=2"), MACHINE)

    def tensor(self, name, shape=(4,), layout=B):
        return self.build.register(name, shape, "float32", (layout,))

    def compute(self, op, inputs, output):
        self.build.compute(f"make {output.name}", op, inputs, [output], "here.py:1")
        return output

    def program(self, *outputs):
        shown = tuple(Output(o.name, o.name) for o in outputs)
        registers = tuple(self.build.registers.values())
        return Program("train", 4, registers, tuple(self.build.tasks), (), shown)


def ops_of(program):
    return [(task.op, task.inputs, task.outputs) for task in program.tasks]


def test_copies_within_a_layout_are_dropped():
    d = Draft()
    x = d.compute(Fill((4,), 1.0), [], d.tensor("x"))
    y = d.compute(StopGradient(), [x], d.tensor("y"))
    z = d.compute(ReduceSum((0,)), [y], d.tensor("z", ()))
    fused = fuse(d.program(z), set())
    assert ops_of(fused) == [("Fill", (), ("x",)), ("ReduceSum", ("x",), ("z",))]
    assert [r.name for r in fused.registers] == ["x", "z"]


def test_a_copy_of_a_variable_stays():
    d = Draft()
    w = d.tensor("w")
    y = d.compute(StopGradient(), [w], d.tensor("y"))
    z = d.compute(ReduceSum((0,)), [y], d.tensor("z", ()))
    assert len(fuse(d.program(z), {"w"}).tasks) == 2


def test_scalings_and_constants_merge_if_nobody_else_reads_between():
    d = Draft()
    x = d.compute(Fill((), 3.0), [], d.tensor("x", ()))
    a = d.compute(Scale(2.0), [x], d.tensor("a", ()))
    b = d.compute(Expand((0,), (4,)), [a], d.tensor("b"))
    c = d.compute(ReduceSum((0,)), [b], d.tensor("c", ()))
    e = d.compute(Scale(2.0), [c], d.tensor("e", ()))
    f = d.compute(Scale(0.5), [e], d.tensor("f", ()))
    fused = fuse(d.program(e, f), set())
    assert [task.op for task in fused.tasks] == ["Fill", "ReduceSum", "Scale", "Scale"]
    assert fused.tasks[0].attributes == {"shape": [4], "value": 6.0, "dtype": "float32"}
    assert [t.attributes["by"] for t in fused.tasks[2:]] == [2.0, 1.0]
    alone = fuse(d.program(f), set())
    assert [task.op for task in alone.tasks] == ["Fill", "ReduceSum", "Scale"]


def reductions(program):
    return [task for task in program.tasks if task.kind == "collective"]


def test_sums_that_may_wait_share_one_message_and_lie_side_by_side():
    d = Draft()
    sums = []
    for i, shape in enumerate([(4,), (3, 5), ()]):
        x = d.compute(Fill(shape, 1.0), [], d.tensor(f"x{i}", shape, P))
        sums.append(d.build.convert(x, (B,), "here.py:2"))
    program = bucket(d.program(*sums), d.build.mesh, MACHINE)
    (task,) = reductions(program)
    assert task.inputs == ("x0", "x1", "x2")
    placed = plan_memory((), (schedule(program),)).programs[0]
    offsets = {r.name: (r.offset, r.nbytes, r.aliases) for r in placed.registers}
    for a, b in pairwise(task.inputs):
        assert offsets[a][0] + offsets[a][1] == offsets[b][0]
    for a, b in zip(task.inputs, task.outputs, strict=True):
        assert offsets[b] == (offsets[a][0], offsets[a][1], a)


def test_a_sum_that_needs_another_is_not_fused_with_it():
    d = Draft()
    x = d.compute(Fill((4,), 1.0), [], d.tensor("x", layout=P))
    y = d.build.convert(x, (B,), "here.py:2")
    z = d.compute(Scale(2.0), [y], d.tensor("z", layout=P))
    last = d.build.convert(z, (B,), "here.py:3")
    program = bucket(d.program(last), d.build.mesh, MACHINE)
    assert [len(task.inputs) for task in reductions(program)] == [1, 1]


def test_a_sum_whose_parts_are_read_again_keeps_them():
    d = Draft()
    x = d.compute(Fill((4,), 1.0), [], d.tensor("x", layout=P))
    y = d.build.convert(x, (B,), "here.py:2")
    z = d.compute(Add(), [x, x], d.tensor("z", layout=P))
    last = d.build.convert(z, (B,), "here.py:3")
    program = bucket(d.program(y, last), d.build.mesh, MACHINE)
    aliases = {r.name: r.aliases for r in program.registers}
    assert aliases[y.name] == ""
    assert aliases[last.name] == "z"


@pytest.mark.parametrize("again", [False, True], ids=["read once", "read again"])
def test_a_reshape_is_a_view_of_what_nobody_needs_any_more(again):
    d = Draft()
    x = d.compute(Fill((2, 6), 1.0), [], d.tensor("x", (2, 6)))
    y = d.compute(Reshape((3, 4)), [x], d.tensor("y", (3, 4)))
    z = d.compute(Scale(2.0), [y], d.tensor("z", (3, 4)))
    last = d.compute(Scale(2.0), [x], d.tensor("last", (2, 6))) if again else z
    placed = plan_memory((), (schedule(d.program(z, last) if again else d.program(z)),))
    registers = {r.name: r for r in placed.programs[0].registers}
    assert registers["y"].aliases == ("" if again else "x")
    assert (registers["y"].offset == registers["x"].offset) is not again


def test_a_view_costs_no_more_than_its_call():
    def model(batch):
        x = mf.scale(mf.cast(batch["image"], "float32"), 0.5)
        flat = mf.reshape(x, (x.shape[0] * 3, 2))
        return {"loss": mf.mean(mf.square(nn.Dense(3, name="fc")(flat)))}

    train = digits().train
    plan = compile_for("data=2", mf.Job("views", model, train=train, optimizer=mf.SGD(lr=0.1)))
    program = plan.program("train")
    task = next(task for task in program.tasks if task.op == "Reshape")
    registers = {r.name: r for r in program.registers}
    assert registers[task.outputs[0]].aliases == task.inputs[0]
    assert (task.nbytes, task.flops, task.seconds) == (0, 0, MACHINE.launch)


def test_the_digits_send_one_message_a_step():
    (task,) = reductions(digits_plan("data=2").program("train"))
    assert task.op == "all_reduce"
    assert len(task.inputs) == 6  # four gradients, the loss and the accuracy


@every_plan
def test_members_of_a_bucket_lie_side_by_side(plan):
    plan = plan()
    for program in plan.programs:
        tensors = plan.tensors(program)
        for task in reductions(program):
            for a, b in pairwise(task.inputs):
                assert tensors[a].offset + tensors[a].nbytes == tensors[b].offset


def random_program(seed):
    """Tasks on three streams that need some of the earlier ones."""
    draw = random.Random(seed)
    streams = [("compute", "compute"), ("collective", "comm.data"), ("collective", "comm.model")]
    tasks = []
    for i in range(draw.randint(1, 40)):
        kind, stream = draw.choice(streams)
        after = tuple(t.name for t in tasks if draw.random() < 0.1)
        seconds = draw.choice([0.0, 1e-6, draw.random()])
        tasks.append(Task(f"t{i}", kind, stream, "op", after=after, seconds=seconds))
    return Program("train", 1, (), tuple(tasks), ())


@pytest.mark.parametrize("seeds", [range(100)], ids=str)
def test_a_schedule_has_every_task_once_and_can_run_in_its_order(seeds):
    for seed in seeds:
        program = schedule(random_program(seed))
        queues = {stream: list(order) for stream, order in program.order}
        assert sorted(i for q in queues.values() for i in q) == list(range(len(program.tasks)))
        done = set()
        while any(queues.values()):
            ready = [s for s, q in queues.items() if q and done >= set(program.tasks[q[0]].after)]
            assert ready, f"seed {seed}: every stream waits"
            for stream in ready:
                done.add(program.tasks[queues[stream].pop(0)].name)
        assert program == schedule(replace(program, order=()))


def test_tasks_are_put_in_order_where_they_stand_before_what_they_need():
    tasks = [Task(n, "compute", "compute", "op", after=tuple(a)) for n, a in
             [("a", "c"), ("b", ""), ("c", "d"), ("d", "b")]]  # fmt: skip
    ordered = in_order(Program("train", 1, (), tuple(tasks), ()))
    assert [t.name for t in ordered.tasks] == ["b", "d", "c", "a"]


def test_the_memory_of_the_digits_is_near_the_lower_bound():
    seen = {}
    compile_for("data=2", digits(), rows=1437, test_rows=360, features=64,
                observe=lambda step, program, result: seen.setdefault(step, result))  # fmt: skip
    packed = seen["memory"]
    assert packed.lower_bound - 64 < packed.nbytes <= 1.1 * packed.lower_bound


@every_plan
def test_buffers_share_bytes_only_if_one_is_done_with_before_the_other_begins(plan):
    plan = plan()
    for program in plan.programs:
        facts = Facts(plan, program)
        waits = facts.waits()

        def root(name, tensors=facts.tensors):
            while tensors[name].aliases:
                name = tensors[name].aliases
            return name

        users = {name: [] for name in facts.tensors}
        for i, task in enumerate(program.tasks):
            for name in {*task.inputs, *task.outputs}:
                users[root(name)].append(i)
        spans = [
            (t.offset, t.offset + t.slots * t.nbytes, users[name])
            for name, t in facts.tensors.items() if root(name) == name and users[name]
        ]  # fmt: skip
        spans += [
            (t.workspace[0], sum(t.workspace), [i])
            for i, t in enumerate(program.tasks) if t.workspace[1]
        ]  # fmt: skip
        for (a, a_stop, a_users), (b, b_stop, b_users) in combinations(spans, 2):
            if a < b_stop and b < a_stop:
                first = all(i in waits[j] for i in a_users for j in b_users)
                second = all(j in waits[i] for i in a_users for j in b_users)
                assert first or second, (program.name, a, b)


def test_a_chain_of_many_of_collectives_is_placed():
    d = Draft()
    x = d.compute(Fill((4,), 1.0), [], d.tensor("x0"))
    tasks, registers = list(d.build.tasks), list(d.build.registers.values())
    for i in range(1200):
        registers.append(replace(x, name=f"x{i + 1}"))
        tasks.append(Task(f"c{i}", "collective", "comm.data", "all_reduce", (f"x{i}",),
                          (f"x{i + 1}",), {"reduce": "sum"}, "data"))  # fmt: skip
    program = Program("train", 4, tuple(registers), tuple(tasks), ())
    program = replace(program, order=(("compute", (0,)), ("comm.data", tuple(range(1, 1201)))))
    assert len(blocks_of(program, set())) == 1201


def test_gradients_partial_over_two_axes_are_bucketed_on_both():
    """The second reductions work in place on what the first bucket has placed side by side."""

    def model(batch):
        x = mf.cast(batch["image"], "float32")
        for i in range(3):
            x = mf.relu(nn.Dense(256, name=f"d{i}")(x))
        logits = nn.Dense(CLASSES, name="out")(x)
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    job = mf.Job("deep", model, train=mf.Dataset("x", batch=1024), optimizer=mf.SGD(lr=0.1))
    plan = compile_for("data=2,model=2", job, rows=2048, features=64, machine=NODES)
    verify(plan)
    train = plan.program("train")
    sums = [task for task in reductions(train) if task.op == "all_reduce"]
    reduced = {name: task for task in sums for name in task.outputs}
    again = [task for task in sums if len(task.inputs) > 1 and task.inputs[0] in reduced]
    assert again
    for task in again:
        assert len({reduced[name].name for name in task.inputs}) == 1


def reducing_program(seed):
    """Sums over one or two axes, one after the other, of what came from earlier sums."""
    draw = random.Random(seed)
    build = Builder(parse_mesh("data=2,model=2"), NODES)
    held = [build.register("x", (4,), "float32", (B, B))]
    build.compute("make x", Fill((4,), 1.0), [], held[:1], "here.py:1")
    for i in range(draw.randint(2, 25)):
        layout = draw.choice([(P, B), (B, P), (P, P), (B, B)])
        made = build.register(f"y{i}", (4,), "float32", layout)
        inputs = [draw.choice(held[-draw.choice([1, 4, 99]) :]) for _ in range(2)]
        build.compute(f"make y{i}", Add(), inputs, [made], "here.py:1")
        held.append(build.convert(made, (B, B), "here.py:2"))
    registers = tuple(build.registers.values())
    return Program("train", 4, registers, tuple(build.tasks), ()), build.mesh


@pytest.mark.parametrize("seeds", [range(60)], ids=str)
def test_buckets_make_no_circles_and_lose_no_sum(seeds):
    fused = 0
    for seed in seeds:
        program, mesh = reducing_program(seed)
        bucketed = bucket(program, mesh, NODES)
        tasks = {task.name: i for i, task in enumerate(bucketed.tasks)}
        for name, needs in bucketed.needs().items():
            assert all(tasks[need] < tasks[name] for need in needs)
        before, after = (
            sorted(pair for t in reductions(p) for pair in zip(t.inputs, t.outputs, strict=True))
            for p in (program, bucketed)
        )
        assert before == after
        fused += sum(len(task.inputs) > 1 for task in reductions(bucketed))
    assert fused > 20


def test_what_is_needed_soon_does_not_wait_for_what_nobody_needs_yet():
    d = Draft()
    x = d.compute(Fill((4,), 1.0), [], d.tensor("x", layout=P))
    ends = [d.build.convert(x, (B,), "here.py:2")]
    y = d.compute(Fill((4,), 1.0), [], d.tensor("y", layout=P))
    soon = d.build.convert(y, (B,), "here.py:3")
    z = d.compute(Scale(2.0), [soon], d.tensor("z", layout=P))
    ends.append(d.build.convert(z, (B,), "here.py:4"))
    program = bucket(d.program(*ends), d.build.mesh, MACHINE)
    assert sorted(task.inputs for task in reductions(program)) == [("x", "z"), ("y",)]
