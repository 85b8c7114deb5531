"""One failure anywhere ends the whole job, and its cause is printed once.

    with guard(transport) as failure:
        failure.use_folder(folder)             # from here on the ranks agree on who prints
        failure.start_thread("read", work)     # an error in there is raised in the main thread
        ...

Only one thread may call MPI, so a thread that fails hands its error to the main thread, which
finds it in its next wait (`transport.check`) and aborts the job.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpiflow.errors import MpiflowError, StallError, TaskError
from mpiflow.exec.transport import DRAIN_SECONDS, Aborted, Transport, is_on_all_ranks
from mpiflow.exec.witness import Lifeline

REPORT = "failure.txt"
"""The file in the run's folder that keeps what ended it."""
# The rank that prints ends the others; these wait that long for it, and end the job if it cannot.
GRACE_SECONDS = 3.0
# How long a failed thread waits for the main thread, which may be deep in a kernel.
THREAD_GRACE_SECONDS = 5.0
_ABORT_SECONDS = 1.0
_MARK_SECONDS = 1.0


class Failure:
    """Watches over one rank: collects its first error, prints it, and ends the job."""

    def __init__(self, transport: Transport) -> None:
        """Collective."""
        self._transport = transport
        self._token = transport.broadcast(os.urandom(6).hex().encode()).decode()
        self._folder: Path | None = None
        self._pending: BaseException | None = None
        self._lock = threading.Lock()
        self._taken = threading.Event()
        self.lifeline: Lifeline | None = None
        self.checks = 0
        """How often the main thread has looked whether what it waits for has come."""
        transport.check = self.check

    def use_folder(self, folder: Path) -> None:
        """Settle in this run folder, which exists on all ranks, who prints a failure."""
        self._folder = folder
        if self._transport.rank == 0:
            for old in folder.glob(".failure-*"):
                if old != self._mark(folder):
                    old.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise the error of a thread that failed. Called in every wait."""
        self.checks += 1
        if self._pending is not None:
            self._taken.set()
            raise self._pending

    def start_thread(self, name: str, function: Callable[[], None]) -> threading.Thread:
        """Run `function` on a thread; whatever it raises ends the job."""

        def run() -> None:
            try:
                function()
            except Aborted:
                return
            except BaseException as error:
                self.hand_over(error, THREAD_GRACE_SECONDS)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def hand_over(self, error: BaseException, grace: float) -> None:
        """Give the main thread an error; end the process if it is not taken in `grace` seconds."""
        with self._lock:
            if self._pending is not None:
                return
            self._pending = error
        if not self._taken.wait(grace):
            try:
                self.report(error)
            finally:
                self._leave(exit_code(error))

    def _leave(self, code: int) -> None:
        """End the job from a thread that may not call MPI, as the one that may will not."""
        # A launcher that sees one process end ends the others, but may give their code instead.
        last = threading.Timer(_ABORT_SECONDS, os._exit, [code])
        last.daemon = True
        last.start()
        self._transport.abort(code)
        os._exit(code)

    def end(self, error: BaseException) -> None:
        """Print the error, unless another rank does, and end the job. Main thread only."""
        self._taken.set()
        try:
            self.report(error)
        finally:
            self._transport.abort(exit_code(error))

    def report(self, error: BaseException) -> None:
        """Print the error where this rank is the first to fail; else give the first one time."""
        if self.lifeline is not None:
            self.lifeline.let_go()
        if not self._is_first(error):
            time.sleep(GRACE_SECONDS)
            return
        text = describe(error, self._transport)
        # Nowhere left to say it, or no room on the disk: the job must end all the same.
        with suppress(OSError, ValueError):
            sys.stderr.write(_stack(error, text) + text)
            sys.stderr.flush()
        if self._folder is not None:
            trace = "".join(traceback.format_exception(error))
            report = self._folder / REPORT
            _within(GRACE_SECONDS, lambda: report.write_text(f"{text}\n{trace}") > 0)
        if self._transport.size > 1:
            time.sleep(DRAIN_SECONDS)

    def say(self, text: str) -> None:
        """Print something on standard error that is no failure."""
        with suppress(OSError, ValueError):
            sys.stderr.write(f"mpiflow: {text}\n")
            sys.stderr.flush()

    def _is_first(self, error: BaseException) -> bool:
        if is_on_all_ranks(error):
            return self._transport.rank == 0
        if self._folder is None:
            return True
        mark = self._mark(self._folder)
        # A stall is found by another rank where the first is slow to end. The file system may be
        # what stands still.
        found = _within(_MARK_SECONDS, lambda: _is_new(mark))
        return found is None or found

    def _mark(self, folder: Path) -> Path:
        return folder / f".failure-{self._token}"


@contextmanager
def guard(transport: Transport) -> Iterator[Failure]:
    """Collective. Closes the transport when the body ends well; ends the job on all ranks if not.

    To leave by sys.exit is a failure too, as other ranks would wait for this one for ever.
    """
    failure = Failure(transport)
    try:
        yield failure
        failure.check()
        transport.close()
    except Aborted:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and transport.size == 1:
            transport.close()
            raise
        failure.end(error)
        # Reached where there was no other rank to end.
        raise SystemExit(exit_code(error)) from error


def _within(seconds: float, function: Callable[[], bool]) -> bool | None:
    """What the function gives; None where files do not answer in time, or cannot be written."""
    found: list[bool] = []

    def run() -> None:
        with suppress(OSError):
            found.append(function())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _is_new(path: Path) -> bool:
    """Make an empty file; whether there was none."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def exit_code(error: BaseException) -> int:
    """What the job ends with: never 0."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else 1
    return error.exit_code if isinstance(error, MpiflowError) else 1


def describe(error: BaseException, transport: Transport) -> str:
    """The error in the user's words: what failed, on which rank."""
    text = _text(error)
    # Which rank found that the job stands still does not matter; who is to blame is in the text.
    everyone = is_on_all_ranks(error) or isinstance(error, StallError)
    alone = transport.size == 1 or everyone or transport.name in text
    return f"mpiflow: {text}\n" if alone else f"mpiflow: {transport.name}: {text}\n"


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"left by sys.exit({error.code!r}) while other ranks were at work"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    line = "".join(traceback.format_exception_only(error)).rstrip()
    return line.partition(": ")[2] or line if isinstance(error, MpiflowError) else line


def _stack(error: BaseException, text: str) -> str:
    """Where an error that was not foreseen arose; without what `text` says already."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return ""
    if isinstance(error, TaskError) and error.__cause__ is not None:
        return _stack(error.__cause__, text)
    if isinstance(error, MpiflowError):
        return ""
    *stack, last = traceback.format_exception(error)
    _, _, message = _text(error).partition(": ")
    said = last.strip() in text or (message and message in text)
    return "".join(stack if said else [*stack, last])
