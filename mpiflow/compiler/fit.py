"""Layouts that fit: the cheapest that keep a memory limit, and what stands in the way of any.

cheapest_within    the choice of a problem's layouts under a limit on what they hold
within             planning again, with a tighter limit, until the plan itself keeps it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.bounds import Table
from mpiflow.compiler.budget import Budget, Held
from mpiflow.compiler.domains import DATA
from mpiflow.compiler.elimination import Solution, minimise
from mpiflow.compiler.limited import DoesNotFit, minimise_within
from mpiflow.compiler.zero import LEVELS, split_variables
from mpiflow.errors import CompileError
from mpiflow.graph.sbp import S

if TYPE_CHECKING:
    from mpiflow.compiler.signature import Problem

T = TypeVar("T")
_ROUNDS = 4
"""Plans that are made at most, each with a tighter limit."""
_SEARCHED = 6
"""Assignments among which the one of least memory is looked for."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `nbytes` on a rank, as a budget counts them.

    Where it is `free`, what ZeRO splits may be split over the axis `data`, each by itself. `zero`
    is the level whose lowering the bytes are counted for.
    """

    nbytes: float
    free: bool = False
    zero: int = 0


class TooLarge(CompileError):
    """No layouts were found that hold `limit` bytes at most; those of `choice` hold the least.

    `kept` is what they hold at node `peak`, the largest first.
    """

    def __init__(self, problem: Problem, budget: Budget, limit: float) -> None:
        self.choice = least_memory(problem, budget)
        profile = budget.profile(self.choice)
        at = int(profile.argmax())
        self.limit, self.least, self.peak = limit, float(profile[at]), budget.nodes[at]
        self.kept: list[tuple[Held, float]] = sorted(
            ((h, h.bytes_of(self.choice)) for h in budget.held if h.start <= at <= h.stop),
            key=lambda pair: -pair[1],
        )
        super().__init__(f"layouts hold {self.least:,.0f} bytes or more, not {limit:,.0f}")


class Intervals:
    """The live sets of a budget (`limited.Live`): what is held at each of its peaks."""

    def __init__(self, budget: Budget) -> None:
        self.starts = np.array([h.start for h in budget.held], np.intp)
        self.stops = np.array([h.stop for h in budget.held], np.intp)
        self.peaks = np.array(budget.peaks, np.intp)
        self.count = len(budget.nodes)

    def __len__(self) -> int:
        return len(self.peaks)

    def members(self, index: int) -> NDArray[np.intp]:
        """The numbers of what is held at a peak."""
        at = self.peaks[index]
        return np.flatnonzero((self.starts <= at) & (self.stops >= at))

    def used(self, each: Table) -> Table:
        """The bytes at each peak, given those of all that is held."""
        change = np.zeros(self.count + 1)
        np.add.at(change, self.starts, each)
        np.subtract.at(change, self.stops + 1, each)
        return np.cumsum(change)[self.peaks]


def cheapest_within(problem: Problem, budget: Budget, limit: float) -> Solution:
    """The cheapest choices that hold `limit` bytes at most.

    Never dearer than pure data parallel, a level of ZeRO or a split over the other axes that fits.
    Raises TooLarge.
    """
    scopes = [held.scope for held in budget.held]
    memory = [held.nbytes for held in budget.held]
    live = Intervals(budget)
    try:
        found = minimise_within(problem.unary, problem.pairs, memory, live, limit, scopes)
    except DoesNotFit as error:
        raise TooLarge(problem, budget, limit) from error
    best = Solution(found.choice, found.total, found.lower)
    if best.lower < best.total:
        for template in templates(problem):
            if template.total < best.total and budget.peak(template.choice) <= limit:
                best = Solution(template.choice, template.total, found.lower)
    return best


def templates(problem: Problem) -> Iterator[Solution]:
    """The cheapest of what people would write by hand.

    Each level of ZeRO, 0 is pure data parallel, with variables split over the other axes where
    that is best, and nowhere.
    """
    for level in LEVELS:
        split = split_variables(problem.graph, level)
        for whole in (False, True):
            found = minimise(_pinned(problem, split, whole), problem.pairs)
            if found.total < np.inf:
                yield found


def _pinned(problem: Problem, split: set[str], whole: bool) -> list[Table]:
    """Costs where only the named variables are split over `data`; if `whole`, all over no other."""
    costs = list(problem.unary)
    mesh = problem.choices.mesh
    for name, variable in problem.graph.variables.items():
        domain, _ = problem.position[variable.tensor]
        choices = problem.domains[domain]
        splits = [[isinstance(sbp, S) for sbp in choice.outputs[0]] for choice in choices]
        data = mesh.index(DATA) if DATA in mesh.names else -1
        wanted = [
            (data < 0 or axes[data] == (name in split))
            and not (whole and any(x for axis, x in enumerate(axes) if axis != data))
            for axes in splits
        ]
        if any(wanted):
            costs[domain] = np.where(wanted, costs[domain], np.inf)
    return costs


def least_memory(problem: Problem, budget: Budget) -> tuple[int, ...]:
    """Choices that hold little at their peak: the best of a few, whatever seconds they take.

    What is held at the peaks of those before has a price; the more often it was one, the higher.
    """
    live = Intervals(budget)
    zero = [np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.unary]
    forbidden = {pair: np.where(np.isfinite(t), 0.0, np.inf) for pair, t in problem.pairs.items()}
    largest = np.array([held.nbytes.max() for held in budget.held])
    price = np.zeros(len(budget.held))
    price[live.members(int(live.used(largest).argmax()))] = 1.0
    found: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(_SEARCHED):
        costs, pairs = list(zero), dict(forbidden)
        for member in np.flatnonzero(price).tolist():
            held = budget.held[member]
            priced = held.nbytes * price[member]
            if len(held.scope) == 1:
                costs[held.scope[0]] = costs[held.scope[0]] + priced
            else:
                a, b = held.scope
                pairs[a, b] = pairs[a, b] + priced
        choice = minimise(costs, pairs).choice
        used = live.used(np.array([held.bytes_of(choice) for held in budget.held]))
        found.append((float(used.max()), choice))
        price[live.members(int(used.argmax()))] += 1.0
    return min(found)[1]


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """Something that was planned: the bytes of its arena, and of them those of a budget."""

    made: T
    nbytes: int
    counted: float


def within(
    limit: int, free: Attempt[T], limits: Sequence[Limit], plan: Callable[[Limit], Attempt[T]]
) -> Attempt[T]:
    """A plan whose arena has `limit` bytes at most: `free`, or the first that `limits` give.

    The arena is a little larger than the budget that layouts are chosen by. What it exceeds the
    limit by is taken from the next budget. Raises TooLarge where no budget gives a plan that fits.
    """
    if free.nbytes <= limit:
        return free
    ratio = min(free.counted / free.nbytes, 1.0)
    failed: TooLarge | None = None
    for kind in limits:
        aimed = limit * ratio
        for _ in range(_ROUNDS):
            try:
                made = plan(replace(kind, nbytes=aimed))
            except TooLarge as error:
                if failed is None or error.least < failed.least:
                    failed = error
                if not aimed < error.least <= limit:
                    break
                aimed = error.least  # which leaves no other choice, but is the last that may fit
                continue
            if made.nbytes <= limit:
                return made
            aimed -= made.nbytes - limit
    if failed is None:
        raise CompileError(
            f"plans exceed the limit of {limit:,} bytes, though their layouts fit it"
        )
    raise failed
