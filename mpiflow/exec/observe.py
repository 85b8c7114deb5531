"""Observe: the calls of a step, bound once more so that they count and record themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpiflow.exec.bind import Step
from mpiflow.exec.meter import KERNELS, OTHER, Meter, waited_for
from mpiflow.exec.trace import Recorder
from mpiflow.plan.calls import KERNEL, START, WAIT, Calls
from mpiflow.plan.records import READ, Task

Call = Callable[[], Any]


class Observer:
    """Meters every step of a program, and records those that its recorder wants."""

    def __init__(
        self, order: Calls, steps: Sequence[Step], meter: Meter, recorder: Recorder | None
    ) -> None:
        self.meter, self.recorder = meter, recorder
        self._order, self._steps = order, steps
        self._metered = [self._count(step.calls) for step in steps]
        self._recorded: list[tuple[Call, ...]] = []
        self._recording = False
        self._began = 0.0

    def begin(self, phase: int, step: int) -> tuple[Call, ...]:
        """The calls of a step that begins now, in a phase of the slots."""
        recorder = self.recorder
        self._recording = recorder is not None and recorder.wants(step)
        calls = self._metered[phase]
        if recorder is not None and self._recording:
            if not self._recorded:
                self._recorded = [self._record(each, recorder) for each in self._metered]
            calls = self._recorded[phase]
            recorder.begin(step)
        self._began = self.meter.clock()
        return calls

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

    def _record(self, calls: tuple[Call, ...], recorder: Recorder) -> tuple[Call, ...]:
        recorded: list[Call] = []
        before: Task | None = None
        for call, (action, task) in zip(calls, self._order, strict=True):
            if action == KERNEL:
                recorded.append(recorder.wrap(task, call, before))
            elif action == START:
                recorded.append(_told_first(call, recorder.began, task))
            elif action == WAIT:
                recorded.append(_told_last(call, recorder.ended, task))
            else:
                recorded.append(call)
            before = task if action == KERNEL else None
        return tuple(recorded)


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
