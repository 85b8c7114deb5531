"""Exact min-sum by variable elimination (bucket elimination, Dechter 1999).

Given choices with a cost each, and pairs of choices with a table of costs, find the assignment
with the smallest sum. The cost is exponential only in the width of the graph, and training
graphs are ladders of small width. Where they are too wide, bounds leave few of the choices.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.bounds import Bounds, Table, bounds
from mpiflow.errors import CompileError

Indices = NDArray[np.intp]
Pairs = dict[tuple[int, int], Table]
_DIRECT, _LARGEST = 10**5, 10**7
"""Joint tables of so many entries are made without finding bounds first, and at all."""
_NEAR, _EXACT = 1e-6, 1e-9
"""Shares of the bound: the slack of the choices that are tried first, and rounding."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice for each variable, and their sum; no assignment has one below `lower`.

    Where the two are equal but for rounding, it is the best one, and of equals the earlier choice.
    """

    choice: tuple[int, ...]
    total: float
    lower: float


@dataclass(eq=False, slots=True)
class _Factor:
    """A table over the variables of `scope`."""

    scope: tuple[int, ...]
    table: Table


@dataclass(slots=True)
class _Problem:
    sizes: list[int]
    touching: list[dict[_Factor, None]] = field(default_factory=list)

    def add(self, factor: _Factor) -> None:
        for variable in factor.scope:
            self.touching[variable][factor] = None

    def take(self, variable: int) -> list[_Factor]:
        """Remove and give the factors of a variable."""
        factors = list(self.touching[variable])
        for factor in factors:
            for v in factor.scope:
                del self.touching[v][factor]
        return factors


def minimise(unary: list[Table], pairs: Pairs) -> Solution:
    """The best choice for each variable, where pairs (a < b) have a table of costs."""
    costs = [np.asarray(c, np.float64) for c in unary]
    tables = {scope: np.asarray(pairs[scope], np.float64) for scope in sorted(pairs)}
    order, largest = _order([len(c) for c in costs], tables)
    if largest > _DIRECT:
        return _minimise_wide(costs, tables)
    choice, total = _eliminate_all(costs, tables, order)
    return Solution(choice, total, total)


def _minimise_wide(costs: list[Table], tables: Pairs) -> Solution:
    """Solve among the choices of little slack, then of more, until the best cannot be missing.

    Those with more slack than a solution has above the bound are in no better one.
    """
    found = bounds(costs, tables)
    margin = _NEAR * abs(found.lower)
    best = tried = _minimise_among(costs, tables, found, margin)
    while tried is not None and tried.lower < tried.total:
        best, margin = tried, min(10 * margin, tried.total - found.lower)
        tried = _minimise_among(costs, tables, found, margin)
    if best is None or best.total == np.inf:
        raise CompileError(
            "there are too many ways to lay out this graph that are equally fast; give hints, or"
            " use fewer mesh axes"
        )
    return tried or best


def _minimise_among(
    costs: list[Table], tables: Pairs, found: Bounds, margin: float
) -> Solution | None:
    """The best solution of choices with no more slack than `margin`; None if that is too wide."""
    margin += _EXACT * abs(found.lower)
    kept = [np.flatnonzero(slack <= margin) for slack in found.slack]
    costs = [c[k] for c, k in zip(costs, kept, strict=True)]
    tables = {(a, b): t[np.ix_(kept[a], kept[b])] for (a, b), t in tables.items()}
    order, largest = _order([len(c) for c in costs], tables)
    if largest > _LARGEST:
        return None
    chosen, total = _eliminate_all(costs, tables, order)
    proven = total - found.lower <= margin
    choice = tuple(int(k[i]) for k, i in zip(kept, chosen, strict=True))
    return Solution(choice, total, total if proven else found.lower)


def _order(sizes: list[int], tables: Pairs) -> tuple[list[int], int]:
    """The variables with a choice, the smallest joint table next, and the largest of these."""
    around: list[set[int]] = [set() for _ in sizes]
    for a, b in tables:
        if sizes[a] > 1 and sizes[b] > 1:
            around[a].add(b)
            around[b].add(a)

    def joint(variable: int) -> int:
        return prod(sizes[v] for v in around[variable]) * sizes[variable]

    queue = [(joint(v), v) for v, size in enumerate(sizes) if size > 1]
    heapq.heapify(queue)
    order: dict[int, None] = {}
    largest = 0
    while queue:
        size, variable = heapq.heappop(queue)
        if variable in order or size != joint(variable):
            continue  # an older entry of one whose neighbours have changed
        order[variable] = None
        largest = max(largest, size)
        for v in around[variable]:
            around[v] |= around[variable]
            around[v] -= {v, variable}
            heapq.heappush(queue, (joint(v), v))
    return list(order), largest


def _eliminate_all(
    costs: list[Table], tables: Pairs, order: list[int]
) -> tuple[tuple[int, ...], float]:
    """The best choices and their sum; ties go to the earlier choice."""
    sizes = [len(c) for c in costs]
    problem = _Problem(sizes, [{} for _ in sizes])
    total = 0.0
    factors = [_Factor((i,), c) for i, c in enumerate(costs)]
    factors += [_Factor(scope, t) for scope, t in tables.items()]
    for factor in map(_without_singletons, factors):
        if factor.scope:
            problem.add(factor)
        else:
            total += float(factor.table)
    eliminated: list[tuple[int, tuple[int, ...], Indices]] = []
    for variable in order:
        neighbours, best, rest = _eliminate(problem, variable)
        eliminated.append((variable, neighbours, best))
        if neighbours:
            problem.add(_Factor(neighbours, rest))
        else:
            total += float(rest)
    choice = [0] * len(costs)
    for variable, neighbours, best in reversed(eliminated):
        choice[variable] = int(best[tuple(choice[v] for v in neighbours)])
    return tuple(choice), total


def _without_singletons(factor: _Factor) -> _Factor:
    """Without the variables that have no choice."""
    kept = tuple(v for v, size in zip(factor.scope, factor.table.shape, strict=True) if size > 1)
    return _Factor(kept, factor.table.reshape([n for n in factor.table.shape if n > 1]))


def _eliminate(problem: _Problem, variable: int) -> tuple[tuple[int, ...], Indices, Table]:
    """The neighbours, the best choice for each of their joint choices, and what it costs."""
    factors = problem.take(variable)
    around = {v for factor in factors for v in factor.scope} - {variable}
    scope = (*sorted(around), variable)
    joint = np.zeros([problem.sizes[v] for v in scope])
    for factor in factors:
        joint += _spread(factor, scope)
    return scope[:-1], joint.argmin(-1), joint.min(-1)


def _spread(factor: _Factor, scope: tuple[int, ...]) -> Table:
    """The factor's table with the dims of `scope`, ones where it does not depend on one."""
    order = sorted(range(len(factor.scope)), key=lambda i: scope.index(factor.scope[i]))
    table = factor.table.transpose(order)
    present = set(factor.scope)
    shape = iter(table.shape)
    return table.reshape([next(shape) if v in present else 1 for v in scope])
