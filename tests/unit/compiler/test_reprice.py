"""A plan priced from what it says of its tasks has the prices of one that is compiled."""

from dataclasses import replace

import pytest
from jobs import classifier, compile_for

import mpiflow as mf
from mpiflow.compiler.machine import Curve, Kernel, Piece, find_machine
from mpiflow.compiler.reprice import repriced
from mpiflow.plan.records import RECEIVE, SEND
from mpiflow.plan.store import dumps, loads

FORMS = [
    ("data=3", 1, 0), ("data=3", 4, 0), ("data=2,model=2", 1, 0), ("data=3", 1, 2),
    ("stage=2,data=2", 4, 0), ("model=3", 1, 0),
]  # fmt: skip


def compiled(mesh, micro_batches, zero):
    job = classifier(hidden="B" if "stage" in mesh else "S(1)", optimizer=mf.Adam(lr=0.01))
    return compile_for(mesh, replace(job, micro_batches=micro_batches), zero=zero)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_plan_priced_for_its_own_machine_is_itself(form):
    plan = compiled(*form)
    again = repriced(plan, find_machine("cpu"))
    for ours, theirs in zip(plan.programs, again.programs, strict=True):
        for task, other in zip(ours.tasks, theirs.tasks, strict=True):
            assert other.seconds == pytest.approx(task.seconds, rel=2e-3), task
        assert theirs.seconds == pytest.approx(ours.seconds, rel=2e-3)


def test_another_machine_changes_seconds_and_nothing_else():
    plan = compiled("data=2,model=2", 1, 0)
    gpu = find_machine("h100")
    again = repriced(plan, replace(gpu, overlap=False))
    assert (again.machine, again.overlap) == ("h100", False)
    same = tuple(replace(p, seconds=0.0, tasks=tuple(replace(t, seconds=0.0) for t in p.tasks))
                 for p in again.programs)  # fmt: skip
    wanted = tuple(replace(p, seconds=0.0, tasks=tuple(replace(t, seconds=0.0) for t in p.tasks))
                   for p in plan.programs)  # fmt: skip
    assert same == wanted
    launches = [t.seconds for t in again.program("train").tasks if t.kind == "compute"]
    assert min(launches) == pytest.approx(gpu.launch, rel=1e-2)


def test_an_op_that_was_measured_takes_its_multiple_of_the_roofline():
    plan, cpu = compiled("data=3", 1, 0), find_machine("cpu")
    slow = replace(cpu, kernels={"MatMul": Kernel(0.5, 2.0)})
    tasks = zip(plan.program("train").tasks, repriced(plan, slow).program("train").tasks,
                strict=True)  # fmt: skip
    for ours, theirs in tasks:
        wanted = 0.5 + 2 * (ours.seconds - cpu.launch) if ours.op == "MatMul" else ours.seconds
        assert theirs.seconds == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize("form", [("data=3", 1, 0), ("stage=2,data=2", 4, 0)], ids=str)
def test_messages_take_their_overhead_from_kernels_on_a_machine_that_knows_it(form):
    plan, cpu = compiled(*form), find_machine("cpu")
    known = replace(cpu.inner, overhead=Curve((Piece(0.0, 1e-3, 0.0),)))
    slow = repriced(plan, replace(cpu, inner=known, overlap=True))
    wanted = {"collective": 2e-3, SEND: 1e-3, RECEIVE: 1e-3}
    for task in (task for program in slow.programs for task in program.tasks):
        assert task.overhead == wanted.get(task.kind, 0.0), task
    quick = repriced(plan, replace(cpu, overlap=True))
    assert slow.program("train").seconds > quick.program("train").seconds + 1e-3
    assert loads(dumps(slow)) == slow
