"""The streams that block in files, each on a thread of its own: reads ahead, writes behind.

The reader and the streams of a step meet in slots: it fills slot `firing % slots` when the last of
those that use it has given it back (ack), and they wait until it is filled (ready).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiflow.errors import DataError, MpiflowError, TaskError
from mpiflow.plan.protocols import Reader, Writer
from mpiflow.plan.records import Task
from mpiflow.plan.unroll import folded

Check = Callable[[], None]
StartThread = Callable[[str, Callable[[], None]], threading.Thread]
_POLL_SECONDS = 0.05
"""How often a waiting thread looks whether the job has failed elsewhere."""


class ReadTask:
    """The read task of one program: its slots, and which steps are read into them.

    It fires once for each of the spans of rows, in turn: one a micro-batch. `slots` holds the
    arrays of firings until they repeat; `ahead` of them may be filled and not given back. `users`
    has for each of the spans the streams that give back its slot.
    """

    def __init__(
        self,
        tasks: list[Task],
        reader: Reader,
        spans: list[tuple[int, int]],
        slots: list[dict[str, np.ndarray]],
        ahead: int,
        users: list[tuple[str, ...]],
        limits: dict[str, tuple[int, list[int]]],
        who: str,
    ) -> None:
        self.tasks, self.name = tasks, folded(tasks[0])
        self.reader, self.spans, self.slots = reader, spans, slots
        self.ahead, self.limits, self.who = ahead, limits, who
        self._given_back = [dict.fromkeys(streams, 0) for streams in users]
        self.steps: deque[range] = deque()
        self.filled = 0
        self.acknowledged = 0
        self.step = 0
        self.tell: Callable[[int, int, bool], None] | None = None
        """Told the step and the micro-batch of a firing, as it begins (False) and is over."""
        self.guard: Callable[[int], str] | None = None
        """Says what is wrong with filling the slot of a firing now, if anything is."""

    @property
    def micro(self) -> int:
        """The micro-batch that the next firing reads."""
        return self.filled % len(self.spans)

    @property
    def pending(self) -> bool:
        """Whether there is something left to read."""
        return bool(self.steps) or self.micro > 0

    def forget(self) -> None:
        """Read no further; what is filled is of no use, nor the rest of a step that was begun."""
        self.steps.clear()
        self.filled += -self.filled % len(self.spans)
        self.acknowledged = self.filled
        for counts in self._given_back:
            counts.update(dict.fromkeys(counts, self.filled // len(self.spans)))

    def begin(self) -> None:
        """Take the first of the steps still to be read, if the one before is read."""
        if self.micro:
            return
        self.step, rest = self.steps[0][0], self.steps[0][1:]
        if rest:
            self.steps[0] = rest
        else:
            self.steps.popleft()

    def give_back(self, stream: str, micro: int) -> None:
        """A stream that uses a micro-batch has come to the end of it; it may be a step ahead."""
        turns = len(self.spans)
        self._given_back[micro][stream] += 1
        while self._least(self.acknowledged % turns) > self.acknowledged // turns:
            self.acknowledged += 1

    def _least(self, micro: int) -> int:
        """How often all streams have given back a micro-batch."""
        return min(self._given_back[micro].values())

    def fill(self) -> None:
        """Read rows of the step into the next slot, and check the values used as indices."""
        out, step = self.slots[self.filled % len(self.slots)], self.step
        if self.guard and (found := self.guard(self.filled)):
            raise TaskError(f"{self.who}: step {step + 1}, {self.name}: {found}")
        if self.tell:
            self.tell(step, self.micro, False)
        try:
            self.reader.read(step, self.spans[self.micro], out)
        except Exception as error:
            raise _explained(error, f"{self.who}: step {step + 1}, {self.name}") from error
        for field, (below, ignored) in self.limits.items():
            values = out[field]
            if values.size and (int(values.min()) < 0 or int(values.max()) >= below):
                wrong = (values < 0) | (values >= below)
                for value in ignored:
                    wrong &= values != value
                if wrong.any():
                    self._refuse(step, field, wrong, values)
        if self.tell:
            self.tell(step, self.micro, True)

    def _refuse(self, step: int, field: str, at: np.ndarray, values: np.ndarray) -> None:
        wrong = np.flatnonzero(at.reshape(len(at), -1).any(1))
        below, ignored = self.limits[field]
        legal = "".join([f"0..{below - 1}", *(f" or be {value}" for value in ignored)])
        listed = [
            f"\n  {self.reader.describe(step, self.spans[self.micro][0] + int(row))}: {values[row]}"
            for row in wrong[:5]
        ]
        more = f"\n  and {len(wrong) - 5} more rows" if len(wrong) > 5 else ""
        raise DataError(
            f"{self.who}: step {step + 1}, {self.name}: field {field!r} must lie in"
            f" {legal}; out of range:{''.join(listed)}{more}"
        )


def _explained(error: Exception, where: str) -> MpiflowError:
    """The error with where it arose, as the thread that gets it knows only what it waited for."""
    if isinstance(error, MpiflowError):
        return type(error)(f"{where}: {error}")
    return TaskError(f"{where}: {type(error).__name__}: {error}")


class ReadStream:
    """Fills slots ahead of the steps that need them; calls `wake` after each."""

    def __init__(self, start_thread: StartThread, wake: Callable[[], None]) -> None:
        self._changed = threading.Condition()
        self._tasks: list[ReadTask] = []
        self._wake = wake
        self._closed = False
        self._start_thread = start_thread
        self._thread: threading.Thread | None = None

    def expect(self, task: ReadTask, steps: range) -> None:
        """Read these steps next, in this order; earlier ones must have been used up."""
        with self._changed:
            if task not in self._tasks:
                self._tasks.append(task)
            if steps:
                task.steps.append(steps)
            if self._thread is None:
                self._thread = self._start_thread("read", self._run)
            self._changed.notify_all()

    def forget(self, task: ReadTask) -> None:
        """Drop what is read ahead or still to be read."""
        with self._changed:
            task.steps.clear()
            self._changed.wait_for(lambda: not self._busy(task), timeout=60)
            task.forget()

    def give_back(self, task: ReadTask, stream: str, micro: int) -> None:
        """A stream no longer needs what was read for a micro-batch of a step."""
        with self._changed:
            task.give_back(stream, micro)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    _filling: ReadTask | None = None

    @property
    def doing(self) -> str:
        """What is being read now, empty where nothing is. It changes as reading gets on."""
        task = self._filling
        if task is None:
            return ""
        micro = f" micro-batch {task.micro + 1}" if len(task.spans) > 1 else ""
        return f"{task.reader.reading or task.name} for step {task.step + 1}{micro}"

    def _busy(self, task: ReadTask) -> bool:
        return self._filling is task

    def _next(self) -> ReadTask | None:
        for task in self._tasks:
            if task.pending and task.filled - task.acknowledged < task.ahead:
                return task
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._filling = None
                self._changed.notify_all()
                while (task := self._next()) is None and not self._closed:
                    self._changed.wait()
                if self._closed or task is None:
                    return
                self._filling = task
                task.begin()
            task.fill()
            with self._changed:
                task.filled += 1
                self._changed.notify_all()
            self._wake()


class WriteStream:
    """Stores staged slices beside the next steps, one save at a time."""

    def __init__(self, start_thread: StartThread, check: Check) -> None:
        self._start_thread, self._check = start_thread, check
        self._done = threading.Event()
        self._done.set()
        self.doing = ""
        """What is being stored now, empty where nothing is. It changes as storing gets on."""
        self.waited = False
        """Whether the main thread waits until all is stored."""

    @property
    def idle(self) -> bool:
        """Whether everything handed over is stored."""
        return self._done.is_set()

    def begin(self, writer: Writer, pieces: list[tuple[str, tuple[int, ...], Any]]) -> None:
        """Store the pieces (variable, start, array) and finish the writer."""
        assert self.idle, "a save began before the last one was stored"
        self._done.clear()

        def work() -> None:
            try:
                for variable, start, array in pieces:
                    self.doing = variable
                    writer.write(variable, start, array)
                self.doing = "the end of its file"
                writer.finish()
            except MpiflowError:
                raise
            except Exception as error:
                raise _explained(error, "saving") from error
            self.doing = ""
            self._done.set()

        self._start_thread("write", work)

    def wait(self) -> None:
        """Until idle."""
        self.waited = True
        while not self._done.wait(_POLL_SECONDS):
            self._check()
        self.waited = False
