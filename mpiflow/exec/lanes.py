"""Lanes: what a rank does in a step, stream by stream, and how far each has come.

Lane             one stream of a step: its items in order, and what each waits for
  ├─ DeviceLane     submits segments to a stream of the device, which does them by itself
  │    ├─ KernelLane   those of compute, whose time is metered
  │    └─ FeedLane     copies of what is read, see `exec.feed`
  ├─ MessageLane    starts collectives, sends and receives, and polls those in flight
  └─ ReadLane       looks how far the reader is, which has a thread of its own
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from mpiflow.errors import MpiflowError
from mpiflow.exec.meter import ITEMS, KERNELS, waited_for
from mpiflow.exec.segments import Call, Segment, Stream
from mpiflow.exec.streams import ReadTask
from mpiflow.exec.trace import Recorder
from mpiflow.exec.transport import Message
from mpiflow.plan.handshakes import Item
from mpiflow.plan.records import Task


class Finding(Exception):
    """What a check has found wrong with a task, said in full; of which, where it knows better."""

    def __init__(self, message: str, task: Task | None = None) -> None:
        super().__init__(message)
        self.task = task


class Failed(Exception):
    """A task of the step raised what is the cause of this; or one of so many steps `later`."""

    later = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task.name)
        self.task = task


class Lane(ABC):
    """One stream of a step. `started` and `done` count its items."""

    polled = False
    """Whether what is in flight has to be looked at, as nobody calls `wake` for it."""

    def __init__(self, stream: str, items: tuple[Item, ...]) -> None:
        self.stream, self.items = stream, items
        self.count = len(items)
        self.started = self.done = 0
        self.after: list[tuple[Call, ...]] = [()] * self.count
        """What is called when each item is done."""
        self.item = waited_for(items[0].tasks[0].kind)
        self.held: Lane | None = None
        """What the next item was last seen to wait for."""
        self.look: Callable[[int], None] | None = None
        """What is called before each item starts, and may raise a Finding."""
        self._waits: tuple[tuple[tuple[Lane, int], ...], ...] = ()

    def tie(self, lanes: dict[str, Lane]) -> None:
        """Find the lanes that the items wait for."""
        self._waits = tuple(
            tuple((lanes[stream], count) for stream, count in item.waits) for item in self.items
        )

    def begin(self) -> None:
        """Go back to the first item, for a new step."""
        self.started = self.done = 0

    def move(self) -> bool:
        """See what is done, and start the next item if it may; whether anything has changed."""
        before = self.done
        self._poll()
        if self.started == self.count:
            return self.done != before
        lane = self._blocked(self.started)
        if lane is not None:
            self.held = lane
            return self.done != before
        if self.look is not None:
            self._looked(self.look, self.started)
        self.started += 1
        self._start(self.started - 1)
        self.held = None
        return True

    def _blocked(self, number: int) -> Lane | None:
        """The first lane that is not yet where an item needs it to be."""
        for lane, count in self._waits[number]:
            if lane.done < count:
                return lane
        return None

    def _looked(self, look: Callable[[int], None], number: int) -> None:
        try:
            look(number)
        except Finding as error:
            raise Failed(error.task or self.items[number].tasks[0]) from error

    def tasks_done(self) -> int:
        """How many tasks are done; any thread may ask."""
        return self.done

    def _finish(self, number: int) -> None:
        """An item is done."""
        self.done += 1
        try:
            for call in self.after[number]:
                call()
        except Exception as error:
            raise Failed(self.items[number].tasks[0]) from error

    def has_news(self) -> bool:
        """Of what is polled and in flight: whether the first item is over. Leaves `done` alone."""
        raise NotImplementedError(self.stream)

    @abstractmethod
    def _poll(self) -> None:
        """Bring `done` up to date."""

    def _start(self, number: int) -> None:
        """Start an item. Items that start by themselves are `started` from the beginning."""
        raise NotImplementedError(self.stream)


class DeviceLane(Lane):
    """The segments of a stream of the device; `recorder` is told of each.

    What waits for another stream of the device is submitted once that has been submitted: the
    device keeps the order. What waits for anything else is submitted when that is done.
    """

    recorder: Recorder | None = None
    step: int | None = None
    """The step that is recorded, where it is not the one at work."""
    _stream: Stream
    _before: int

    def __init__(self, stream: str, items: tuple[Item, ...], segments: tuple[Segment, ...]) -> None:
        super().__init__(stream, items)
        self.segments = segments
        self._events: tuple[tuple[tuple[DeviceLane, int], ...], ...] = ()

    def tie(self, lanes: dict[str, Lane]) -> None:
        """Find the lanes that the items wait for; a stream keeps its own order anyway."""
        super().tie(lanes)
        self._events = tuple(
            tuple((l, n) for l, n in waits if isinstance(l, DeviceLane) and l is not self)
            for waits in self._waits
        )
        self._waits = tuple(
            tuple((l, n) for l, n in waits if not isinstance(l, DeviceLane))
            for waits in self._waits
        )

    def use(self, stream: Stream) -> None:
        """Submit to this one in the next step."""
        self._stream, self._before, self.polled = stream, stream.done, stream.polled

    def tasks_done(self) -> int:
        """How many tasks are done; it may be one late."""
        return self.reached()

    def reached(self) -> int:
        """How many items the device has done, whether or not that has been seen."""
        return self._stream.done - self._before

    def behind(self, count: int) -> tuple[Stream, int]:
        """Its stream, and how many segments of that are done when so many of its items are."""
        return self._stream, self._before + count

    def _blocked(self, number: int) -> Lane | None:
        for lane, count in self._events[number]:
            if lane.started < count:
                return lane
        return super()._blocked(number)

    def has_news(self) -> bool:
        """Whether the first segment in flight is done, or has failed."""
        stream = self._stream
        return stream.failure is not None or self.reached() > self.done

    def _poll(self) -> None:
        stream = self._stream
        if stream.failure is not None:
            task, error = stream.failure
            if isinstance(error, (MpiflowError, Failed)):  # of a message that was looked at
                raise error
            raise Failed(task) from error
        self._advance(self.reached())

    def _advance(self, done: int) -> None:
        """So many segments are done."""
        while self.done < done:
            if self.recorder is not None:
                self.recorder.ended(self.items[self.done].tasks[0], self.step)
            self._finish(self.done)

    def _start(self, number: int) -> None:
        if self.recorder is not None:
            self.recorder.began(self.items[number].tasks[0], self.step)
        self._submit(number, self._events[number])

    def _submit(self, number: int, events: Sequence[tuple[DeviceLane, int]]) -> None:
        after = [lane.behind(count) for lane, count in events]
        self._stream.submit(self.segments[number], after)


class KernelLane(DeviceLane):
    """The segments of compute.

    Where the time goes is added to `seconds`, by the items of `exec.meter`: what the segments took,
    and how long the stream had nothing to do, by what its next segment waited for.
    """

    def __init__(self, stream: str, items: tuple[Item, ...], segments: tuple[Segment, ...]) -> None:
        super().__init__(stream, items, segments)
        self.seconds = [0.0] * len(ITEMS)

    def use(self, stream: Stream) -> None:
        """Submit to this one in the next step."""
        super().use(stream)
        self._took = stream.seconds

    def begin(self) -> None:
        """Go back to the first segment."""
        super().begin()
        self._began = time.perf_counter()

    def end(self, last: Lane) -> None:
        """The step is over, and this lane was the last to move."""
        self.seconds[KERNELS] += self._stream.seconds - self._took
        if last is not self:
            self.seconds[last.item] += time.perf_counter() - self._idle_since()

    def _idle_since(self) -> float:
        return max(self._began, self._stream.ended)

    def tasks_done(self) -> int:
        """How many kernels are done; it may be one late."""
        task, done = self._stream.task(), self.reached()
        before = sum(len(item.tasks) for item in self.items[:done])
        tasks = self.items[done].tasks if done < self.count else ()
        return before + next((i for i, each in enumerate(tasks) if each is task), 0)

    def running(self) -> Task | None:
        """The kernel that runs, if one does."""
        return self._stream.task()

    def _advance(self, done: int) -> None:
        self.done = done

    def _start(self, number: int) -> None:
        if self.held is not None and self.done == number:
            self.seconds[self.held.item] += time.perf_counter() - self._idle_since()
        super()._start(number)
        # What was done within `submit` is seen now: messages that wait for it begin before the next
        # segment, not after it.
        self._poll()


class MessageLane(Lane):
    """Messages of one communicator, or to or from one stage; `recorder` is told of each."""

    recorder: Recorder | None = None

    def __init__(
        self,
        stream: str,
        items: tuple[Item, ...],
        messages: tuple[Message, ...],
        after: tuple[tuple[Call, ...], ...],
        *,
        polled: bool,
    ) -> None:
        """`after` has what to call when each message is over."""
        super().__init__(stream, items)
        self._messages, self.polled = messages, polled
        self.after = list(after)

    def has_news(self) -> bool:
        """Whether the first message in flight is over, which makes progress by that."""
        return self._is_done(self.done)

    def _poll(self) -> None:
        while self.done < self.started and self._is_done(self.done):
            if self.recorder is not None:
                self.recorder.ended(self.items[self.done].tasks[0])
            self._finish(self.done)

    def _is_done(self, number: int) -> bool:
        try:
            return self._messages[number].test()
        except MpiflowError:
            raise
        except Exception as error:
            raise Failed(self.items[number].tasks[0]) from error

    def _start(self, number: int) -> None:
        (task,) = self.items[number].tasks
        if self.recorder is not None:
            self.recorder.began(task)
        try:
            self._messages[number].start()
        except MpiflowError:
            raise
        except Exception as error:
            raise Failed(task) from error


class ReadLane(Lane):
    """What the reader has filled of this step, which it does by itself, ahead of it."""

    _read: ReadTask
    _before: int

    def use(self, read: ReadTask, firings: int) -> None:
        """The step begins after so many firings of a read task."""
        self._read, self._before = read, firings

    def begin(self) -> None:
        """Nothing has to be started."""
        super().begin()
        self.started = self.count

    def _poll(self) -> None:
        filled = min(self._read.filled - self._before, self.count)
        while self.done < filled:
            self._finish(self.done)
