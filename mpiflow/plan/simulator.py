"""When each task of a plan would run, by the plan's own rules and its predicted seconds.

Ranks that do the same are simulated once, see `plan.runs`; prices are those of the largest shard. A
task starts at the latest of: the end of the one before it on its stream, of the producers of its
inputs, of those it is `after`, of the consumers that free its output's slot, and, but for reads, of
the step before. As each of these lies earlier in one fixed order, walking that order once a step
gives the same times as a queue of events.

A message takes its overhead from the core of its rank (the "o" of the LogP model, Culler and others
1993): it leaves so much later, and so do kernels start that would start after it has begun.

Where collectives do not overlap with computation, as with an MPI that progresses only in its calls,
one that could start is pending, and takes its time when a task first waits for it or a later one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from mpiflow.errors import PlanError
from mpiflow.garbage import no_collection
from mpiflow.plan.marked import Step
from mpiflow.plan.places import AHEAD, FEED
from mpiflow.plan.records import READ, WRITE, Plan, Task
from mpiflow.plan.runs import Lane, Run, Runs, runs_of, stops_within
from mpiflow.plan.walk import Walk

KINDS = ("compute", "comm", "send", "receive", "h2d", "d2h", "read", "write")

_QUANTUM = 2.0**-48
"""Seconds of tasks are multiples of it (4e-15), so that sums are exact in any order up to 32 s.

What is simulated together and what apart then has the same times, to the last bit.
"""


@dataclass(frozen=True, slots=True)
class Event:
    """One firing of a task; times in seconds since the first step may begin."""

    task: str
    stream: str
    start: float
    stop: float
    step: int


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """What ranks that do the same did in the last step: seconds of work by stream, and of waiting.

    `exposed` is how long compute stood still, by the kind of stream that it waited for last. What
    stages wait for one another is there as "receive".
    """

    lane: Lane
    busy: tuple[tuple[str, float], ...]
    exposed: tuple[tuple[str, float], ...]

    @property
    def computing(self) -> float:
        """Seconds of computation; with all of `exposed` they make up the step."""
        return dict(self.busy).get("compute", 0.0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Some steps of a program. `busy` (by stream) and `exposed` are those of the last step.

    `exposed` is how long compute stood still, by the kind of stream that it waited for last: on
    average over ranks; `lanes` has it for each stage. `ends` is when each step was over.
    """

    program: str
    step_seconds: float
    first_step_seconds: float
    ends: tuple[float, ...]
    busy: tuple[tuple[str, float], ...]
    exposed: tuple[tuple[str, float], ...]
    lanes: tuple[LaneTimes, ...]
    record: Record

    @property
    def events(self) -> tuple[Event, ...]:
        """Every firing, by step and then by time."""
        return tuple(
            event for step in range(len(self.ends)) for event in sorted(
                self.record.events(step), key=lambda e: (e.start, e.stop)
            )
        )  # fmt: skip

    @property
    def exposed_communication(self) -> float:
        """Seconds of a step in which compute waits for communication."""
        return dict(self.exposed)["comm"]

    @property
    def exposed_input(self) -> float:
        """Seconds of a step in which compute waits for reads."""
        return dict(self.exposed)["read"]

    @property
    def bubble(self) -> float:
        """Seconds of a step in which compute waits for other stages."""
        waits = dict(self.exposed)
        return waits["receive"] + waits["send"]


@dataclass(frozen=True, slots=True)
class Record:
    """When runs started, and how long after that each of their tasks stops, of each step."""

    runs: Runs
    seconds: tuple[tuple[float, ...], ...]
    starts: tuple[tuple[float, ...], ...]

    def events(self, step: int) -> Iterator[Event]:
        """The firings of a step, in an order in which they may fire."""
        for number in self.runs.order:
            for _, event in self.firings(number, step):
                yield event

    def firings(self, number: int, step: int) -> Iterator[tuple[Task, Event]]:
        """The tasks of a run and when they fired."""
        run = self.runs.runs[number]
        lane, stream = self.runs.streams[run.stream]
        many = len(self.runs.lanes) > 1
        prefix = f"{self.runs.lanes[lane].label}: " if many else ""
        stream = f"{stream}@{lane}" if many else stream
        micro_batches = self.runs.program(run).micro_batches
        times = self.times(number, step)
        for task, (start, stop) in zip(self.runs.tasks(run), times, strict=True):
            looped = micro_batches > 1 and task.phase % 2
            name = f"{prefix}{task.name}#{run.micro}" if looped else f"{prefix}{task.name}"
            yield task, Event(name, stream, start, stop, step)

    def times(self, number: int, step: int) -> Iterator[tuple[float, float]]:
        """When each task of a run starts and stops."""
        start = self.starts[step][number]
        return pairwise((start, *(start + length for length in self.seconds[number])))


def stream_kind(stream: str) -> str:
    """compute, comm, send, receive, h2d, d2h, read or write."""
    return stream.partition("@")[0].partition(".")[0]


