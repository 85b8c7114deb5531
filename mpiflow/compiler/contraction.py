"""Make a min-sum problem smaller, so that the best of what is left tells the best of all.

Three things are done until there is nothing to do: choices that are dead ends are left out, what
a variable with one choice costs is added to its neighbours, and a variable with one neighbour or
two is replaced by what its best choice costs for each choice of theirs.

    a - v - b   becomes   a - b      a - v   becomes   a

Each of these may make more of the others. No two neighbours are replaced in one round: so the
layers of a network, and pairs of them in the next round, stay equal and are worked out once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np

from mpiflow.compiler.deadends import DeadEnds
from mpiflow.compiler.tables import Costs, Indices, without_least

_FEW = 2
"""Neighbours of a variable that is replaced: what is left has pairs and no larger tables."""
_LARGEST = 10**5
"""Joint choices of a variable and its neighbours, of those that are replaced."""
_Kept = tuple[int, ...]
"""The choices that are left of a variable."""


@dataclass(frozen=True, slots=True)
class _Left:
    """A variable that was left out, and its `best` choice by those of its neighbours then."""

    variable: int
    kept: _Kept
    neighbours: tuple[tuple[int, _Kept], ...]
    best: Indices

    def choice(self, chosen: list[int]) -> int:
        """The best choice, where neighbours have the `chosen` ones."""
        return self.kept[self.best[tuple(kept.index(chosen[v]) for v, kept in self.neighbours)]]


class Contraction:
    """What is left of a problem: `core`, its costs without `total`, which all have in common."""

    def __init__(self, costs: Costs, dead_ends: DeadEnds | None = None) -> None:
        self._tables, self._dead_ends = costs.tables, dead_ends or DeadEnds(costs.tables)
        self._unary = list(costs.unary)
        self._kept: list[_Kept] = [tuple(range(size)) for size in costs.sizes()]
        self._beside: list[dict[int, int]] = [{} for _ in costs.unary]
        for (a, b), number in costs.pairs.items():
            self._join(a, b, number)
        self._replaced: dict[tuple[int, ...], tuple[Indices, int, float]] = {}
        self._out: list[_Left] = []
        self.total = 0.0
        self._contract()
        self._core = [v for v, kept in enumerate(self._kept) if kept]
        self.core = self._costs_of_core()

    def choice(self, core: Iterable[int]) -> tuple[int, ...]:
        """The best choice of every variable, by those of the variables that are left."""
        chosen = [-1] * len(self._unary)
        for variable, i in zip(self._core, core, strict=True):
            chosen[variable] = self._kept[variable][i]
        for left in reversed(self._out):
            chosen[left.variable] = left.choice(chosen)
        return tuple(chosen)

    def _costs_of_core(self) -> Costs:
        place = {v: i for i, v in enumerate(self._core)}
        pairs = {
            (place[a], place[b]): number
            for a in self._core
            for b, number in sorted(self._beside[a].items())
            if a < b
        }
        return Costs(self._tables, [self._unary[v] for v in self._core], pairs)

    def _contract(self) -> None:
        waiting = list(range(len(self._unary)))
        while waiting:
            changed: set[int] = set()
            for variable in waiting:
                self._visit(variable, changed)
            waiting = sorted(v for v in changed if self._kept[v])

    def _visit(self, variable: int, changed: set[int]) -> None:
        """Do what can be done with a variable; the neighbours it was done to have `changed`."""
        beside = self._beside[variable]
        if self._prune(variable):
            changed.update(beside)
        if len(self._kept[variable]) == 1:
            changed.update(beside)
            self._fix(variable)
        elif variable not in changed and len(beside) <= _FEW and self._is_small(variable):
            changed.update(beside)
            self._replace(variable)

    def _prune(self, variable: int) -> bool:
        """Leave out the dead ends of a variable; whether there are any.

        Without neighbours all choices are but the first of the best.
        """
        unary, beside = self._unary[variable], self._beside[variable]
        if beside:
            alive = self._dead_ends.alive((unary, *beside.values()))
        else:
            alive = (int(self._tables[unary].argmin()),)
        if alive is None:
            return False
        self._kept[variable] = tuple(self._kept[variable][i] for i in alive)
        self._unary[variable] = self._tables.taken(unary, 0, alive)
        for other, number in beside.items():
            self._join(variable, other, self._tables.taken(number, 0, alive))
        return True

    def _join(self, a: int, b: int, number: int) -> None:
        """Let two variables have a table, by the choice of `a` first."""
        self._beside[a][b] = number
        self._beside[b][a] = self._tables.transposed(number)

    def _fix(self, variable: int) -> None:
        """Leave out a variable that has one choice."""
        for other, number in self._beside[variable].items():
            self._add(other, self._tables.row(number))
        self._leave_out(variable, (), np.array(0))
        self.total += float(self._tables[self._unary[variable]][0])

    def _is_small(self, variable: int) -> bool:
        choices = [len(self._kept[v]) for v in (variable, *self._beside[variable])]
        return prod(choices) <= _LARGEST

    def _replace(self, variable: int) -> None:
        """Leave out a variable with few neighbours: they get what its best choice costs."""
        beside = self._beside[variable]
        neighbours = tuple(sorted(beside))
        numbers = (self._unary[variable], *(beside[v] for v in neighbours))
        if numbers not in self._replaced:
            self._replaced[numbers] = self._best(*numbers)
        best, rest, least = self._replaced[numbers]
        self._leave_out(variable, neighbours, best)
        self.total += least
        if len(neighbours) == 1:
            self._add(*neighbours, rest)
        else:
            a, b = neighbours
            known = self._beside[a].get(b)
            self._join(a, b, rest if known is None else self._tables.sum(known, rest))

    def _best(self, unary: int, *pairs: int) -> tuple[Indices, int, float]:
        """A variable's best choice by those of its neighbours, and what it costs.

        That is the number of a table, and the least of all, which is not in the table.
        """
        joint = self._tables[unary]
        for number in pairs:
            table = self._tables[number]
            joint = joint[..., None] + table.reshape(len(table), *[1] * (joint.ndim - 1), -1)
        rest, least = without_least(joint.min(0))
        return joint.argmin(0), self._tables.number(rest), least

    def _add(self, variable: int, number: int) -> None:
        self._unary[variable] = self._tables.sum(self._unary[variable], number)

    def _leave_out(self, variable: int, neighbours: tuple[int, ...], best: Indices) -> None:
        kept = tuple((v, self._kept[v]) for v in neighbours)
        self._out.append(_Left(variable, self._kept[variable], kept, best))
        for other in self._beside[variable]:
            del self._beside[other][variable]
        self._kept[variable], self._beside[variable] = (), {}
