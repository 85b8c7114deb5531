"""Exact min-sum by variable elimination (bucket elimination, Dechter 1999).

Given choices with a cost each, and pairs of choices with a table of costs, find the assignment
with the smallest sum. The cost is exponential only in the width of the graph, and training
graphs are ladders of small width once they are contracted. Where they are too wide, bounds leave
few of the choices. Variables among equal tables, those of repeated layers, are eliminated once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from mpiflow.compiler.bounds import Bounds, bounds
from mpiflow.compiler.contraction import Contraction
from mpiflow.compiler.deadends import DeadEnds
from mpiflow.compiler.tables import Costs, Indices, Pair, Table, Tables, numbered, without_least
from mpiflow.errors import CompileError

Pairs = dict[Pair, Table]
_DIRECT, _LARGEST = 10**6, 10**7
"""Joint tables of so many entries are made without finding bounds first, and at all."""
_FIRST = (5e-5, _DIRECT), (1e-6, _LARGEST), (0.0, _LARGEST)
"""The slack of the choices that are tried first, as a share of the bound, and the largest tables
for which they are; the first of these that is narrow enough is taken."""
_EXACT = 1e-9
"""A share of the bound that is rounding."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for each variable, and their sum; no assignment has one below `lower`.

    Where the two are equal but for rounding, it is the best one, and of equals the earlier choice.
    """

    choice: tuple[int, ...]
    total: float
    lower: float


def minimise(unary: list[Table], pairs: Pairs, known: DeadEnds | None = None) -> Solution:
    """The best choice for each variable, where pairs (a < b) have a table of costs.

    Problems with many tables in common are solved faster if what is `known` of them is kept.
    """
    known = known or DeadEnds(Tables())
    left = Contraction(numbered(unary, pairs, known.tables), known)
    order = _order(left.core, _DIRECT)
    found = _eliminate_all(left.core, order) if order is not None else _minimise_wide(left.core)
    shared = left.total
    return Solution(left.choice(found.choice), found.total + shared, found.lower + shared)


def _minimise_wide(costs: Costs) -> Solution:
    """Solve among the choices of little slack, then of more, until the best cannot be missing.

    Those with more slack than a solution has above the bound are in no better one: these are left
    out at once where what is left is narrow.
    """
    tables = costs.tables
    found = bounds(
        [tables[number] for number in costs.unary],
        {pair: tables[number] for pair, number in costs.pairs.items()},
    )
    tried, margin = None, 0.0
    for share, largest in _FIRST:
        margin = share * abs(found.lower)
        tried = _minimise_among(costs, found, margin, largest)
        if tried is not None:
            break
    best = tried
    while tried is not None and margin > 0 and tried.lower < tried.total:
        best, enough = tried, tried.total - found.lower
        margin = min(10 * margin, enough)
        tried = _minimise_among(costs, found, enough, _DIRECT)
        tried = tried or _minimise_among(costs, found, margin, _LARGEST)
    if best is None or best.total == np.inf:
        raise CompileError(
            "there are too many ways to lay out this graph that are equally fast; give hints, or"
            " use fewer mesh axes"
        )
    return tried or best


def _minimise_among(costs: Costs, found: Bounds, margin: float, largest: int) -> Solution | None:
    """The best solution of choices with no more slack than `margin`.

    None if it needs a joint table with more than `largest` entries.
    """
    margin += _EXACT * abs(found.lower)
    kept = [np.flatnonzero(slack <= margin) for slack in found.slack]
    few = costs.among(kept)
    order = _order(few, largest)
    if order is None:
        return None
    best = _eliminate_all(few, order)
    proven = best.total - found.lower <= margin
    choice = tuple(int(k[i]) for k, i in zip(kept, best.choice, strict=True))
    return Solution(choice, best.total, best.total if proven else found.lower)


def _order(costs: Costs, largest: int) -> list[int] | None:
    """The variables with a choice, that of the smallest joint table next.

    None if there is one with more than `largest` entries.
    """
    sizes = costs.sizes()
    around: list[set[int]] = [set() for _ in sizes]
    for a, b in costs.pairs:
        if sizes[a] > 1 and sizes[b] > 1:
            around[a].add(b)
            around[b].add(a)

    def joint(variable: int) -> int:
        """The entries of its joint table, or more than `largest`."""
        entries = sizes[variable]
        for other in around[variable]:
            entries *= sizes[other]
            if entries > largest:
                break
        return entries

    now = [joint(v) for v in range(len(sizes))]
    queue = [(now[v], v) for v, size in enumerate(sizes) if size > 1]
    heapq.heapify(queue)
    left = len(queue)
    order: dict[int, None] = {}
    while len(order) < left:
        size, variable = heapq.heappop(queue)
        if size > largest:
            return None
        if variable in order or size != now[variable]:
            continue  # an older entry of one whose neighbours have changed
        order[variable] = None
        for v in around[variable]:
            around[v] |= around[variable]
            around[v] -= {v, variable}
            now[v] = joint(v)
            heapq.heappush(queue, (now[v], v))
    return list(order)


@dataclass(eq=False, slots=True)
class _Factor:
    """A table over the variables of `scope`, by number."""

    scope: tuple[int, ...]
    number: int


_Spread = tuple[int, tuple[int, ...]]
"""A table by number, and which dims of a joint table its own are."""


class _Elimination:
    """The factors that are left, by variable, and what became of those that were joined."""

    def __init__(self, costs: Costs) -> None:
        self.tables, self.sizes = costs.tables, costs.sizes()
        self.touching: list[dict[_Factor, None]] = [{} for _ in costs.unary]
        self.total = 0.0
        self._joined: dict[tuple[_Spread, ...], tuple[Indices, int, float]] = {}
        for variable, number in enumerate(costs.unary):
            self._add((variable,), number)
        for pair, number in costs.pairs.items():
            self._add(pair, number)

    def _add(self, scope: tuple[int, ...], number: int) -> None:
        """Add a factor, without the variables that have no choice."""
        several = tuple(v for v in scope if self.sizes[v] > 1)
        if several != scope:
            number = self.tables.squeezed(number)
        if not several:
            self.total += float(self.tables[number])
        factor = _Factor(several, number)
        for variable in several:
            self.touching[variable][factor] = None

    def _take(self, variable: int) -> list[_Factor]:
        """Remove and give the factors of a variable."""
        factors = list(self.touching[variable])
        for factor in factors:
            for v in factor.scope:
                del self.touching[v][factor]
        return factors

    def eliminate(self, variable: int) -> tuple[tuple[int, ...], Indices]:
        """Remove a variable: its neighbours, and the best choice for each of their joint ones."""
        factors = self._take(variable)
        around = sorted({v for factor in factors for v in factor.scope} - {variable})
        place = {v: dim for dim, v in enumerate((*around, variable))}
        key = tuple((f.number, tuple(place[v] for v in f.scope)) for f in factors)
        if key not in self._joined:
            joint = _joint(self.tables, key, [self.sizes[v] for v in place])
            rest, least = without_least(joint.min(-1))
            self._joined[key] = joint.argmin(-1), self.tables.number(rest), least
        best, number, least = self._joined[key]
        self.total += least
        self._add(tuple(around), number)
        return tuple(around), best


def _eliminate_all(costs: Costs, order: list[int]) -> Solution:
    """The best choices; ties go to the earlier choice."""
    elimination = _Elimination(costs)
    eliminated = [(variable, *elimination.eliminate(variable)) for variable in order]
    choice = [0] * len(costs.unary)
    for variable, neighbours, best in reversed(eliminated):
        choice[variable] = int(best[tuple(choice[v] for v in neighbours)])
    return Solution(tuple(choice), elimination.total, elimination.total)


def _joint(tables: Tables, factors: tuple[_Spread, ...], sizes: list[int]) -> Table:
    """The sum of tables over the dims of all."""
    joint = np.zeros(sizes)
    for number, dims in factors:
        table = tables[number].transpose(np.argsort(dims))
        joint += table.reshape([size if dim in dims else 1 for dim, size in enumerate(sizes)])
    return joint
