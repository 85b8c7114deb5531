"""What is not needed is not held: gradients of a micro-batch, copies for updates, workspaces."""

from dataclasses import replace

from jobs import classifier, compile_for

from mpiflow.compiler.lower import in_phases
from mpiflow.compiler.memory import blocks_of
from mpiflow.graph.sbp import B
from mpiflow.plan.records import COMPUTE, Program, Register, Task


def train_program(mesh, **more):
    plan = compile_for(mesh, replace(classifier(), **more))
    return next(p for p in plan.programs if p.name == "train")


def test_a_gradient_is_added_up_before_the_next_one_is_made():
    program = train_program("data=1", micro_batches=4)
    order = [program.tasks[i] for i in dict(program.order)[COMPUTE]]
    sums = [i for i, task in enumerate(order) if task.op == "Accumulate"]
    assert len(sums) >= 4
    assert all(set(order[i].inputs) <= set(order[i - 1].outputs) for i in sums)


def test_what_only_updates_take_of_a_variable_is_made_when_the_loop_has_ended():
    def compute(name, inputs, outputs, phase=0):
        return Task(name, "compute", COMPUTE, "Add", (inputs), (outputs), phase=phase)

    tasks = (
        compute("cast", ("weight",), ("cast",)),
        compute("slice", ("moment",), ("part",)),
        compute("forward", ("cast",), ("y",), phase=1),
        compute("update", ("part", "y"), ("moment",)),
    )
    registers = [Register(name, (4,), "float32", (B,), 0, 16) for name in ("cast", "part", "y")]
    found = in_phases(Program("train", 4, tuple(registers), tasks, ()))
    assert {t.name: t.phase for t in found.tasks} == {
        "cast": 0, "slice": 2, "forward": 1, "update": 2
    }  # fmt: skip


def test_messages_of_a_stream_that_are_ready_early_have_two_workspaces():
    sizes = (100, 300, 200, 300)
    makers = [Task(f"make{i}", "compute", COMPUTE, "Add", (), (f"x{i}",)) for i in range(4)]
    sends = [
        Task(
            f"send{i}", "collective", "comm", "reduce_scatter", (f"x{i}",), (f"y{i}",),
            workspace=(0, size),
        )
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    last = Task("last", "compute", COMPUTE, "Add", tuple(f"y{i}" for i in range(4)), ("z",))
    order = ((COMPUTE, (0, 1, 2, 3, 8)), ("comm", (4, 5, 6, 7)))
    registers = [Register(f"{x}{i}", (4,), "float32", (B,), 0, 1) for x in "xy" for i in range(4)]
    program = Program("train", 4, tuple(registers), (*makers, *sends, last), order)
    blocks = [block for block in blocks_of(program, set()) if len(block.parts) > 1]
    assert sorted(block.nbytes for block in blocks) == [200, 300]
