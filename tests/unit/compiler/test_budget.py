"""What layouts hold, against the arenas of plans, and what is chosen under a limit on it."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from memory_jobs import arena, compiled, wide

from mpiflow.compiler.fit import Attempt, Limit, within
from mpiflow.errors import CompileError


@cache
def without_limit():
    """The plan of the wide layers on four ranks."""
    return compiled(wide(), "data=4")[0]


# -- choosing under a limit -----------------------------------------------------------------------


# -- plans ----------------------------------------------------------------------------------------


def test_a_limit_that_does_not_bind_changes_nothing():
    free = without_limit()
    loose, _ = compiled(wide(), "data=4", memory=arena(free))
    assert loose.layouts.limit == arena(free)
    assert replace(loose, layouts=free.layouts) == free
    assert free.layouts.gap == 0.0


@pytest.mark.parametrize("share", [0.8, 0.45])
def test_the_arena_of_a_plan_keeps_the_limit_by_splitting_what_zero_splits(share):
    free = without_limit()
    limit = int(share * arena(free))
    plan, placed = compiled(wide(), "data=4", memory=limit)
    assert arena(plan) <= limit
    assert any(str(v.layout[0]) != "B" for v in plan.variables)
    assert placed.lower <= placed.seconds
    assert plan == compiled(wide(), "data=4", memory=limit)[0]


def test_less_memory_takes_no_less_time():
    free = without_limit()
    sizes = [int(share * arena(free)) for share in (0.7, 0.5, 0.35)]
    seconds = [compiled(wide(), "data=4", memory=size)[0].layouts.seconds for size in sizes]
    assert all(a <= b for a, b in pairwise(seconds))


def test_a_pinned_level_is_kept_under_a_limit():
    free, _ = compiled(wide(), "data=4", zero=0)
    with pytest.raises(CompileError, match="no --zero 0, so that weights too may be split"):
        compiled(wide(), "data=4", zero=0, memory=arena(free) // 2)


def test_what_does_not_fit_says_what_is_in_the_way_and_what_would_help():
    job = wide(640)
    with pytest.raises(CompileError) as caught:
        compiled(job, "data=2", memory=3 << 20)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("classifier does not fit 3.00 MiB a rank on mesh data=2: of all lay")
    assert lines[1].startswith("  most is held at ")
    assert "jobs.py:" in lines[1]
    assert any("S(0)  640x4000 float32  jobs.py:" in line for line in lines[2:10])
    assert "more that hold" in lines[-2]
    assert "what would help: --micro-batches " in lines[-1]
    assert "ranks, data=" in lines[-1]


# -- rounds ---------------------------------------------------------------------------------------


def attempts(sizes):
    """Plans by the limits that were aimed at; and those limits."""
    aimed, left = [], iter(sizes)

    def plan(limit):
        aimed.append(limit.nbytes)
        return Attempt(len(aimed), next(left), lambda: 0.0)

    return plan, aimed


def test_the_limit_is_tightened_by_what_the_arena_exceeds_it_at_the_pace_of_the_last_two():
    plan, aimed = attempts([110, 104, 100])
    free = Attempt(0, 200, lambda: 190.0)
    assert within(100, free, [Limit(0.0)], plan).made == 3
    assert aimed == [95.0, 85.0, pytest.approx(85 - 4 * 10 / 6)]


def test_plans_that_never_fit_are_refused():
    plan, aimed = attempts([101] * 9)
    with pytest.raises(CompileError, match="smallest needs 101 B; take more"):
        within(100, Attempt(0, 200, lambda: 200.0), [Limit(0.0), Limit(0.0, True)], plan)
    assert len(aimed) == 8


def test_what_fits_is_planned_once():
    plan, aimed = attempts([])
    assert within(100, Attempt(7, 100, lambda: 0.0), [Limit(0.0)], plan).made == 7
    assert aimed == []
