"""Layouts that fit: the cheapest that keep a memory limit, and what stands in the way of any.

cheapest_within    the choice of a problem's layouts under a limit on what they hold
within             planning again, with a tighter limit, until the plan itself keeps it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.assignments import DoesNotFit
from mpiflow.compiler.bounds import Table
from mpiflow.compiler.budget import Budget, Held, Share, budget
from mpiflow.compiler.domains import DATA
from mpiflow.compiler.elimination import Pairs, Solution, minimise
from mpiflow.compiler.limited import NotFound, minimise_within
from mpiflow.compiler.zero import LEVELS, split_variables
from mpiflow.errors import CompileError
from mpiflow.graph.sbp import S
from mpiflow.plan.text import size_text

if TYPE_CHECKING:
    from mpiflow.compiler.signature import Placed, Problem

T = TypeVar("T")
_CLOSE = 1e-3
"""The share of the seconds that is not worth a comparison with what people would write."""
_ROUNDS = 4
"""Plans that are made at most, each with a tighter limit."""
_STEEPEST = 4.0
"""How many bytes less a budget is at most for each byte that an arena is to be smaller."""
_SEARCHED, _DEAR = 3, 100.0
"""Assignments among which one of little memory is looked for, and how many times the seconds of
the fastest all of its memory costs then."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `nbytes` on a rank, as a budget counts them.

    Where it is `free`, what ZeRO splits may be split over the axis `data`, each by itself. `zero`
    is the level whose lowering the bytes are counted for. `shares` are those of the pipeline stages
    with these layouts; none, where a rank has all.
    """

    nbytes: float
    free: bool = False
    zero: int = 0
    shares: tuple[Share, ...] = ()

    def budget(self, problem: Problem) -> Budget:
        """What the choices of a problem hold, as this limit counts it."""
        return budget(problem, scatter=self.zero > 1, again=self.zero > 2, shares=self.shares)


class TooLarge(CompileError):
    """No layouts were found that hold `limit` bytes at most; those of `choice` hold the least.

    `kept` is what they hold at node `peak`, the largest first. `arena` is the smallest of plans
    that were made, 0 where none was.
    """

    arena = 0

    def __init__(self, problem: Problem, held: Budget, limit: float) -> None:
        self.choice = least_memory(problem, held)
        profile = held.profile(self.choice)
        at = int(profile.argmax())
        self.limit, self.least, self.peak = limit, float(profile[at]), held.nodes[at]
        self.kept: list[tuple[Held, float]] = sorted(
            ((one, one.bytes_of(self.choice)) for one in held.held if one.start <= at <= one.stop),
            key=lambda pair: -pair[1],
        )
        super().__init__(f"layouts hold {self.least:,.0f} bytes or more, not {limit:,.0f}")


class Intervals:
    """The live sets of a budget (`limited.Live`): what is held at each of its peaks."""

    def __init__(self, held: Budget) -> None:
        self.starts = np.array([one.start for one in held.held], np.intp)
        self.stops = np.array([one.stop for one in held.held], np.intp)
        self.peaks = np.array(held.peaks, np.intp)
        self.count = len(held.nodes)
        self.firsts = np.array(held.firsts, np.intp)

    def __len__(self) -> int:
        return len(self.peaks)

    def members(self, index: int) -> NDArray[np.intp]:
        """The numbers of what is held at a peak."""
        at = self.peaks[index]
        return np.flatnonzero((self.starts <= at) & (self.stops >= at))

    def parts(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The share that each peak belongs to, and what is held."""
        places = (self.peaks, self.starts)
        peaks, held = (np.searchsorted(self.firsts, at, side="right") - 1 for at in places)
        return peaks, held

    def used(self, each: Table) -> Table:
        """The bytes at each peak, given those of all that is held."""
        change = np.zeros(self.count + 1)
        np.add.at(change, self.starts, each)
        np.subtract.at(change, self.stops + 1, each)
        return np.cumsum(change)[self.peaks]


def cheapest_within(problem: Problem, held: Budget, limit: float) -> Solution:
    """The cheapest choices that hold `limit` bytes at most.

    Never dearer, by more than _CLOSE, than pure data parallel, a level of ZeRO or a split over the
    other axes that fits. Raises TooLarge.
    """
    scopes = [one.scope for one in held.held]
    memory = [one.nbytes for one in held.held]
    live = Intervals(held)
    try:
        found = minimise_within(problem.unary, problem.pairs, memory, live, limit, scopes)
    except (DoesNotFit, NotFound) as error:
        raise TooLarge(problem, held, limit) from error
    best = Solution(found.choice, found.total, found.lower)
    if found.gap > _CLOSE:
        for level in LEVELS:
            best = _cheaper(problem, held, limit, best, level)
    return best


