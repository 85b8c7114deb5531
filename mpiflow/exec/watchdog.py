"""Finds that a job stands still, and says who holds it up.

A thread on each rank samples where the rank is, and sends that to a few ranks that watch (`post`).
They know for how long nobody has moved. What is too long follows from the run itself: its longest
stand so far, and the predicted time of the tasks in hand. Then the wait-for graph names the culprit
(`blame`), and the job ends; where files are slow, it is told, and has longer to mend.

The thread calls no MPI. Time counts only while this process itself gets on: a job that was
suspended, or a machine that slept, has not stood still.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mpiflow.errors import StallError
from mpiflow.exec.beat import Beat, unpack
from mpiflow.exec.blame import FILES, LOST, Court, Seen, Verdict
from mpiflow.exec.failure import REPORT, Failure
from mpiflow.exec.post import Address, Post
from mpiflow.exec.session import Session
from mpiflow.exec.transport import Transport
from mpiflow.exec.witness import Lifeline
from mpiflow.plan.records import Plan

RANKS = "ranks.txt"
"""The file in the run's folder that says which process is which rank."""
LEAST_SECONDS = 5.0
"""The job is never ended sooner."""
FILE_SECONDS = 10.0
"""Slow files are told after so long, and end the job after `FILE_PATIENCE` times that."""
FILE_PATIENCE = 30
STANDS = 4
"""How many times its longest stand so far the job may stand still."""
PREDICTIONS = 20
"""How many times its predicted time a task may take."""
FIRST = 3
"""How many times longer everything may take where a program runs for the first time."""
OPENING_SECONDS = 60.0
"""Until all ranks have begun: they read files and get memory, which can stop all their threads."""
_PERIOD = 0.25
_BEATS_PER_SECOND = 1000
"""How many a watcher can take in with a small part of a core."""
_SILENT_SECONDS, _SILENT_BEATS = 2.0, 4
_STACK_SECONDS = 2.0
_GRACE_SECONDS = 1.0
_FRAMES = 2
_FILE_BEATS = 8
_PLACE_BEATS = 4
_LOOK_SECONDS = 0.5
_GONE_SECONDS = 2.0
GONE = "whose process is gone"
_STATES = {
    "T": "whose process is stopped",
    "t": "whose process is stopped by a debugger",
    "D": "whose process waits for a disk or a file system",
    "Z": GONE,
    "X": GONE,
}


class Pulse:
    """Makes the beats of one rank; `checks` counts how often its main thread looks about."""

    def __init__(self, transport: Transport, checks: Callable[[], int]) -> None:
        self._transport, self._checks = transport, checks
        self.watched: Session | None = None
        """What the rank runs, once it is bound."""
        self._checked = 0
        self._main = threading.get_ident()
        self._last = Beat(transport.rank, 0)

    def __call__(self, elapsed: float) -> Beat:
        """The beat for now, `elapsed` seconds after the last one."""
        beat = self._now(self._last.number + 1)
        if beat.place() == self._last.place():
            still = self._last.still + elapsed
            deaf = self._last.deaf + elapsed if self._checks() == self._checked else 0.0
            stack = self._stack() if self._stuck(still, deaf) else ""
            beat = replace(beat, still=still, deaf=deaf, stack=stack)
        self._checked, self._last = self._checks(), beat
        return beat

    def _now(self, number: int) -> Beat:
        transport = self._transport
        rank, entered, waiting = transport.rank, transport.entered, transport.waiting
        beat = Beat(rank, number, entered=entered, waiting=waiting)
        if self.watched is not None:
            reads, writes = self.watched.reads, self.watched.writes
            beat = replace(
                beat,
                position=self.watched.position(),
                reading=reads.doing,
                writing=writes.doing,
                saving=writes.waited,
            )
        busy = not (beat.position.program or waiting or beat.saving)
        return replace(beat, line=self._line()) if busy else beat

    def _stuck(self, still: float, deaf: float) -> bool:
        waits = self._transport.waiting and deaf < _STACK_SECONDS
        return still > _STACK_SECONDS and not waits

    def _stack(self) -> str:
        """Where the thread is that kernels run on, or the main one, innermost last."""
        thread = self.watched.thread() if self.watched else None
        frame = sys._current_frames().get(thread or self._main)
        return "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip() if frame else ""

    def _line(self) -> str:
        frame = sys._current_frames().get(self._main)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


