"""Meter: where the seconds of steps go, by counters that cost next to nothing.

Only what compute waits for, and what it does beside kernels, looks at the clock; kernels do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiflow.plan.places import D2H, H2D
from mpiflow.plan.records import READ, RECEIVE, SEND

Call = Callable[[], Any]

KERNELS, COLLECTIVES, COPIES, INPUT, STAGES, OTHER = range(6)
ITEMS = ("compute", "communication", "copies", "input", "stages", "overhead")
"""What a step is made of: kernels, and waiting: for collectives, copies, rows, other stages."""
_ITEM_OF = {SEND: STAGES, RECEIVE: STAGES, READ: INPUT, H2D: COPIES, D2H: COPIES}
_STEPS = 10_000


def waited_for(kind: str) -> int:
    """The counter of what waits for a task of that kind."""
    return _ITEM_OF.get(kind, COLLECTIVES)


class Meter:
    """Counts the seconds of a step by item, and keeps those of the first 10,000 steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds = [0.0] * len(ITEMS)
        self._rows = np.empty((_STEPS, len(ITEMS)))
        self._count = 0

    def timed(self, item: int, call: Call) -> Call:
        """The call, whose seconds are counted as of an item."""
        seconds, clock = self.seconds, self.clock

        def counted() -> None:
            began = clock()
            call()
            seconds[item] += clock() - began

        return counted

    def step(self, seconds: float) -> None:
        """A step is over, which took so long; what is not counted otherwise is overhead."""
        if self._count < _STEPS:
            row = self._rows[self._count]
            row[:] = self.seconds
            row[OTHER] = seconds - row[:OTHER].sum()
            self._count += 1
        self.seconds[:] = [0.0] * len(ITEMS)

    def typical(self) -> dict[str, float]:
        """The median step by item: the shares of the steps in the middle half, by their length.

        The items add up to the median. Empty without a step.
        """
        if not self._count:
            return {}
        rows = self._rows[: self._count]
        lengths = rows.sum(1)
        skipped = self._count // 4
        middle = np.argsort(lengths, kind="stable")[skipped : self._count - skipped]
        shares = rows[middle].sum(0) / max(lengths[middle].sum(), 1e-12)
        seconds = shares * np.median(lengths)
        return {name: float(value) for name, value in zip(ITEMS, seconds, strict=True)}
