"""Choices that no best assignment has: dead ends (Goldstein 1994).

A choice is one if another of its variable is cheaper whatever the neighbours choose. Finding them
takes little, as variables among equal tables are looked at once.
"""

from __future__ import annotations

import numpy as np

from mpiflow.compiler.tables import Table, Tables

_SURE = 1e-12
"""The share of the largest entry of a table that its differences may have from rounding."""
_MANY = 64
"""Variables with more choices are left as they are: comparing all of them would take longer."""


class DeadEnds:
    """Tells the dead ends of variables by the numbers of their tables."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._excess_of: dict[int, Table] = {}
        self._alive_of: dict[tuple[int, ...], tuple[int, ...] | None] = {}

    def alive(self, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
        """The choices that are no dead ends, or None if no choice is one.

        Numbers are those of a variable's costs and of its pairs, by its choice first.
        """
        if numbers not in self._alive_of:
            self._alive_of[numbers] = self._find(numbers)
        return self._alive_of[numbers]

    def _find(self, numbers: tuple[int, ...]) -> tuple[int, ...] | None:
        size = len(self.tables[numbers[0]])
        if not 1 < size <= _MANY:
            return None
        with np.errstate(invalid="ignore"):  # nan is what is infinite both ways: no dead end
            excess = sum(map(self._excess, numbers), np.zeros((size, size)))
        alive = np.flatnonzero(~(excess < 0).any(0)).tolist()
        return None if len(alive) == size else tuple(alive)

    def _excess(self, number: int) -> Table:
        """How much dearer than a choice (second dim) another (first dim) is at most.

        Where both are infinite, neither is dearer.
        """
        if number not in self._excess_of:
            table = self.tables[number]
            rows = table.reshape(len(table), -1)
            rounding = _SURE * np.abs(rows[np.isfinite(rows)]).max(initial=0.0)
            with np.errstate(invalid="ignore"):
                self._excess_of[number] = np.fmax.reduce(rows[:, None] - rows, axis=2) + rounding
        return self._excess_of[number]
