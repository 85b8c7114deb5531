"""Observe: the calls of a step, bound once more so that they count and record themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from mpiflow.exec.bind import Step
from mpiflow.exec.meter import KERNELS, OTHER, Meter, waited_for
from mpiflow.exec.trace import Recorder
from mpiflow.plan.calls import KERNEL, START, WAIT, Calls
from mpiflow.plan.records import READ, Task

Call = Callable[[], Any]


@dataclass(slots=True)
class _Recorded:
    """Calls of a step that record themselves.

    `places` has for each the first of the calls of `Step` that it does, and the marks of these.
    """

    calls: list[Call] = field(default_factory=list)
    places: list[tuple[int, list[float]]] = field(default_factory=list)

    def add(self, call: Call, first: int, marks: list[float]) -> None:
        """One more call."""
        self.calls.append(call)
        self.places.append((first, marks))


class Observer:
    """Meters every step of a program, and records those that its recorder wants."""

    def __init__(
        self, order: Calls, steps: Sequence[Step], meter: Meter, recorder: Recorder | None
    ) -> None:
        self.meter, self.recorder = meter, recorder
        self._order, self._steps = order, steps
        self._metered = [self._count(step.calls) for step in steps]
        self._recorded: list[_Recorded] = []
        self._running: _Recorded | None = None
        self._recording = False
        self._began = 0.0

    def begin(self, phase: int, step: int) -> Sequence[Call]:
        """The calls of a step that begins now, in a phase of the slots."""
        recorder = self.recorder
        self._recording = recorder is not None and recorder.wants(step)
        calls: Sequence[Call] = self._metered[phase]
        self._running = None
        if recorder is not None and self._recording:
            if not self._recorded:
                self._recorded = [self._record(each, recorder) for each in self._metered]
            self._running = self._recorded[phase]
            calls = self._running.calls
            recorder.begin(step)
        self._began = self.meter.clock()
        return calls

    def call(self, place: int) -> int:
        """Which call of `Step` runs, where that at `place` of what `begin` gave does."""
        if self._running is None:
            return place
        first, marks = self._running.places[place]
        return first + max(len(marks) - 1, 0)

    def end(self) -> None:
        """The step is over: what was not spent on other calls was spent on kernels."""
        seconds = self.meter.seconds
        seconds[KERNELS] += self.meter.clock() - self._began - sum(seconds)
        if self.recorder is not None and self._recording:
            self.recorder.end()

    def _count(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        return tuple(
            call if action == KERNEL else self.meter.timed(_item(action, task), call)
            for call, (action, task) in zip(calls, self._order, strict=True)
        )

    def _record(self, calls: tuple[Call, ...], recorder: Recorder) -> _Recorded:
        made, number = _Recorded(), 0
        pairs = zip(calls, self._order, strict=True)
        for kernels, members in groupby(pairs, lambda pair: pair[1][0] == KERNEL):
            group = list(members)
            if kernels:
                marks = recorder.marks([task for _, (_, task) in group])
                made.add(recorder.segment([call for call, _ in group], marks), number, marks)
            for i, (call, (action, task)) in enumerate(() if kernels else group):
                if action == START:
                    call = _told_first(call, recorder.began, task)
                elif action == WAIT:
                    call = _told_last(call, recorder.ended, task)
                made.add(call, number + i, [])
            number += len(group)
        return made


def _item(action: str, task: Task) -> int:
    return waited_for(task.kind) if action in (WAIT, READ) else OTHER


def _told_first(call: Call, tell: Callable[[Task], None], task: Task) -> Call:
    def told() -> None:
        tell(task)
        call()

    return told


def _told_last(call: Call, tell: Callable[[Task], None], task: Task) -> Call:
    def told() -> None:
        call()
        tell(task)

    return told
