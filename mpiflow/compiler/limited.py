"""The cheapest choice of each variable under a memory limit: Lagrangian relaxation, then HiGHS.

Where the cheapest of all fits, that is it. Otherwise memory gets a price, so that `minimise` still
solves the problem; at the prices of the best lower bound, several assignments are equally cheap,
some too large and some smaller than they need be. The choices seen on the way there are few, and
HiGHS finds the best mixture that fits. Small problems, those that `minimise` cannot prove, and
those where a wide gap is left, go to HiGHS as a whole. Work is limited in steps and nodes, never by
the clock, so that the same problem always has the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from mpiflow.compiler import highs
from mpiflow.compiler.bounds import Table
from mpiflow.compiler.elimination import Indices, Pairs, Solution, minimise
from mpiflow.compiler.highs import Scope
from mpiflow.errors import CompileError

_SMALL, _LARGE = 2_000, 500_000
"""Entries of all tables of a problem that HiGHS solves as a whole, and at most if it has to."""
_STEPS, _NODES = 24, 500
"""Assignments that the search for prices makes at most, and nodes that HiGHS visits."""
_CLOSE, _NEAR, _EXACT = 1e-3, 1e-3, 1e-9
"""Shares of the sum at which the search for prices ends, that among few choices, that of all."""
_WEAK = 1e-2
"""The gap from which HiGHS takes a problem as a whole, if it is not too large."""
_DEAREST = 1e6
"""The factor by which the highest price may grow until the limit is taken to be impossible."""
_APART, _MANY = 16, 4
"""Of the sets that an assignment exceeds, so many are told, which are at least this part of all
sets apart: those in between are much like them."""
_TIGHTER = (0.0, 1e-6, 1e-4)
"""Shares by which the limit is lowered while HiGHS exceeds it within its tolerance."""
_FORBIDDEN = "no layouts avoid all conversions that are impossible; give fewer hints"


@dataclass(frozen=True, slots=True)
class Limited:
    """A choice for each variable, the sum of their costs, and the memory of the largest live set.

    No assignment that fits has a sum below `lower`.
    """

    choice: tuple[int, ...]
    total: float
    lower: float
    memory: float

    @property
    def gap(self) -> float:
        """The share of the sum that a better assignment could save at most."""
        return (self.total - self.lower) / abs(self.total) if self.total > self.lower else 0.0


class DoesNotFit(CompileError):
    """No assignment keeps the limit: no limit below `least` can be kept, for the set `live`."""

    def __init__(self, live: int, size: int, least: float, limit: float) -> None:
        super().__init__(
            f"live set {live}, of {size} members, needs {least:,.0f} bytes or more,"
            f" {least - limit:,.0f} above the limit of {limit:,.0f}; raise the limit, or allow"
            " choices that need less"
        )
        self.live, self.least, self.limit = live, least, limit


def minimise_within(
    costs: Sequence[Table],
    pairs: Pairs,
    memory: Sequence[Table],
    live: Live | Sequence[Sequence[int]],
    limit: float,
    scopes: Sequence[Scope] | None = None,
) -> Limited:
    """The cheapest choices where the memory of the members of each live set is `limit` at most.

    A member is a table of `memory`, in bytes and not negative: that of the variable of its number,
    or by the choices of the one or two variables (a < b, which are a pair) that `scopes` names.
    Costs, and the tables of pairs (a < b), may be infinite: these are never chosen. Raises
    DoesNotFit where nothing fits, and CompileError where nothing avoids infinite costs, or where
    neither is found out with the work that is allowed.
    """
    problem = _Problem(
        [np.asarray(c, np.float64) for c in costs],
        {pair: np.asarray(pairs[pair], np.float64) for pair in sorted(pairs)},
        [np.asarray(m, np.float64) for m in memory],
        [(v,) for v in range(len(memory))] if scopes is None else scopes,
        _Listed(live) if isinstance(live, Sequence) else live,
        float(limit),
    )
    problem.check_each_set()
    free = _minimise_priced(problem, np.zeros(len(live)))
    if free is not None and free.total == np.inf:
        raise CompileError(_FORBIDDEN)
    seen = _Seen(problem)
    if free is not None:
        fits = seen.add(free.choice, free.lower)
        if fits and _is_proven(free):
            return problem.limited(free.choice, free.total)
    if free is None or not _may_go_on(problem, free) or problem.entries <= _SMALL:
        return _solve_whole(problem, seen)
    if _search_prices(problem, seen):
        _solve_among(problem, seen)
    best = seen.best()
    if best is None or (best.gap > _WEAK and problem.entries <= _LARGE):
        return _solve_whole(problem, seen)
    return best


class NotFound(CompileError):
    """The work that is allowed does not tell whether anything fits."""

    def __init__(self, limit: float) -> None:
        super().__init__(
            f"no layouts were found that fit {limit:,.0f} bytes, though there may be some; raise"
            " the limit, or give hints"
        )


class Live(Protocol):
    """Sets of members that are alive at once, in the order of time: neighbours are much alike."""

    def __len__(self) -> int: ...

    def members(self, index: int) -> Indices:
        """The numbers of the members of a set."""

    def used(self, each: Table) -> Table:
        """The sum over the members of each set, given that of each member."""


class _Listed:
    """Live sets that are given one by one."""

    def __init__(self, live: Sequence[Sequence[int]]) -> None:
        self.sets = [np.asarray(members, np.intp) for members in live]
        self.joined = np.concatenate([np.zeros(0, np.intp), *self.sets])
        self.owner = np.repeat(np.arange(len(live)), [len(members) for members in live])

    def __len__(self) -> int:
        return len(self.sets)

    def members(self, index: int) -> Indices:
        return self.sets[index]

    def used(self, each: Table) -> Table:
        used = np.bincount(self.owner, each[self.joined], len(self.sets))
        return used.astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is given."""

    costs: list[Table]
    pairs: Pairs
    memory: list[Table]
    scopes: Sequence[Scope]
    live: Live
    limit: float

    @property
    def entries(self) -> int:
        """Of all tables of costs."""
        return sum(map(len, self.costs)) + sum(table.size for table in self.pairs.values())

    def limits(self, sets: Iterable[int], share: float = 1.0) -> highs.Limits:
        """The limit, or a share of it, on some of the live sets."""
        live = [self.live.members(index) for index in sets]
        return highs.Limits(self.memory, live, self.limit * share, self.scopes)

    def memory_of(self, choice: Sequence[int]) -> Table:
        """The memory of each live set."""
        tables = zip(self.memory, self.scopes, strict=True)
        each = [m[tuple(choice[v] for v in scope)] for m, scope in tables]
        return self.live.used(np.array(each, np.float64))

    def cost_of(self, choice: Sequence[int]) -> float:
        total = sum((float(c[i]) for c, i in zip(self.costs, choice, strict=True)), 0.0)
        return total + sum(float(t[choice[a], choice[b]]) for (a, b), t in self.pairs.items())

    def limited(self, choice: tuple[int, ...], lower: float) -> Limited:
        """The result; a bound that differs from the sum by rounding is the sum."""
        total = self.cost_of(choice)
        if total - lower <= _EXACT * abs(total):
            lower = total
        return Limited(choice, total, lower, float(self.memory_of(choice).max(initial=0.0)))

    def check_each_set(self) -> None:
        """Raise where a live set exceeds the limit even with the least memory of each member."""
        possible = [np.flatnonzero(np.isfinite(cost)) for cost in self.costs]
        if not all(map(len, possible)):
            raise CompileError(_FORBIDDEN)
        tables = zip(self.memory, self.scopes, strict=True)
        each = [_taken(m, [possible[v] for v in scope]).min() for m, scope in tables]
        least = self.live.used(np.array(each, np.float64))
        if least.max(initial=0.0) > self.limit:
            raise self.does_not_fit(least, float(least.max()))

    def does_not_fit(self, memory: Table, least: float) -> DoesNotFit:
        """The error for the largest live set, by the memory of each."""
        worst = int(memory.argmax())
        return DoesNotFit(worst, len(self.live.members(worst)), least, self.limit)

    def among(self, kept: list[Indices]) -> _Problem:
        """The problem with some of the choices only."""
        costs = [c[k] for c, k in zip(self.costs, kept, strict=True)]
        pairs = {pair: _taken(t, [kept[v] for v in pair]) for pair, t in self.pairs.items()}
        tables = zip(self.memory, self.scopes, strict=True)
        memory = [_taken(m, [kept[v] for v in scope]) for m, scope in tables]
        return replace(self, costs=costs, pairs=pairs, memory=memory)