def _cheaper(problem: Problem, held: Budget, limit: float, best: Solution, level: int) -> Solution:
    """The cheaper of `best` and what people would write by hand, if it fits.

    That is a level of ZeRO, where 0 is pure data parallel, with variables split over other axes
    wherever that is fastest; and if this does not fit, split over none.
    """
    for whole in (False, True):
        template = minimise(_pinned(problem, level, whole), problem.pairs)
        if not template.total < best.total:
            break  # what is split over none is among those of the other kind
        if held.peak(template.choice) <= limit:
            return Solution(template.choice, template.total, best.lower)
    return best


def _pinned(problem: Problem, level: int, whole: bool) -> list[Table]:
    """Costs where a level of ZeRO says what is split over `data`; if `whole`, none over others."""
    split = split_variables(problem.graph, level)
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


def least_memory(problem: Problem, held: Budget) -> tuple[int, ...]:
    """Choices that hold little at their peak: the best of a few, almost whatever they take.

    What is held at the peaks of those before has a price, the higher the more often it was one.
    """
    live = Intervals(held)
    free = minimise(problem.unary, problem.pairs)
    used = live.used(held.bytes_at(free.choice))
    found = [(float(used.max()), free.choice)]
    unit = _DEAR * abs(free.total) / max(used.max(), 1.0)
    price = np.zeros(len(held.held))
    for _ in range(_SEARCHED):
        price[live.members(int(used.argmax()))] += unit
        choice = minimise(*_with_prices(problem, held, price)).choice
        used = live.used(held.bytes_at(choice))
        found.append((float(used.max()), choice))
    return min(found)[1]


def _with_prices(problem: Problem, held: Budget, price: Table) -> tuple[list[Table], Pairs]:
    """The costs of a problem, with a price for each byte of what is held."""
    costs, pairs = list(problem.unary), dict(problem.pairs)
    for member in np.flatnonzero(price).tolist():
        one = held.held[member]
        priced = one.nbytes * price[member]
        if len(one.scope) == 1:
            costs[one.scope[0]] = costs[one.scope[0]] + priced
        else:
            a, b = one.scope
            pairs[a, b] = pairs[a, b] + priced
    return costs, pairs


def held_bytes(placed: Placed, shares: tuple[Share, ...] = ()) -> float:
    """What a rank holds at the peak, as a limit counts it; of stages the one that holds most."""
    return max(held_by_share(placed, shares))


def held_by_share(placed: Placed, shares: tuple[Share, ...] = ()) -> list[float]:
    """What a rank of each stage holds at the peak, as a limit counts it."""
    zero = placed.limit.zero if placed.limit else 0
    held = budget(placed.problem, scatter=zero > 1, again=zero > 2, shares=shares)
    profile = held.profile(placed.choice)
    ends = (*held.firsts[1:], len(profile))
    return [float(profile[a:b].max(initial=0.0)) for a, b in zip(held.firsts, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """Something that was planned: the bytes of its arena, and how many a budget counts of them.

    Where they are `guessed`, it has too many for certain, and no offsets were looked for.
    """

    made: T
    nbytes: int
    counted: Callable[[], float]
    guessed: bool = False


def _pace(tried: Sequence[tuple[float, int]]) -> float:
    """How much less a budget must be for each byte that an arena is to be smaller.

    That is as much, or as the last two budgets and arenas were apart, if that is more.
    """
    if len(tried) < 2:
        return 1.0
    (budget, arena), (next_budget, next_arena) = tried[-2:]
    if not next_arena < arena:
        return _STEEPEST
    return min(max((budget - next_budget) / (arena - next_arena), 1.0), _STEEPEST)


def within(
    limit: int,
    free: Attempt[T],
    limits: Sequence[Limit],
    plan: Callable[[Limit], Attempt[T]],
) -> Attempt[T]:
    """A plan whose arena has `limit` bytes at most: `free`, or the first that `limits` give.

    The arena is a little larger than the budget that layouts are chosen by. What it exceeds the
    limit by, times `_pace`, is taken from the next budget. Raises TooLarge where no budget gives a
    plan that fits.
    """
    if free.nbytes <= limit:
        return free
    ratio = min(free.counted() / free.nbytes, 1.0)
    failed: TooLarge | None = None
    arenas = [] if free.guessed else [free.nbytes]
    for kind in limits:
        aimed, tried = limit * ratio, list[tuple[float, int]]()
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
            arenas.append(made.nbytes)
            tried.append((aimed, made.nbytes))
            aimed -= (made.nbytes - limit) * _pace(tried)
    if failed is None:
        raise CompileError(
            f"the job does not fit {size_text(limit)} a rank: of the plans that were made the"
            f" smallest needs {size_text(min(arenas))}; take more micro-batches or ranks,"
            " --recompute auto or full, a smaller batch, or a larger --memory"
        )
    failed.arena = min(arenas, default=0)
    raise failed
