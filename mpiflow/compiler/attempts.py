"""Which of several plans of a job: under a limit on memory, layouts and recomputation are weighed.

all activations stay, the fastest layouts      if it fits, this is taken
all stay, layouts that fit                     what is split costs messages
the fastest layouts, some blocks again         what is computed again costs seconds
all blocks again, layouts that fit             if nothing else fits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpiflow.compiler.fit import Attempt, Limit, TooLarge, within
from mpiflow.compiler.recompute import AUTO, FULL, NONE

if TYPE_CHECKING:
    from mpiflow.compiler.arrange import Target

T = TypeVar("T")
Levels = str | tuple[str, ...]
"""A level of recomputation for all blocks, or one for each."""
Planner = Callable[[Limit | None], Attempt[T]]
"""Plans with the fastest layouts, or with some that keep a limit."""


def cheapest(
    target: Target,
    steps: Callable[[], Sequence[Levels]],
    limits: Sequence[Limit],
    planner: Callable[[Levels], Planner[T]],
    seconds: Callable[[T], float],
) -> Attempt[T]:
    """A plan that keeps the target's memory, if that is limited: the best by `seconds` of a few.

    `planner` plans with some levels of recomputation. Where the target names one, that is it. Under
    `auto` it is none if all fits, and what costs least if not; where the target names none, others
    are looked at only if no layouts fit. `steps` are levels of less and less memory. Raises
    TooLarge.
    """
    limit = target.memory
    named = target.recompute if target.recompute != AUTO else None
    plan = planner(named or NONE)
    made = plan(None)
    if not limit or made.nbytes <= limit:
        return made
    found: list[Attempt[T]] = []
    try:
        found.append(within(limit, made, limits, plan))
    except TooLarge:
        if named:
            raise
    if found and target.recompute != AUTO:
        return found[0]
    found += _first_that_fits(limit, steps(), planner)
    if found:
        return min(found, key=lambda attempt: seconds(attempt.made))
    plan = planner(FULL)
    return within(limit, plan(None), limits, plan)


def _first_that_fits(
    limit: int, steps: Sequence[Levels], planner: Callable[[Levels], Planner[T]]
) -> list[Attempt[T]]:
    """With the fastest layouts: the first of the steps whose plan fits, if there is any."""
    fits = planner(steps[-1])(None)
    if fits.nbytes > limit:
        return []
    low, high = 0, len(steps) - 1  # those before `low` are too large, `high` fits
    while low < high:
        middle = (low + high) // 2
        made = planner(steps[middle])(None)
        if made.nbytes <= limit:
            fits, high = made, middle
        else:
            low = middle + 1
    return [fits]
