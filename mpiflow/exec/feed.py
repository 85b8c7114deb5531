"""Feed: copies to the device of what is read, which may begin in the step before their own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from mpiflow.exec.lanes import DeviceLane, Failed, Lane
from mpiflow.exec.segments import Segment, Stream
from mpiflow.exec.streams import ReadTask
from mpiflow.plan.handshakes import Item
from mpiflow.plan.records import READ


class FeedLane(DeviceLane):
    """The copies of a step.

    In the step before they wait for what is read, and for those who use their slots there, see
    `Item.early`. Other programs may use the stream in between.
    """

    def __init__(self, stream: str, items: tuple[Item, ...], segments: tuple[Segment, ...]) -> None:
        super().__init__(stream, items, segments)
        self.early = False
        """Whether its own step is still to come."""
        self.read: ReadTask | None = None
        self._firings = 0
        self._others: dict[str, Lane] = {}
        self._ends: list[int] = []  # of each item: how many segments of the stream are done then

    def use(self, stream: Stream) -> None:
        """Submit to this one."""
        self._stream, self.polled = stream, stream.polled

    def hurry(
        self, stream: Stream, others: Sequence[Lane], read: ReadTask, firings: int, step: int
    ) -> None:
        """Begin in the step of the others, in and before which there are so many firings of reads.

        `step` is that of its own.
        """
        self.use(stream)
        self.begin()
        self._others = {lane.stream: lane for lane in others}
        self.read, self._firings, self.step, self.early = read, firings, step, True

    def is_read(self, count: int) -> bool:
        """Whether so many micro-batches of its own step are read, in the step before."""
        return self.read is not None and self.read.filled >= self._firings + count

    def begin(self) -> None:
        """Go back to the first item, or on from where the step before has come."""
        if not self.early:
            super().begin()
            self._ends.clear()
            self.step = None
        self.early = False

    def behind(self, count: int) -> tuple[Stream, int]:
        """Its stream, and how many segments of that are done when so many of its items are."""
        return self._stream, self._ends[count - 1]

    def move(self) -> bool:
        """See what is done, and start the next item if it may; whether anything has changed."""
        try:
            return super().move()
        except Failed as error:
            error.later = int(self.early)
            raise

    def reached(self) -> int:
        """How many items the device has done, in the step before and in its own."""
        return bisect_right(self._ends, self._stream.done)

    def _poll(self) -> None:
        if self.done < self.started:
            super()._poll()

    def _blocked(self, number: int) -> Lane | None:
        if not self.early:
            return super()._blocked(number)
        early, own = self.items[number].early, self._others[self.stream]
        reads = dict(self.items[number].waits).get(READ, 0)
        if early is None or own.started < own.count or not self.is_read(reads):
            return own
        for lane, count in ((self._others[stream], count) for stream, count in early):
            if (lane.started if isinstance(lane, DeviceLane) else lane.done) < count:
                return lane
        return None

    def _submit(self, number: int, events: Sequence[tuple[DeviceLane, int]]) -> None:
        if self.early:
            early = ((self._others[s], count) for s, count in self.items[number].early or ())
            events = [(lane, count) for lane, count in early if isinstance(lane, DeviceLane)]
        super()._submit(number, events)
        self._ends.append(self._stream.submitted)