@no_collection()
def simulate(
    plan: Plan,
    program: str = "train",
    steps: int = 3,
    *,
    factors: Mapping[str, float] | None = None,
    micro_batches: int | None = None,
    lanes: tuple[Lane, ...] = (),
) -> Simulation:
    """Run `steps` steps of a program; `factors` multiply the seconds of a stream or of its kind.

    `{"comm": 2.0}` is communication at half the speed, `{"comm.data": 2.0}` that of one axis.
    Where only the order of tasks is wanted, the first few `micro_batches` of a step are enough.
    Where some ranks are slower, `lanes` say which do the same, see `plan.straggler`.
    """
    if plan.program(program) is None:
        names = ", ".join(dict.fromkeys(p.name for p in plan.programs))
        raise PlanError(f"the plan has no program {program!r}; it has {names}")
    if steps < 1:
        raise PlanError(f"{steps} steps cannot be simulated; give 1 or more")
    runs = runs_of(plan, program, micro_batches, lanes)
    if len(runs.order) < len(runs.runs):
        for _ in Walk([Step(one, micro_batches) for one in runs.programs]).run():
            pass  # it raises, and says what waits in a circle
        raise AssertionError("runs wait in a circle, and their tasks do not")
    overheads = [_overhead(runs, run) if plan.overlap else 0.0 for run in runs.runs]
    durations = _durations(runs, dict(factors or {}), overheads)
    clock = _Clock(runs, durations, overheads, plan.overlap)
    for _ in range(steps):
        clock.step()
    return clock.result()


def _durations(
    runs: Runs, factors: dict[str, float], overheads: list[float]
) -> list[tuple[float, ...]]:
    """When each task of each run stops, after the run starts.

    A message leaves when its rank has spent its overhead on it.
    """
    streams = {stream for _, stream in runs.streams}
    for name, factor in factors.items():
        if name not in streams | set(KINDS) or not 0 <= factor < inf:
            known = ", ".join(sorted(streams | set(KINDS)))
            raise PlanError(f"factor {name}={factor}: give a factor of 0 or more for {known}")
    found: dict[tuple[int, tuple[int, ...], bool], tuple[float, ...]] = {}
    durations = []
    for number, run in enumerate(runs.runs):
        key = run.lane, run.tasks, number in runs.met
        if key not in found:
            slower = runs.lanes[run.lane].factor
            found[key] = stops_within(
                0.0
                if number in runs.met
                else _rounded(_factor(task, slower, factors) * task.seconds) + overheads[number]
                for task in runs.tasks(run)
            )
        durations.append(found[key])
    return durations


def _overhead(runs: Runs, run: Run) -> float:
    """What a message takes from the core of its rank."""
    task = runs.program(run).tasks[run.tasks[0]]
    return _rounded(task.overhead * runs.lanes[run.lane].factor)


def _factor(task: Task, slower: float, factors: dict[str, float]) -> float:
    factor = factors.get(task.stream, factors.get(stream_kind(task.stream), 1.0))
    return factor * slower if task.kind == "compute" else factor


def _rounded(seconds: float) -> float:
    return round(seconds / _QUANTUM) * _QUANTUM


