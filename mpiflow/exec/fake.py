"""Fake: memory of the host that behaves as an accelerator, and is as strict as one could be.

    what the host submits ──> queues, one a stream ──> run one at a time, in an order of the seed,
                                                       only when the host can do nothing else

A segment runs when its events have happened and something that the host waits for needs it: as
late as a device may be. Memory holds NaN (bytes 0xFF) until it is written. What uses memory without
having waited for those before it is found when it is submitted, see `exec.hazards`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mpiflow.errors import TaskError
from mpiflow.exec.device import InHostMemory, host_bytes, host_dtype
from mpiflow.exec.direct import DirectGroup
from mpiflow.exec.hazards import POISON, Hazards
from mpiflow.exec.segments import Call, Events, Segment, task_at
from mpiflow.exec.transport import Group, Message, Request
from mpiflow.plan.places import ACCELERATOR
from mpiflow.plan.records import Task


class _Numpy:
    """NumPy, with products of 16-bit floats as accelerators have them: sums in float32."""

    wide_sums = True

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def matmul(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> np.ndarray:
        """As NumPy's, into an array; what is narrower is rounded once, at the end, if at all."""
        if left.dtype.itemsize > 2:
            return np.matmul(left, right, out=out)
        product = np.matmul(left.astype(np.float32), right.astype(np.float32))
        np.copyto(out, product, casting="unsafe")
        return out


class DeviceMessage:
    """What NCCL would do, by the transport of the host: begun when its stream comes to it."""

    def __init__(self, message: Message) -> None:
        self._message, self.before = message, list[Call]()

    def __call__(self) -> None:
        """Begin it."""
        for call in self.before:
            call()
        self._message.start()

    def test(self) -> bool:
        """Make progress; whether it is over."""
        return self._message.test()


class FakeStream:
    """A queue of segments; `Fake.advance` takes the next one from it."""

    polled = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = 0
        self.failure: tuple[Task, BaseException] | None = None
        self.seconds = self.ended = 0.0
        self.thread: int | None = None
        self.queue: deque[tuple[Segment, Events]] = deque()
        self._running: tuple[Segment, Iterator[Call]] | None = None
        self._message: DeviceMessage | None = None

    @property
    def submitted(self) -> int:
        """Those that are done, and those in the queue."""
        return self.done + len(self.queue)

    def submit(self, segment: Segment, after: Events = ()) -> None:
        """Put it into the queue."""
        self.queue.append((segment, tuple(after)))

    def task(self) -> Task | None:
        """The task that is being done."""
        running = self._running
        return None if running is None else task_at(running)

    def clock(self) -> float:
        """The time."""
        return time.perf_counter()

    def close(self) -> None:
        """Drop what is queued."""
        self.queue.clear()

    def awaited(self) -> int:
        """How many segments must be done for the first one that the host waits for; 0 for none."""
        numbers = (i for i, (segment, _) in enumerate(self.queue) if segment.awaited)
        return self.done + next(numbers, -1 - self.done) + 1

    def events(self, count: int) -> Iterator[tuple[FakeStream, int]]:
        """What the segments up to a number of them wait for."""
        for _, after in list(self.queue)[: count - self.done]:
            for stream, number in after:
                assert isinstance(stream, FakeStream), stream
                yield stream, number

    def ready(self) -> bool:
        """Whether the next segment may begin."""
        if not self.queue or self._message is not None or self.failure is not None:
            return False
        return all(stream.done >= count for stream, count in self.queue[0][1])

    def run(self) -> None:
        """Do the next segment, or begin it if it is a message."""
        segment, _ = self.queue[0]
        began, calls = time.perf_counter(), iter(segment.calls)
        self._running = segment, calls
        try:
            for call in calls:
                call()
                if isinstance(call, DeviceMessage):
                    self._message = call
                    return
        except Exception as error:
            self.failure = task_at(self._running), error
            return
        self._end()
        self.seconds += self.ended - began

    def test(self) -> bool:
        """Whether a message that was begun is over now."""
        if self._message is None or self.failure is not None:
            return False
        try:
            if not self._message.test():
                return False
        except Exception as error:
            self.failure = self.queue[0][0].tasks[0], error
            return True
        self._message = None
        self._end()
        return True

    def _end(self) -> None:
        self.queue.popleft()
        self._running = None
        self.done += 1
        self.ended = time.perf_counter()

    @property
    def running(self) -> bool:
        """Whether a message of it is under way."""
        return self._message is not None


