"""Trace: when each task of a step ran, of the steps that were asked for.

A recorder knows the firings of a program before the first step, and each has a place of its own
where its start and stop go, so that no lock is needed. Kernels that follow one another are marked
in one loop, as each begins where the one before it ends: that costs one look at the clock for each,
and a third of what a call around each kernel would.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import numpy as np

from mpiflow.plan.records import COMPUTE, Program, Task
from mpiflow.plan.tracefile import SAME, Clock, RankTrace
from mpiflow.plan.unroll import folded

Call = Callable[[], Any]


class Recorder:
    """Start and stop of the firings of a program without loops, in the steps of a range (from 0).

    `segment` is for what runs on the thread of kernels, `began` and `ended` for what goes on beside
    them: in the step at work, or in one that is named, as reads run ahead.
    """

    def __init__(
        self, program: Program, steps: range, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.program, self.steps, self.clock = program, steps, clock
        self._kernels = [task for task in program.tasks if task.stream == COMPUTE]
        self._others = [task for task in program.tasks if task.stream != COMPUTE]
        self._slot = {t.name: i for kind in (self._kernels, self._others)
                      for i, t in enumerate(kind)}  # fmt: skip
        self._segments: list[tuple[np.ndarray, np.ndarray, array[float]]] = []
        self._ran = np.full((len(steps), len(self._kernels), 2), nan)
        self._beside = np.full((len(steps), len(self._others), 2), nan)
        self._spans = np.full((len(steps), 2), nan)
        self._row = -1
        self.recorded = 0

    def wants(self, step: int) -> bool:
        """Whether this step, counted from 0, is to be recorded."""
        return step in self.steps

    def begin(self, step: int) -> None:
        """A step that is wanted begins."""
        self._row = self.steps.index(step)
        self._spans[self._row, 0] = self.clock()

    def end(self) -> None:
        """It is over: keep what its kernels took."""
        row = self._row
        self._spans[row, 1] = self.clock()
        for slots, places, marks in self._segments:
            if marks:
                times = np.array(marks)
                self._ran[row, slots, 0] = times[places]
                self._ran[row, slots, 1] = times[places + 1]
                del marks[:]
        self._row = -1
        self.recorded = row + 1

    def marks(self, tasks: Sequence[Task]) -> array[float]:
        """Where to put the time at which the calls of these tasks begin, and when each has ended.

        Of a task that has several calls, the first one is its kernel.
        """
        # A list would keep an object for each, and push what the kernels use out of the cache.
        found = array("d")
        first = {task.name: i for i, task in reversed(list(enumerate(tasks)))}
        slots = np.array([self._slot[name] for name in first])
        self._segments.append((slots, np.array(list(first.values())), found))
        return found

    def segment(self, calls: Sequence[Call], marks: array[float]) -> Call:
        """A call that does the calls of kernels one after another, and marks their times."""
        mark, clock = marks.append, self.clock

        def marked() -> None:
            mark(clock())
            for call in calls:
                call()
                mark(clock())

        return marked

    def began(self, task: Task, step: int | None = None) -> None:
        """What goes on beside kernels has begun."""
        self._note(task, step, 0)

    def ended(self, task: Task, step: int | None = None) -> None:
        """It has ended."""
        self._note(task, step, 1)

    def _note(self, task: Task, step: int | None, which: int) -> None:
        row = self._row if step is None else step - self.steps.start
        if 0 <= row < len(self._beside):
            self._beside[row, self._slot[task.name], which] = self.clock()

    def taken(self, rank: int, host: str, digest: str, clock: Clock = SAME) -> RankTrace:
        """The steps that were recorded."""
        tasks = [*self._kernels, *self._others]
        return RankTrace(
            rank,
            host,
            self.program.name,
            digest,
            self.steps.start + 1,
            tuple((folded(task), task.micro) for task in tasks),
            np.concatenate([self._ran, self._beside], 1)[: self.recorded],
            self._spans[: self.recorded],
            clock,
        )
