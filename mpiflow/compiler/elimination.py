"""Exact min-sum by variable elimination (bucket elimination, Dechter 1999).

Given choices with a cost each, and pairs of choices with a table of costs, find the assignment
with the smallest sum. The cost is exponential only in the width of the graph, and training
graphs are ladders of small width.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import CompileError

Table = NDArray[np.float64]
Indices = NDArray[np.intp]
_NEVER = 1e9
"""Stands for an infinite cost in differences."""
_LIMIT = 3e8
"""The largest joint table, in entries."""


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

    def neighbours(self, variable: int) -> tuple[int, ...]:
        around = {v for factor in self.touching[variable] for v in factor.scope}
        return tuple(sorted(around - {variable}))

    def weight(self, variable: int) -> int:
        """The entries of the table that eliminating the variable makes."""
        return prod(self.sizes[v] for v in self.neighbours(variable)) * self.sizes[variable]

    def take(self, variable: int) -> list[_Factor]:
        """Remove and give the factors of a variable."""
        factors = list(self.touching[variable])
        for factor in factors:
            for v in factor.scope:
                del self.touching[v][factor]
        return factors


def minimise(
    unary: list[Table], pairs: dict[tuple[int, int], Table]
) -> tuple[tuple[int, ...], float]:
    """The best choice for each variable, and the sum; ties go to the earlier choice."""
    costs = [np.asarray(c, np.float64) for c in unary]
    tables = {scope: np.asarray(pairs[scope], np.float64) for scope in sorted(pairs)}
    kept = undominated(costs, tables)
    costs = [c[k] for c, k in zip(costs, kept, strict=True)]
    tables = {(a, b): t[np.ix_(kept[a], kept[b])] for (a, b), t in tables.items()}
    chosen, total = _eliminate_all(costs, tables)
    return tuple(int(k[i]) for k, i in zip(kept, chosen, strict=True)), total


def undominated(costs: list[Table], tables: dict[tuple[int, int], Table]) -> list[Indices]:
    """The choices of each variable that may be in the best assignment.

    A choice goes if another costs no more whatever the neighbours choose (dead-end elimination,
    Goldstein 1994): c[other] - c[choice] + sum over neighbours of max(t[other] - t[choice]) <= 0.
    """
    around: list[dict[int, Table]] = [{} for _ in costs]
    for (a, b), table in tables.items():
        table = np.minimum(table, _NEVER)
        around[a][b], around[b][a] = table, table.T
    kept: list[Indices] = [np.arange(len(c)) for c in costs]
    waiting = dict.fromkeys(range(len(costs)))
    while waiting:
        variable = next(iter(waiting))
        del waiting[variable]
        survivors = _survivors(variable, costs, around, kept)
        if len(survivors) < len(kept[variable]):
            kept[variable] = survivors
            waiting.update(dict.fromkeys(around[variable]))
    return kept


def _survivors(
    variable: int, costs: list[Table], around: list[dict[int, Table]], kept: list[Indices]
) -> Indices:
    own = kept[variable]
    if len(own) == 1:
        return own
    cost = np.minimum(costs[variable][own], _NEVER)
    worst = cost[:, None] - cost[None, :]  # how much row costs more than column, at the worst
    for other, table in around[variable].items():
        part = table[np.ix_(own, kept[other])]
        worst = worst + (part[:, None, :] - part[None, :, :]).max(-1)
    better = worst <= 0
    np.fill_diagonal(better, False)
    # Of two that are equal in every way, the earlier stays.
    better &= ~(better.T & np.tri(len(own), k=-1, dtype=bool))
    return own[~better.any(0)]


def _eliminate_all(
    costs: list[Table], tables: dict[tuple[int, int], Table]
) -> tuple[tuple[int, ...], float]:
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
    choice = {i: 0 for i, size in enumerate(sizes) if size == 1}
    queue = [(problem.weight(v), v) for v in range(len(sizes)) if v not in choice]
    heapq.heapify(queue)
    eliminated: list[tuple[int, tuple[int, ...], Indices]] = []
    gone: set[int] = set()
    while queue:
        weight, variable = heapq.heappop(queue)
        if variable in gone or weight != problem.weight(variable):
            continue  # an older entry of one whose neighbours have changed
        gone.add(variable)
        neighbours, best, rest = _eliminate(problem, variable)
        eliminated.append((variable, neighbours, best))
        if neighbours:
            problem.add(_Factor(neighbours, rest))
            for v in neighbours:
                heapq.heappush(queue, (problem.weight(v), v))
        else:
            total += float(rest)
    for variable, neighbours, best in reversed(eliminated):
        choice[variable] = int(best[tuple(choice[v] for v in neighbours)])
    return tuple(choice[i] for i in range(len(costs))), total


def _without_singletons(factor: _Factor) -> _Factor:
    """Without the variables that have no choice."""
    kept = tuple(v for v, size in zip(factor.scope, factor.table.shape, strict=True) if size > 1)
    return _Factor(kept, factor.table.reshape([n for n in factor.table.shape if n > 1]))


def _eliminate(problem: _Problem, variable: int) -> tuple[tuple[int, ...], Indices, Table]:
    """The neighbours, the best choice for each of their joint choices, and what it costs."""
    neighbours = problem.neighbours(variable)
    scope = (*neighbours, variable)
    shape = [problem.sizes[v] for v in scope]
    if prod(shape) > _LIMIT:
        raise CompileError(
            f"the choice of layouts needs a table of {prod(shape)} entries; give hints, or use"
            " fewer mesh axes"
        )
    joint = np.zeros(shape)
    for factor in problem.take(variable):
        joint += _spread(factor, scope)
    return neighbours, joint.argmin(-1), joint.min(-1)


def _spread(factor: _Factor, scope: tuple[int, ...]) -> Table:
    """The factor's table with the dims of `scope`, ones where it does not depend on one."""
    order = sorted(range(len(factor.scope)), key=lambda i: scope.index(factor.scope[i]))
    table = factor.table.transpose(order)
    present = set(factor.scope)
    shape = iter(table.shape)
    return table.reshape([next(shape) if v in present else 1 for v in scope])
