"""What is folded has the times of what is not: compiled plans, and 64 ranks by themselves."""

import pytest
from unfolded import by_name, every_rank, firings, pipelined

from mpiflow.plan.simulator import simulate
from mpiflow.plan.straggler import straggler_lanes

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