class FakeSide:
    """What the device does between messages of route mpi: only when it is waited for."""

    def __init__(self) -> None:
        self.pending = False
        self._queue: deque[Call] = deque()
        self._asked = self._done = 0

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        """Copy later."""
        self._ask(partial(np.copyto, target, source))

    def combine(self, ufunc: str, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
        """Compute later."""
        self._ask(partial(getattr(np, ufunc), x, y, out=out))

    def mark(self) -> Request:
        """Done as soon as it is tested, and what was asked for before it with it."""
        self.pending = False
        return _Marked(self, self._asked)

    def come_to(self, count: int) -> None:
        """Do the first `count` of all that was asked for, if they are not done."""
        while self._done < count:
            self._queue.popleft()()
            self._done += 1

    def _ask(self, call: Call) -> None:
        self._queue.append(call)
        self._asked, self.pending = self._asked + 1, True


class _Marked(Request):
    def __init__(self, side: FakeSide, count: int) -> None:
        self._side, self._count = side, count

    def test(self) -> bool:
        """Let the device come so far."""
        self._side.come_to(self._count)
        return True


class Fake(InHostMemory):
    """A device of one rank; `seed` decides which of several streams goes on first."""

    kind: str = ACCELERATOR
    xp: Any = _Numpy()

    def __init__(self, seed: int | str = 0) -> None:
        self._hazards = Hazards()
        self.hazards: Hazards | None = self._hazards
        self._random = random.Random(seed)
        self._streams: dict[str, FakeStream] = {}
        self._wanted: tuple[FakeStream, int] | None = None

    def allocate(self, nbytes: int, space: str = "") -> np.ndarray:
        """Bytes that are NaN."""
        memory = host_bytes(nbytes)
        memory.fill(POISON)
        self._hazards.add(space, memory)
        return memory

    def dtype(self, name: str) -> np.dtype[Any]:
        """NumPy's dtype."""
        return host_dtype(name)

    def stream(self, name: str, wake: Callable[[], None]) -> FakeStream:
        """A queue; nobody calls `wake`, as nothing runs by itself."""
        self._streams[name] = FakeStream(name)
        return self._streams[name]

    def copier(self, target: np.ndarray, source: np.ndarray) -> Call:
        """A copy, when its stream comes to it."""
        return partial(np.copyto, target, source)

    def message(self, message: Message) -> DeviceMessage:
        """A message that begins when its stream comes to it."""
        return DeviceMessage(message)

    def direct(self, group: Group) -> Group:
        """The same messages and sums as between devices; the sums when they are waited for."""
        return DirectGroup(group, FakeSide())

    def fetch(self, array: np.ndarray) -> np.ndarray:
        """A copy, as memory of the host is another."""
        return array.copy()

    def fill(self, array: np.ndarray, values: np.ndarray) -> None:
        """Copy between steps."""
        np.copyto(array, values)
        self._hazards.filled(array)

    def advance(self) -> bool:
        """Do one thing that the host waits for, at random if there are several.

        TaskError where streams wait for each other.
        """
        streams = [stream for stream in self._streams.values() if stream.queue]
        wanted = self._choose(streams)
        if wanted is None:
            return False
        needed = _needed(*wanted)
        ready = [stream for stream in needed if stream.ready()]
        if not ready:
            running = [stream for stream in streams if stream.running]
            if any([stream.test() for stream in running]):
                return True
            # A message waits for other ranks, which may wait for others of this one.
            ready = [stream for stream in streams if stream.ready()]
            if not ready:
                if not running and not any(stream.failure for stream in streams):
                    raise TaskError(_stuck(needed))
                return False
        self._random.choice(ready).run()
        return True

    def _choose(self, streams: list[FakeStream]) -> tuple[FakeStream, int] | None:
        """A stream, and how far it must come; the same until it is there."""
        wanted = self._wanted
        if wanted is None or wanted[0].done >= wanted[1] or not wanted[0].queue:
            awaited = [(stream, count) for stream in streams if (count := stream.awaited())]
            self._wanted = self._random.choice(awaited) if awaited else None
        return self._wanted


def _needed(stream: FakeStream, count: int) -> list[FakeStream]:
    """The streams that have to go on for one to come so far, in the order in which found."""
    wanted = {stream: count}
    queue = deque([(stream, count)])
    while queue:
        head, reach = queue.popleft()
        for other, number in head.events(reach):
            if number > max(other.done, wanted.get(other, 0)):
                wanted[other] = number
                queue.append((other, number))
    return list(wanted)


def _stuck(streams: list[FakeStream]) -> str:
    """Which heads of streams wait for what."""
    lines = [
        f"\n  {stream.queue[0][0].tasks[0].name} on {stream.name} waits for {other.name} to have"
        f" done {number}, of which it has done {other.done}"
        for stream in streams
        if stream.queue
        for other, number in stream.events(stream.done + 1)
        if other.done < number
    ]
    return "the streams of the device wait for each other:" + "".join(lines)