class Watch:
    """What one of the ranks that watch knows of all; time is in seconds of its own."""

    def __init__(self, plan: Plan, addresses: list[Address], own: int, period: float) -> None:
        self._court = Court(plan)
        self._addresses, self._own, self._period = addresses, own, period
        self._beats: dict[int, Beat] = {}
        self._heard = [0.0] * len(addresses)
        self._now = 0.0
        self._first_runs: dict[str, int] = {}
        self._longest = self._still = 0.0
        self._begun = False

    def hear(self, beat: Beat) -> None:
        """Take in a beat, unless a later one came before it."""
        known = self._beats.get(beat.rank)
        if not 0 <= beat.rank < len(self._addresses) or (known and known.number >= beat.number):
            return
        self._beats[beat.rank] = beat
        self._heard[beat.rank] = self._now
        if beat.position.program:
            self._first_runs.setdefault(beat.position.program, beat.position.run)

    def pass_time(self, elapsed: float) -> None:
        """Let time pass."""
        self._now += elapsed

    def still(self) -> float:
        """For how long no rank has moved."""
        still = min(map(self._still_of, range(len(self._addresses))))
        if still < self._still and self._begun:  # how long they took to begin says nothing
            self._longest = max(self._longest, self._still)
        self._still, self._begun = still, self._have_begun()
        return still

    def _still_of(self, rank: int) -> float:
        beat = self._beats.get(rank)
        return self._now - self._heard[rank] + (beat.still if beat else 0.0)

    def silent(self, rank: int) -> float:
        """For how long a rank has not been heard, if that is too long."""
        silence = self._now - self._heard[rank]
        least = max(_SILENT_SECONDS, _SILENT_BEATS * self._period)
        return silence if silence > least else 0.0

    def any_silent(self) -> bool:
        """Whether there is a rank that is silent."""
        return any(map(self.silent, range(len(self._addresses))))

    def gone(self) -> bool:
        """Whether the process of a silent rank is known to have ended."""
        silent = (a for a in self._addresses if self._is_here(a) and self.silent(a.rank))
        return any(process_state(address.pid) == GONE for address in silent)

    def _is_here(self, address: Address) -> bool:
        own = self._addresses[self._own]
        return (address.host, address.space) == (own.host, own.space)

    def patience(self) -> float:
        """For how long this job may stand still by its own pace."""
        seconds = max((beat.position.seconds for beat in self._beats.values()), default=0.0)
        if not self._have_begun():
            return max(OPENING_SECONDS, PREDICTIONS * seconds)
        patience = max(LEAST_SECONDS, STANDS * self._longest, PREDICTIONS * seconds)
        return FIRST * patience if self._is_first_time() else patience

    def _have_begun(self) -> bool:
        """Whether all are behind their first program, and what may follow that: to load weights."""
        begun = (b.position.run > 1 or b.position.program for b in self._beats.values())
        return len(self._beats) == len(self._addresses) and all(begun)

    def _is_first_time(self) -> bool:
        """Whether a program runs for the first time."""
        runs = self._first_runs
        latest = [beat.position for beat in self._beats.values()]
        return any(p.program and p.run <= runs[p.program] for p in latest)

    def judge(self) -> Verdict | None:
        """Who holds up the others; where that cannot be found, that they stand still."""
        seen = [self._seen(rank) for rank in range(len(self._addresses))]
        try:
            return self._court.judge(seen)
        except Exception as error:  # to say less is better than to hang
            text = (
                f"the ranks have stood still for {self.still():.0f} s; who holds them up cannot be"
                f" told: {type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}"
            )
            return Verdict(LOST, self._own, text, "unknown")

    def _seen(self, rank: int) -> Seen:
        address, silent = self._addresses[rank], self.silent(rank)
        about = process_state(address.pid) if silent and self._is_here(address) else ""
        return Seen(rank, address.host, self._beats.get(rank), silent, about)


