"""Streams that run kernels: what is submitted to one is done in order, a segment at a time.

    HostStream       on a thread of its own, so that the thread that submits goes on
    InlineStream     within `submit`, where there is nothing else to do meanwhile, or `attentive`
                     segments look at it between kernels

No kernel costs a lock: a thread takes segments from its inbox, and tells by a counter how many of
them are done.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import length_hint
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from mpiflow.plan.records import Task

Call = Callable[[], Any]
Events = Sequence[tuple["Stream", int]]
"""Streams of a device, and how many of the segments submitted to each must be done."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Kernels as ready-made calls, and the task of each; `awaited` as in `handshakes.Item`.

    One that is recorded has a single call, which marks its beginning and the end of each task.
    """

    calls: tuple[Call, ...]
    tasks: tuple[Task, ...]
    awaited: bool
    marks: array[float] | None = None


def attentive(segment: Segment, look: Call, every: float) -> Segment:
    """The same calls, and `look` between them, after each that many seconds of them as predicted.

    Kernels share a thread with messages by that: no time goes to wake another one, and to take
    turns with it, which costs a rank of one core more than messages do.
    """
    calls: list[Call] = []
    tasks: list[Task] = []
    passed = 0.0
    for task, call in zip(segment.tasks, segment.calls, strict=True):
        if passed >= every:
            calls.append(look)
            tasks.append(tasks[-1])
            passed = 0.0
        if not tasks or tasks[-1] is not task:
            passed += task.seconds
        calls.append(call)
        tasks.append(task)
    return replace(segment, calls=tuple(calls), tasks=tuple(tasks))


class Stream(Protocol):
    """Something that does segments in the order in which they are submitted."""

    polled: bool
    """Whether `done` has to be looked at, as nobody calls `wake`."""

    failure: tuple[Task, BaseException] | None
    """The task that raised, and what. The segments behind it are not done."""
    seconds: float
    """The seconds that segments took so far."""
    ended: float
    """When the last of them ended, by `time.perf_counter`."""
    thread: int | None
    """The thread that they run on, where it is another."""

    @property
    def submitted(self) -> int:
        """How many segments it has been given so far."""

    @property
    def done(self) -> int:
        """How many of the segments submitted so far are done; never less than before."""

    def submit(self, segment: Segment, after: Events = ()) -> None:
        """Do this next, after all that was submitted before, and these of other streams."""

    def task(self) -> Task | None:
        """The task that is being done. For any thread: it may be one late."""

    def clock(self) -> float:
        """The time, for calls of its segments: once those before them have done their work."""

    def close(self) -> None:
        """Do nothing more, and hold nothing."""


class InlineStream:
    """Does a segment when it is submitted, on the thread that submits it."""

    polled = False

    def __init__(self) -> None:
        self.done = 0
        self.failure: tuple[Task, BaseException] | None = None
        self.seconds = self.ended = 0.0
        self.thread: int | None = None
        self._running: tuple[Segment, Any] | None = None

    @property
    def submitted(self) -> int:
        """As many as are done."""
        return self.done

    def submit(self, segment: Segment, after: Events = ()) -> None:
        """Do it now."""
        began = time.perf_counter()
        calls = iter(segment.calls)
        self._running = segment, calls
        try:
            for call in calls:
                call()
        except Exception as error:
            self.failure = task_at(self._running), error
        self.ended = time.perf_counter()
        self.seconds += self.ended - began
        self.done += 1
        self._running = None

    def task(self) -> Task | None:
        """The task that is being done."""
        running = self._running
        return None if running is None else task_at(running)

    def clock(self) -> float:
        """The time."""
        return time.perf_counter()

    def close(self) -> None:
        """There is nothing to end."""


def timed(segment: Segment, stream: Stream, measured: list[tuple[Task, float]]) -> Segment:
    """The same calls, each of which notes its task and its seconds on that stream."""

    def noting(task: Task, call: Call) -> Call:
        def noted() -> None:
            began = stream.clock()
            call()
            measured.append((task, stream.clock() - began))

        return noted

    pairs = zip(segment.tasks, segment.calls, strict=True)
    return replace(segment, calls=tuple(noting(task, call) for task, call in pairs))


class HostStream:
    """Does segments on a thread of its own; `wake` is called after each that is awaited.

    `quiet` gives what kernels run within, on that thread. Errors, of whatever kind, stay in
    `failure` for the thread that submits. There are no others of its device.
    """

    polled = False

    def __init__(
        self,
        name: str,
        quiet: Callable[[], AbstractContextManager[Any]],
        wake: Callable[[], None],
    ) -> None:
        self.done = self.submitted = 0
        self.failure: tuple[Task, BaseException] | None = None
        self.seconds = self.ended = 0.0
        self._quiet, self._wake = quiet, wake
        self._inbox: SimpleQueue[Segment | None] = SimpleQueue()
        self._closed = False
        self._running: tuple[Segment, Any] | None = None
        # A daemon: the process must be able to end while a kernel hangs.
        thread = Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self.thread = thread.ident

    def submit(self, segment: Segment, after: Events = ()) -> None:
        """Put it into the inbox."""
        self.submitted += 1
        self._inbox.put(segment)

    def task(self) -> Task | None:
        """The task that is being done."""
        running = self._running
        return None if running is None else task_at(running)

    def clock(self) -> float:
        """The time."""
        return time.perf_counter()

    def close(self) -> None:
        """End the thread, once the kernel that runs has ended; this does not wait for it."""
        self._closed = True
        self._inbox.put(None)

    def _run(self) -> None:
        with self._quiet():
            while (segment := self._inbox.get()) is not None and not self._closed:
                began = time.perf_counter()
                calls = iter(segment.calls)
                self._running = segment, calls
                try:
                    for call in calls:
                        call()
                except BaseException as error:
                    self.failure = task_at(self._running), error
                    self._wake()
                    return
                self._running = None
                self.ended = time.perf_counter()
                self.seconds += self.ended - began
                self.done += 1
                if segment.awaited:
                    self._wake()


def task_at(running: tuple[Segment, Any]) -> Task:
    """The task whose call was taken last."""
    segment, calls = running
    if segment.marks is None:
        taken = len(segment.calls) - length_hint(calls)
    else:
        taken = min(len(segment.marks), len(segment.tasks))
    return segment.tasks[max(taken - 1, 0)]