class _Clock:
    """When each run of each step starts. Times of a run are those of its tasks, see `plan.runs`."""

    def __init__(
        self,
        runs: Runs,
        seconds: list[tuple[float, ...]],
        overheads: list[float],
        overlap: bool,
    ) -> None:
        self.runs, self.seconds, self.overheads, self.overlap = runs, seconds, overheads, overlap
        # Who waits for a copy of what is read waits for input.
        self.kinds = [READ if stream == FEED else stream_kind(stream) for _, stream in runs.streams]
        self.ahead = [stream in AHEAD for _, stream in runs.streams]
        self.pending: dict[int, float] = {}  # collectives and when they could start, in order
        self.starts: list[list[float]] = []  # of each step, of each run
        self.ends: list[float] = []
        self.free = [0.0] * len(runs.streams)
        self.exposed: list[dict[str, float]] = []
        # Of each lane, messages whose overhead its kernels have not felt yet: when they began, the
        # overhead, the kind of their stream.
        self.owed: list[list[tuple[float, float, str]]] = [[] for _ in runs.lanes]

    def step(self) -> None:
        """Fire every run once."""
        begin = self.ends[-1] if self.ends else 0.0
        self.starts.append([-1.0] * len(self.runs.runs))
        self.exposed = [dict.fromkeys(KINDS, 0.0) for _ in self.runs.lanes]
        computed = [begin] * len(self.runs.lanes)
        for number in self.runs.order:
            run = self.runs.runs[number]
            kind = self.kinds[run.stream]
            start, reason = self._start(number, run, kind, begin)
            if kind == "compute":
                self.exposed[run.lane][reason] += max(0.0, start - computed[run.lane])
                if self.owed[run.lane]:
                    start = self._after_messages(run.lane, computed[run.lane], start)
                computed[run.lane] = start + self.seconds[number][-1]
            if self.overlap or kind != "comm":
                self._fire(number, start)
            else:
                self.pending[number] = start
        for number in list(self.pending):
            self._settle(number, computed[self.runs.runs[number].lane])
        self._end(begin, computed)

    def _end(self, begin: float, computed: list[float]) -> None:
        """What lanes wait for at the end: their own collectives, then other stages."""
        own, end = list(computed), begin
        for owed in self.owed:
            owed.clear()  # what messages want is done before they are
        for i, (lane, _) in enumerate(self.runs.streams):
            free, kind = self.free[i], self.kinds[i]
            if kind != WRITE and not self.ahead[i]:
                end = max(end, free)
            if kind == "comm":
                own[lane] = max(own[lane], free)
        self.ends.append(end)
        for lane, last in enumerate(computed):
            over = own[lane] if len(computed) > 1 else end
            self.exposed[lane]["comm"] += over - last
            self.exposed[lane]["receive"] += end - over

    def _after_messages(self, lane: int, free: float, start: float) -> float:
        """When what could start at `start` may have the core, which computed until `free`.

        Messages that began by then have it before; what they delay is exposed as of their kind.
        """
        felt = [one for one in self.owed[lane] if one[0] <= start]
        self.owed[lane] = [one for one in self.owed[lane] if one[0] > start]
        for began, seconds, kind in sorted(felt):
            free = max(free, began) + seconds
            self.exposed[lane][kind] += max(0.0, free - start)
            start = max(start, free)
        return start

    def _fire(self, number: int, start: float) -> None:
        self.starts[-1][number] = start
        if self.overheads[number]:
            run = self.runs.runs[number]
            owed = start, self.overheads[number], self.kinds[run.stream]
            self.owed[run.lane].append(owed)
        self.free[self.runs.runs[number].stream] = start + self.seconds[number][-1]

    def _settle(self, number: int, now: float) -> None:
        """Carry out a collective that is waited for now, after those before it on its stream.

        What it needs of other streams comes first: a pending collective does not wait for others.
        """
        stream = self.runs.runs[number].stream
        for other in list(self.pending):
            if number in self.pending and self.runs.runs[other].stream == stream:
                for needed in self._pending_needs(other):
                    self._settle(needed, now)
                start = max(now, self.pending.pop(other), self.free[stream])
                self._fire(other, self._without(other, start))

    def _pending_needs(self, number: int) -> list[int]:
        """The pending collectives that a run needs, other than those before it on its stream."""
        if not self.pending:
            return []
        run = self.runs.runs[number]
        needs = {source for source, _ in run.waits}
        return [
            other
            for other in self.pending
            if other in needs and self.runs.runs[other].stream != run.stream
        ]

    def _start(self, number: int, run: Run, kind: str, begin: float) -> tuple[float, str]:
        """When a run may start, and the kind of stream that it waits for last."""
        start = self.free[run.stream]
        if not self.ahead[run.stream]:
            start = max(start, begin)
        reason = "compute"
        if kind != "comm" and self.pending:
            for other in self._pending_needs(number):
                self._settle(other, self._without(number, start))
        now = self.starts[-1]
        for other, place in run.waits:
            if now[other] < 0.0:
                continue  # a pending one; this one is to be pending too
            stop = now[other] + self.seconds[other][place]
            if stop > start:
                start, reason = stop, self.kinds[self.runs.runs[other].stream]
        for other, place, steps in run.freed:
            if len(self.starts) > steps:
                stop = self.starts[-1 - steps][other] + self.seconds[other][place]
                if stop > start:
                    start, reason = stop, self.kinds[self.runs.runs[other].stream]
        return start, reason

    def _without(self, number: int, start: float) -> float:
        """When a run could start, at `start` or after, if it waited for nothing pending."""
        now = self.starts[-1]
        done = (
            now[other] + self.seconds[other][place]
            for other, place in self.runs.runs[number].waits
            if now[other] >= 0.0
        )
        return max((start, *done))

    def result(self) -> Simulation:
        """What the steps so far come to."""
        last = len(self.ends) - 1
        busy = [0.0] * len(self.runs.streams)
        for run, seconds in zip(self.runs.runs, self.seconds, strict=True):
            busy[run.stream] += seconds[-1]
        lanes = tuple(
            LaneTimes(
                lane,
                tuple(
                    (name, busy[i])
                    for i, (owner, name) in enumerate(self.runs.streams) if owner == number
                ),
                tuple(self.exposed[number].items()),
            )
            for number, lane in enumerate(self.runs.lanes)
        )  # fmt: skip
        many = len(lanes) > 1
        ranks = sum(one.lane.ranks for one in lanes)
        return Simulation(
            program=self.runs.programs[0].name,
            step_seconds=self.ends[last] - (self.ends[last - 1] if last else 0.0),
            first_step_seconds=self.ends[0],
            ends=tuple(self.ends),
            busy=tuple(
                (f"{stream}@{lane}" if many else stream, busy[i])
                for i, (lane, stream) in enumerate(self.runs.streams)
            ),
            exposed=tuple(
                (kind, sum(dict(one.exposed)[kind] * one.lane.ranks for one in lanes) / ranks)
                for kind in KINDS
            ),
            lanes=lanes,
            record=Record(self.runs, tuple(self.seconds), tuple(map(tuple, self.starts))),
        )
