"""Observe: what a program's steps are counted and recorded with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpiflow.exec.bind import Step
from mpiflow.exec.feed import FeedLane
from mpiflow.exec.lanes import DeviceLane, KernelLane, MessageLane
from mpiflow.exec.meter import Meter
from mpiflow.exec.segments import Segment
from mpiflow.exec.trace import Recorder


class Observer:
    """Meters every step of a program, and records those that its recorder wants."""

    def __init__(self, steps: Sequence[Step], meter: Meter, recorder: Recorder) -> None:
        self.recorder = recorder
        self._plain = {lane: lane.segments for step in steps for lane in _kernels(step)}
        self._recorded: dict[KernelLane, tuple[Segment, ...]] = {}
        self._recording = False
        for lane in self._plain:
            lane.seconds = meter.seconds
        for feed in (step.feed for step in steps):
            if feed is not None:  # it knows its step itself
                feed.recorder = recorder

    def begin(self, phase: Step, step: int) -> None:
        """A step begins now, in a phase of the slots."""
        self._recording = self.recorder.wants(step)
        for lane in phase.lanes:
            own = isinstance(lane, (KernelLane, FeedLane))
            if isinstance(lane, (MessageLane, DeviceLane)) and not own:
                lane.recorder = self.recorder if self._recording else None
        for kernels in _kernels(phase):
            kernels.segments = self._segments(kernels)
        if self._recording:
            self.recorder.begin(step)

    def end(self) -> None:
        """The step is over."""
        if self._recording:
            self.recorder.end()

    def _segments(self, lane: KernelLane) -> tuple[Segment, ...]:
        if not self._recording:
            return self._plain[lane]
        if lane not in self._recorded:
            self._recorded[lane] = tuple(self._record(each) for each in self._plain[lane])
        return self._recorded[lane]

    def _record(self, segment: Segment) -> Segment:
        """The same calls in one that marks when each has ended."""
        marks = self.recorder.marks(segment.tasks)
        call = self.recorder.segment(segment.calls, marks)
        return replace(segment, calls=(call,), marks=marks)


def _kernels(step: Step) -> list[KernelLane]:
    return [lane for lane in step.lanes if isinstance(lane, KernelLane)]
