"""Leave out choices that no best assignment has: dead ends (Goldstein 1994).

A choice is one if another of its variable is cheaper whatever the neighbours choose. Leaving it
out may make dead ends of the neighbours' choices, and so on. Of the choices of a training graph
few are left, and finding them takes little, as variables among equal tables are looked at once.
"""

from __future__ import annotations

import numpy as np

from mpiflow.compiler.tables import Costs, Indices, Pair, Table

_SURE = 1e-12
"""The share of the largest entry of a table that its differences may have from rounding."""
_MANY = 64
"""Variables with more choices are left as they are: comparing all of them would take longer."""


def without_dead_ends(costs: Costs) -> tuple[Costs, list[Indices]]:
    """The costs that are left, and of which choices of each variable they are."""
    pruning = _Pruning(costs)
    waiting = list(range(len(costs.unary)))
    while waiting:
        changed = [variable for variable in waiting if pruning.prune(variable)]
        waiting = sorted({other for v in changed for other in pruning.neighbours(v)})
    return pruning.costs, pruning.kept


class _Pruning:
    """Costs from which choices are taken away."""

    def __init__(self, costs: Costs) -> None:
        self.tables = costs.tables
        self.costs = Costs(costs.tables, list(costs.unary), dict(costs.pairs))
        self.kept = [np.arange(size) for size in costs.sizes()]
        self._around: list[list[tuple[Pair, int]]] = [[] for _ in costs.unary]
        for pair in costs.pairs:
            for side, variable in enumerate(pair):
                self._around[variable].append((pair, side))
        self._excess_of: dict[tuple[int, int], Table] = {}
        self._alive_of: dict[tuple[int, ...], tuple[int, ...]] = {}

    def neighbours(self, variable: int) -> list[int]:
        """The variables that share a table with it."""
        return [pair[1 - side] for pair, side in self._around[variable]]

    def prune(self, variable: int) -> bool:
        """Leave out the dead ends of a variable; whether there are any."""
        unary, pairs = self.costs.unary, self.costs.pairs
        size = len(self.tables[unary[variable]])
        if not 1 < size <= _MANY:
            return False
        alive = self._alive(
            unary[variable], *(2 * pairs[pair] + side for pair, side in self._around[variable])
        )
        if len(alive) == size:
            return False
        self.kept[variable] = self.kept[variable][list(alive)]
        unary[variable] = self.tables.taken(unary[variable], 0, alive)
        for pair, side in self._around[variable]:
            pairs[pair] = self.tables.taken(pairs[pair], side, alive)
        return True

    def _alive(self, *numbers: int) -> tuple[int, ...]:
        """The choices that are no dead ends, by the number of their costs, and those of pairs.

        The latter are given as 2 * number + side.
        """
        if numbers not in self._alive_of:
            unary, *sides = numbers
            with np.errstate(invalid="ignore"):  # nan is what is infinite both ways: no dead end
                excess = sum((self._excess(*divmod(s, 2)) for s in sides), self._excess(unary, 0))
            self._alive_of[numbers] = tuple(np.flatnonzero(~(excess < 0).any(0)).tolist())
        return self._alive_of[numbers]

    def _excess(self, number: int, side: int) -> Table:
        """How much dearer than a choice (second dim) another (first dim) is at most.

        Where both are infinite, neither is dearer.
        """
        key = number, side
        if key not in self._excess_of:
            table = self.tables[number]
            rows = table.T if side else table.reshape(len(table), -1)
            rounding = _SURE * np.abs(rows[np.isfinite(rows)]).max(initial=0.0)
            with np.errstate(invalid="ignore"):
                self._excess_of[key] = np.fmax.reduce(rows[:, None] - rows, axis=2) + rounding
        return self._excess_of[key]
