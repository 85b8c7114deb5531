"""Tables by number: equal ones have the same, so that what is done with one is done once.

The layers of a network are alike, and so are the tables of their choices. What is worked out for
the tables of the first layer is found by their numbers for all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Indices = NDArray[np.intp]
Pair = tuple[int, int]


class Tables:
    """Hands out numbers of tables, and has the table of a number."""

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._taken: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._squeezed: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._transposed: dict[int, int] = {}
        self._sums: dict[Pair, int] = {}

    def __getitem__(self, number: int) -> Table:
        return self._tables[number]

    def number(self, table: Table) -> int:
        """The number of a table: that of an equal one, where there is one."""
        key = table.shape, table.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._tables)
            self._tables.append(table)
        return self._numbers[key]

    def taken(self, number: int, dim: int, kept: tuple[int, ...]) -> int:
        """The number of a table with some of the choices of a dim only."""
        key = number, dim, kept
        if key not in self._taken:
            self._taken[key] = self.number(self._tables[number].take(kept, dim))
        return self._taken[key]

    def squeezed(self, number: int) -> int:
        """The number of a table without the dims that have one choice."""
        if number not in self._squeezed:
            self._squeezed[number] = self.number(self._tables[number].squeeze())
        return self._squeezed[number]

    def row(self, number: int) -> int:
        """The number of a table's first row."""
        if number not in self._rows:
            self._rows[number] = self.number(self._tables[number][0])
        return self._rows[number]

    def transposed(self, number: int) -> int:
        """The number of a table of two dims with these the other way round."""
        if number not in self._transposed:
            other = self.number(np.ascontiguousarray(self._tables[number].T))
            self._transposed[number], self._transposed[other] = other, number
        return self._transposed[number]

    def sum(self, a: int, b: int) -> int:
        """The number of the sum of two tables of one shape."""
        if (a, b) not in self._sums:
            self._sums[a, b] = self.number(self._tables[a] + self._tables[b])
        return self._sums[a, b]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs by the choice of each variable, and of pairs (a < b): numbers of `tables`."""

    tables: Tables
    unary: list[int]
    pairs: dict[Pair, int]

    def sizes(self) -> list[int]:
        """How many choices each variable has."""
        return [len(self.tables[number]) for number in self.unary]

    def among(self, kept: list[Indices]) -> Costs:
        """With some of the choices of each variable only."""
        few = [tuple(indices.tolist()) for indices in kept]
        taken = self.tables.taken
        unary = [taken(number, 0, indices) for number, indices in zip(self.unary, few, strict=True)]
        pairs = {
            (a, b): taken(taken(number, 0, few[a]), 1, few[b])
            for (a, b), number in self.pairs.items()
        }
        return Costs(self.tables, unary, pairs)


def numbered(unary: list[Table], pairs: dict[Pair, Table], tables: Tables | None = None) -> Costs:
    """The costs with numbers for their tables, among those that are known; pairs in order."""
    tables = tables or Tables()
    costs = [tables.number(np.asarray(cost, np.float64)) for cost in unary]
    return Costs(
        tables, costs, {p: tables.number(np.asarray(pairs[p], np.float64)) for p in sorted(pairs)}
    )


def without_least(table: Table) -> tuple[Table, float]:
    """A table above its least entry, and that, which is 0 where all are infinite.

    Costs add up along a graph. Without what all choices have in common, what is small is not
    rounded as what is large elsewhere, and the layers of a network stay alike.
    """
    least = float(table.min())
    least = least if least < np.inf else 0.0
    return np.asarray(table - least), least
