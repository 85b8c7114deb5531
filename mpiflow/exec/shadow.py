"""Shadow: who wrote each byte of a memory last, who has read it since, and what it holds.

bytes    0        64            192   256
cells    |   x    |      y      | y   |      split wherever a use begins or ends
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from mpiflow.exec.lanes import Lane
from mpiflow.plan.records import Task

Owner = tuple[str, str, int]
"""Program, tensor, and step; of a variable its name alone."""


Clock = dict[str, int]


@dataclass(slots=True, eq=False)
class Run:
    """A step that is run: by stream its lanes, and what is surely done when each item starts.

    Steps are numbered as they begin; of one that has not begun yet, what feeds it may have.
    """

    lanes: dict[str, Lane] = field(default_factory=dict)
    clocks: dict[str, list[Clock]] = field(default_factory=dict)
    number: float = inf


class Use(NamedTuple):
    """A task that uses memory: its stream, the number of its item there, in which run of a step."""

    task: Task
    stream: str
    number: int
    run: Run


@dataclass(slots=True)
class Cell:
    """Bytes that the same uses have had. `readers` is the last of each stream since the write.

    `stored` is the number of the save that writes them to files, if one does.
    """

    owner: Owner | None = None
    writer: Use | None = None
    readers: dict[str, Use] = field(default_factory=dict)
    stored: int = 0

    def copy(self) -> Cell:
        """One like it, for a part of its bytes."""
        return Cell(self.owner, self.writer, dict(self.readers), self.stored)


class Shadow:
    """The cells of one memory, which is flat."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.start: int = memory.ctypes.data
        self.stop = self.start + memory.nbytes
        self._starts = [0]
        self._cells = [Cell()]

    def span(self, array: np.ndarray) -> tuple[int, int]:
        """Where an array lies, from the beginning."""
        first = array.ctypes.data - self.start
        return first, first + array.nbytes

    def cells(self, start: int, stop: int) -> list[Cell]:
        """The cells of these bytes, which have no others."""
        return self._cells[self._split(start) : self._split(stop)]

    def _split(self, at: int) -> int:
        """The number of the cell that begins at a byte; from now on one does."""
        number = bisect_left(self._starts, at)
        if number == len(self._starts) or self._starts[number] != at:
            self._starts.insert(number, at)
            self._cells.insert(number, self._cells[number - 1].copy())
        return number