def _taken(table: Table, kept: list[Indices]) -> Table:
    """A table with some of the choices of each dim only."""
    for dim, indices in enumerate(kept):
        table = table.take(indices, dim)
    return table


@dataclass(slots=True)
class _Seen:
    """The assignments that were found, with their sum and the memory of each live set.

    `exceeded` are live sets that are too large, the largest of each neighbourhood in any;
    `lower` is the best bound.
    """

    problem: _Problem
    choices: list[tuple[int, ...]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    memory: list[Table] = field(default_factory=list)
    exceeded: dict[int, None] = field(default_factory=dict)
    lower: float = -np.inf

    def add(self, choice: tuple[int, ...], lower: float = -np.inf) -> bool:
        """Add an assignment and a bound; whether it fits."""
        memory = self.problem.memory_of(choice)
        self.choices.append(choice)
        self.totals.append(self.problem.cost_of(choice))
        self.memory.append(memory)
        self.lower = max(self.lower, lower)
        over = np.flatnonzero(memory > self.problem.limit)
        self.exceeded.update(dict.fromkeys(_worst(memory, over)))
        return not len(over)

    def best(self) -> Limited | None:
        """The cheapest that fits."""
        limit = self.problem.limit
        fitting = [i for i, m in enumerate(self.memory) if m.max(initial=0.0) <= limit]
        if not fitting:
            return None
        best = min(fitting, key=self.totals.__getitem__)
        return self.problem.limited(self.choices[best], self.lower)


def _worst(memory: Table, over: Indices) -> list[int]:
    """The largest of these sets, and the next ones that are not near to larger ones."""
    apart, found = len(memory) // _APART, list[int]()
    for index in over[np.argsort(-memory[over], kind="stable")].tolist():
        if all(abs(index - other) > apart for other in found):
            found.append(index)
            if len(found) == _MANY:
                break
    return found


def _may_go_on(problem: _Problem, solution: Solution) -> bool:
    """Whether prices are worth a search: what is not proven is left to HiGHS where it can be."""
    return _is_proven(solution) or problem.entries > _LARGE


def _is_proven(solution: Solution) -> bool:
    return solution.lower >= solution.total


def _minimise_priced(problem: _Problem, prices: Table) -> Solution | None:
    """The cheapest choices when the memory of each live set has a price, whatever its amount.

    None if too many are about equally cheap.
    """
    costs, pairs = list(problem.costs), dict(problem.pairs)
    price = np.zeros(len(problem.memory))
    for index in np.flatnonzero(prices).tolist():
        price[problem.live.members(index)] += prices[index]
    for member in np.flatnonzero(price).tolist():
        scope, priced = problem.scopes[member], price[member] * problem.memory[member]
        if len(scope) == 1:
            costs[scope[0]] = costs[scope[0]] + priced
        else:
            a, b = scope
            pairs[a, b] = pairs[a, b] + priced
    try:
        return minimise(costs, pairs)
    except CompileError:
        return None  # HiGHS takes the problem as a whole


def _search_prices(problem: _Problem, seen: _Seen) -> bool:
    """Find assignments at prices that raise the bound, by cutting planes (Kelley 1960).

    False if one is not proven to be the cheapest at its prices, so that the bound is weak.
    """
    first = highest = _magnitude(problem, seen)
    for _ in range(_STEPS):
        prices, above, enough = _prices(seen, highest)
        found = _minimise_priced(problem, prices)
        if found is None or not _may_go_on(problem, found):
            return False
        lower = found.lower - float(prices.sum()) * problem.limit
        seen.add(found.choice, lower)
        if above - lower <= _CLOSE * abs(above):
            if enough or highest >= _DEAREST * first:
                break
            highest *= 8
    return True


def _prices(seen: _Seen, highest: float) -> tuple[Table, float, bool]:
    """The prices that the assignments suggest, what the bound is at most, and whether it is final.

    They are the multipliers of the program that mixes the assignments so that the mixture fits.
    It may have more memory, at the highest price for as much as the limit; if it does so, that
    price is too low.
    """
    limit = seen.problem.limit
    cost, scale = max(map(abs, seen.totals)) or 1.0, limit or 1.0
    exceeded = sorted(seen.exceeded)
    excess = (np.array([m[exceeded] for m in seen.memory]).T - limit) / scale
    found = highs.scipy_optimize().linprog(
        np.array([*seen.totals, highest]) / cost,
        A_ub=np.hstack([excess, np.full((len(exceeded), 1), -1.0)]),
        b_ub=np.zeros(len(exceeded)),
        A_eq=[[1.0] * len(seen.totals) + [0.0]],
        b_eq=[1.0],
        method="highs-ds",
    )
    prices = np.zeros(len(seen.memory[0]))
    prices[exceeded] = np.maximum(-found.ineqlin.marginals, 0.0) * (cost / scale)
    return prices, float(found.fun) * cost, bool(found.x[-1] <= _EXACT)


def _solve_among(problem: _Problem, seen: _Seen) -> None:
    """Add the best mixture of the choices that were seen."""
    kept = [np.unique(choices) for choices in zip(*seen.choices, strict=True)]
    _solve(problem.among(kept), seen, kept, _NEAR)


def _solve_whole(problem: _Problem, seen: _Seen) -> Limited:
    """The best of all choices, or at least one that fits; raises DoesNotFit where none does."""
    if problem.entries > _LARGE:
        raise NotFound(problem.limit)
    everything = [np.arange(len(c)) for c in problem.costs]
    seen.lower = max(seen.lower, _solve(problem, seen, everything, _EXACT))
    best = seen.best()
    if best is not None:
        return best
    every = problem.limits(range(len(problem.live)))
    least = highs.least_limit(problem.costs, problem.pairs, every, nodes=_NODES)
    if least.lower == np.inf:
        raise CompileError(_FORBIDDEN)
    if least.choice is not None and seen.add(least.choice):
        return problem.limited(least.choice, seen.lower)
    limit = problem.limit
    if least.choice is None or least.lower <= limit * (1 + _EXACT):
        raise NotFound(limit)
    raise problem.does_not_fit(problem.memory_of(least.choice), least.lower)


def _solve(problem: _Problem, seen: _Seen, kept: list[Indices], gap: float) -> float:
    """Let HiGHS choose, and add what it finds; the bound that it proves.

    It is told of the live sets that were exceeded until it exceeds no other; `kept` says which of
    all choices those of the problem are.
    """
    lower = -np.inf
    for share in _TIGHTER:
        told = -1
        while told < len(seen.exceeded):
            told = len(seen.exceeded)
            answer = highs.solve(
                problem.costs, problem.pairs, problem.limits(sorted(seen.exceeded), 1 - share),
                near=_magnitude(problem, seen), gap=gap, nodes=_NODES,
            )  # fmt: skip
            lower = lower if share else answer.lower
            if answer.choice is None:
                return lower
            choice = tuple(int(k[i]) for k, i in zip(kept, answer.choice, strict=True))
            if seen.add(choice):
                return lower
    return lower


def _magnitude(problem: _Problem, seen: _Seen) -> float:
    """About how large the sum will be: that of the last assignment, or a cost."""
    if seen.totals and seen.totals[-1]:
        return abs(seen.totals[-1])
    costs = np.concatenate([*problem.costs, *(t.ravel() for t in problem.pairs.values())])
    costs = np.abs(costs[np.isfinite(costs) & (costs != 0)])
    return float(np.median(costs)) if len(costs) else 1.0
