"""What is folded has the times of what is not: tasks in runs, ranks in lanes."""

from dataclasses import replace
from functools import cache

import pytest
from jobs import classifier, compile_for
from random_plans import random_plan
from unfolded import every_rank, firings

import mpiflow as mf
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.errors import UsageError, VerifyError
from mpiflow.plan.runs import runs_of
from mpiflow.plan.simulator import simulate
from mpiflow.plan.straggler import straggler_lanes

QUANTUM = 2.0**-48


def in_quanta(plan):
    """With seconds that the simulator takes as they are."""
    programs = tuple(
        replace(p, tasks=tuple(replace(t, seconds=round(t.seconds / QUANTUM) * QUANTUM)
                               for t in p.tasks))
        for p in plan.programs
    )  # fmt: skip
    return replace(plan, programs=programs)


@cache
def pipelined(mesh, micro_batches=1, schedule="1f1b", virtual=1, hidden="B"):
    job = classifier(hidden=hidden, optimizer=mf.Adam(lr=0.01, clip=1.0))
    job = replace(job, micro_batches=micro_batches)
    return in_quanta(compile_for(mesh, job, pipeline=Pipeline(schedule, virtual)))


def by_name(events):
    return sorted((e.step, e.task, e.stream, e.start, e.stop) for e in events)


PLANS = [
    ("data=3", 1), ("data=2", 4), ("data=2,model=2", 2), ("stage=2", 1), ("stage=2,data=2", 4),
    ("stage=4", 16), ("stage=3", 8, "zero-bubble"), ("stage=2", 8, "gpipe"),
    ("stage=2", 4, "interleaved", 2), ("stage=2,model=2", 4, "1f1b", 1, "S(1)"),
]  # fmt: skip


@pytest.mark.parametrize("form", PLANS, ids=str)
def test_runs_have_the_times_of_every_firing_by_itself(form):
    plan = pipelined(*form)
    for name in dict.fromkeys(program.name for program in plan.programs):
        found = simulate(plan, name, 3).events
        assert by_name(found) == by_name(firings(plan, name, 3)), name


@pytest.mark.parametrize("seed", range(60))
def test_runs_of_any_plan_have_the_times_of_its_tasks_or_wait_in_a_circle_too(seed):
    plan = in_quanta(random_plan(seed))
    try:
        wanted = by_name(firings(plan, "train", 3))
    except VerifyError:
        runs = runs_of(plan, "train")
        assert len(runs.order) < len(runs.runs)
        return
    assert by_name(simulate(plan, "train", 3).events) == wanted


def times(simulation):
    """The ends of all steps, and by stage what its lanes can have of each kind of stream."""
    found = {}
    for one in simulation.lanes:
        found.setdefault((one.lane.stage, one.lane.factor), set()).add((one.busy, one.exposed))
    return simulation.ends, found


@pytest.mark.parametrize(
    "form", [("stage=4,data=16", 8), ("data=16,model=4", 1), ("stage=2,data=8,model=4", 4)], ids=str
)
def test_64_ranks_by_themselves_have_the_times_of_folded_ones(form):
    plan = pipelined(*form)
    assert times(simulate(plan, lanes=every_rank(plan))) == times(simulate(plan))


@pytest.mark.parametrize("rank", [0, 13, 41])
@pytest.mark.parametrize("form", [("data=16,model=4", 1), ("stage=2,data=8,model=4", 4)], ids=str)
def test_a_slow_rank_among_64_has_the_times_of_every_rank_by_itself(form, rank):
    plan = pipelined(*form)
    alone = simulate(plan, lanes=every_rank(plan, {rank: 1.5}))
    classes = straggler_lanes(plan, f"1.5@{rank}")
    folded = simulate(plan, lanes=classes)
    assert sum(lane.ranks for lane in classes) == 64
    assert len(classes) == 4 * plan.mesh.stages
    assert times(alone) == times(folded)
    assert dict(folded.exposed) == pytest.approx(dict(alone.exposed))
    assert folded.step_seconds > simulate(plan).step_seconds


def test_a_slow_stage_is_all_its_ranks():
    plan = pipelined("stage=2,data=8,model=4", 4)
    slow = [plan.mesh.rank_in_stage(1, within) for within in range(32)]
    alone = simulate(plan, lanes=every_rank(plan, dict.fromkeys(slow, 1.5)))
    assert simulate(plan, lanes=straggler_lanes(plan, "1.5@stage=1")).ends == alone.ends


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("fast", "give FACTOR@RANK"), ("1.3@", "give FACTOR@RANK"), ("1.3.1@0", "no number"),
        ("0@1", "more than 0"), ("1.3@64", "64 ranks, 0 to 63"),
        ("1.3@stage=2", "2 stages, 0 to 1"),
    ],
)  # fmt: skip
def test_who_is_slow_must_be_there(text, match):
    with pytest.raises(UsageError, match=match):
        straggler_lanes(pipelined("stage=2,data=8,model=4", 4), text)
