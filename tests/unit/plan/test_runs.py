"""What is folded has the times of what is not: tasks in runs, ranks in lanes."""

import pytest
from random_plans import random_plan
from unfolded import by_name, firings, in_quanta, pipelined

from mpiflow.errors import UsageError, VerifyError
from mpiflow.plan.runs import runs_of
from mpiflow.plan.simulator import simulate
from mpiflow.plan.straggler import straggler_lanes


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