class Watchdog:
    """The thread of one rank. `limit` replaces all times by one of the user's own."""

    def __init__(
        self,
        transport: Transport,
        failure: Failure,
        plan: Plan,
        folder: Path,
        limit: float | None = None,
    ) -> None:
        """Collective."""
        self._failure, self._limit = failure, limit
        self._post = Post(transport, folder)
        if transport.rank == 0:
            _list_ranks(folder / RANKS, self._post.addresses)
        home, report = self._post.address(0), folder / REPORT
        self._lifeline = failure.lifeline = Lifeline(transport, home, self._post.token, report)
        self._period = max(_PERIOD, transport.size / _BEATS_PER_SECOND)
        self._pulse = Pulse(transport, lambda: failure.checks)
        self._own = transport.rank
        watchers = self._post.watchers
        self._turn = watchers.index(self._own) if self._own in watchers else -1
        self._watch = Watch(plan, self._post.addresses, self._own, self._period)
        self._told = ""
        self._next_look = _GONE_SECONDS
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def watch(self, session: Session) -> None:
        """What this rank runs from now on."""
        self._pulse.watched = session

    def close(self) -> None:
        """The rank is about to end; nothing is watched from now on."""
        self._leaving.set()
        self._thread.join()
        self._lifeline.close()
        self._post.close()

    def _run(self) -> None:
        self._lifeline.connect()
        last = time.monotonic()
        while not self._leaving.wait(max(0.0, last + self._period - time.monotonic())):
            now = time.monotonic()
            # A process that was stopped itself has seen nothing, so no time has passed.
            elapsed, last = min(now - last, 2 * self._period), now
            beat = self._pulse(elapsed)
            self._post.send(beat.pack())
            if beat.number % _PLACE_BEATS == 1:
                self._lifeline.tell(beat.position.name)
            heard = [unpack(data) for data in self._post.receive()]
            if self._turn < 0:
                continue
            self._watch.pass_time(elapsed)
            for other in (beat, *heard, *self._from_files(beat.number)):
                if other is not None:
                    self._watch.hear(other)
            verdict = self._verdict()
            if verdict is not None:
                self._failure.hand_over(StallError(verdict.text), _GRACE_SECONDS)
                return

    def _from_files(self, number: int) -> list[Beat | None]:
        """What ranks whose datagrams get lost have left, read now and then."""
        if number % _FILE_BEATS or not self._watch.any_silent():
            return []
        return [unpack(data) for data in self._post.files()]

    def _verdict(self) -> Verdict | None:
        """The verdict that ends the job, if this rank is the one to speak; others are told here."""
        still = self._watch.still()
        patience = self._watch.patience() if self._limit is None else self._limit
        if still < self._next_look:
            self._next_look = min(self._next_look, max(still, _GONE_SECONDS))
            self._tell_end(still)
            return None
        self._next_look = still + _LOOK_SECONDS
        if still < patience and not self._watch.gone():
            return None
        verdict = self._watch.judge()
        if verdict is None or not self._is_speaker():
            return None
        files = verdict.kind in FILES and self._limit is None
        if not files or still > FILE_PATIENCE * FILE_SECONDS:
            return verdict
        if still > max(FILE_SECONDS, patience):
            self._tell(verdict)
        return None

    def _is_speaker(self) -> bool:
        """Whether this is the first of the watching ranks that are not silent."""
        earlier = self._post.watchers[: self._turn]
        return all(self._watch.silent(rank) for rank in earlier)

    def _tell(self, verdict: Verdict) -> None:
        if self._told != verdict.key:
            self._told = verdict.key
            minutes = FILE_PATIENCE * FILE_SECONDS / 60
            self._failure.say(f"{verdict.text}\n  the run ends if this lasts {minutes:.0f} minutes")

    def _tell_end(self, still: float) -> None:
        if self._told and still < LEAST_SECONDS:
            self._told = ""
            self._failure.say("all ranks go on")


@contextmanager
def watching(
    transport: Transport,
    failure: Failure,
    plan: Plan,
    folder: Path,
    limit: float | None = None,
) -> Iterator[Callable[[Session], None]]:
    """Collective. Watch the ranks while the body runs; with a `limit` of 0 nobody does.

    The body makes a session, and calls what it is given with that.
    """
    if limit == 0:
        yield lambda session: None
        return
    dog = Watchdog(transport, failure, plan, folder, limit)
    try:
        yield dog.watch
    except BaseException:
        # This rank is about to end the job, and needs its time; alone, it may go on without a job.
        if transport.size == 1:
            dog.close()
        raise
    dog.close()


def _list_ranks(path: Path, addresses: list[Address]) -> None:
    """Launchers name the process that was killed, and the host, but no rank."""
    lines = (f"rank {a.rank}  host {a.host}  pid {a.pid}\n" for a in addresses)
    path.write_text("".join(lines))


def process_state(pid: int) -> str:
    """What this host knows of a process that is silent; empty where it cannot be told."""
    if not Path("/proc/self").exists():
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return GONE
    return _STATES.get(state, "whose process runs, but none of its Python")
