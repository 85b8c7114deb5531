"""Engine: one thread of a rank goes through all streams of a step, and sleeps in between.

    Lane             one stream of a step: its items in order, and what each waits for
      ├─ KernelLane     submits segments to a stream of the device, which does them by itself
      ├─ MessageLane    starts collectives, sends and receives, and polls those in flight
      └─ ReadLane       looks how far the reader is, which has a thread of its own

This thread makes all calls of MPI, which makes progress only while it is called. Nothing orders
the lanes but what their items wait for; `plan.verify` proves that they come to their ends.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from mpiflow.errors import MpiflowError
from mpiflow.exec.meter import ITEMS, KERNELS, waited_for
from mpiflow.exec.position import Position
from mpiflow.exec.segments import Call, Segment, Stream
from mpiflow.exec.streams import ReadTask
from mpiflow.exec.trace import Recorder
from mpiflow.exec.transport import Message, Transport
from mpiflow.plan.handshakes import Item
from mpiflow.plan.records import Task

_SPIN_SECONDS = 50e-6
_YIELD_SECONDS = 1e-3
_SHORTEST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 200e-6
_CHECK_SECONDS = 0.05
"""How often `check` is called where nothing happens."""


class Failed(Exception):
    """A task of the step raised what is the cause of this."""

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
        for lane, count in self._waits[self.started]:
            if lane.done < count:
                self.held = lane
                return self.done != before
        self.started += 1
        self._start(self.started - 1)
        self.held = None
        return True

    def tasks_done(self) -> int:
        """How many tasks are done; any thread may ask."""
        return self.done

    def _finish(self, number: int) -> None:
        """An item is done."""
        try:
            for call in self.after[number]:
                call()
        except Exception as error:
            raise Failed(self.items[number].tasks[0]) from error
        self.done += 1

    @abstractmethod
    def _poll(self) -> None:
        """Bring `done` up to date."""

    def _start(self, number: int) -> None:
        """Start an item. Items that start by themselves are `started` from the beginning."""
        raise NotImplementedError(self.stream)


class KernelLane(Lane):
    """The segments of a stream of the device.

    Where the time goes is added to `seconds`, by the items of `exec.meter`: what the segments took,
    and how long the stream had nothing to do, by what its next segment waited for.
    """

    _stream: Stream

    def __init__(self, stream: str, items: tuple[Item, ...], segments: tuple[Segment, ...]) -> None:
        super().__init__(stream, items)
        self.segments = segments
        self.seconds = [0.0] * len(ITEMS)

    def use(self, stream: Stream) -> None:
        """Submit to this one in the next step."""
        self._stream, self._before, self._took = stream, stream.done, stream.seconds

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
        task, done = self._stream.task(), self._stream.done - self._before
        before = sum(len(item.tasks) for item in self.items[:done])
        tasks = self.items[done].tasks if done < self.count else ()
        return before + next((i for i, each in enumerate(tasks) if each is task), 0)

    def running(self) -> Task | None:
        """The kernel that runs, if one does."""
        return self._stream.task()

    def _poll(self) -> None:
        stream = self._stream
        if stream.failure is not None:
            task, error = stream.failure
            if isinstance(error, MpiflowError):
                raise error
            raise Failed(task) from error
        self.done = stream.done - self._before

    def _start(self, number: int) -> None:
        if self.held is not None and self.done == number:
            self.seconds[self.held.item] += time.perf_counter() - self._idle_since()
        self._stream.submit(self.segments[number])


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


class Engine:
    """Runs steps on the thread that made it; other threads may call `wake` and `position`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._inbox: SimpleQueue[None] = SimpleQueue()
        self._lanes: Sequence[Lane] = ()
        self._program, self._step, self._runs = "", 0, 0
        transport.wake = self.wake

    def wake(self) -> None:
        """Something is done that the engine may be waiting for."""
        self._inbox.put(None)

    def run(self, lanes: Sequence[Lane], program: str, step: int) -> None:
        """Bring all lanes to their ends. Raises Failed, or what a transport raises."""
        for lane in lanes:
            lane.begin()
        self._runs += 1
        self._program, self._step, self._lanes = program, step, lanes
        sleep = Sleep(self._inbox)
        last = None
        while True:
            moved = False
            for lane in lanes:
                if lane.move():
                    moved, last = True, lane
            if moved:
                sleep.reset()
                continue
            if all(lane.done == lane.count for lane in lanes):
                break
            if self._transport.check is not None:
                self._transport.check()
            sleep.pass_time(lanes)
        for lane in lanes:
            if isinstance(lane, KernelLane) and last is not None:
                lane.end(last)
        self._lanes = ()

    def position(self) -> Position:
        """Where the rank is; any thread may ask."""
        lanes, runs = self._lanes, self._runs
        if not lanes:
            return Position(runs)
        done = tuple((lane.stream, lane.tasks_done()) for lane in lanes)
        task = next((l.running() for l in lanes if isinstance(l, KernelLane)), None)
        seconds = task.seconds if task is not None else _slowest(lanes)
        return Position(runs, self._program, self._step, done, task is not None, seconds)


def _slowest(lanes: Sequence[Lane]) -> float:
    """The longest that what the lanes have in hand is predicted to take, in seconds."""
    heads = (lane.items[lane.done].tasks[0] for lane in lanes if lane.done < lane.count)
    return max((task.seconds for task in heads), default=0.0)


class Sleep:
    """How the engine passes the time between two looks at its lanes.

    With nothing in flight it sleeps until woken. While kernels run beside what is in flight it
    polls every 200 us, since their core may be this one's. Where kernels wait for what is in flight
    it spins for 50 us, then yields the core up to 1 ms, and only then sleeps.
    """

    def __init__(self, inbox: SimpleQueue[None]) -> None:
        self._inbox = inbox
        self.reset()

    def reset(self) -> None:
        """Something has happened."""
        self._began = 0.0
        self._sleep = _SHORTEST_SLEEP_SECONDS

    def pass_time(self, lanes: Sequence[Lane]) -> None:
        """Until woken, or for a while."""
        in_flight = [lane for lane in lanes if lane.started > lane.done]
        if not any(lane.polled for lane in in_flight):
            self._until_woken(_CHECK_SECONDS)
        elif any(isinstance(lane, KernelLane) for lane in in_flight) or not self._is_short():
            self._until_woken(self._sleep)
            self._sleep = min(2 * self._sleep, _LONGEST_SLEEP_SECONDS)

    def _is_short(self) -> bool:
        """Whether it has not waited for long; leaves the core to others if they want it."""
        now = time.perf_counter()
        self._began = self._began or now
        if now - self._began > _SPIN_SECONDS:
            os.sched_yield()
        return now - self._began < _YIELD_SECONDS

    def _until_woken(self, seconds: float) -> None:
        try:
            self._inbox.get(timeout=seconds)
            while True:  # one look is enough for all that has happened
                self._inbox.get_nowait()
        except Empty:
            return
