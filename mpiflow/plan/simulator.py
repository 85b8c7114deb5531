"""When each task of a plan would run, by the plan's own rules and its predicted seconds.

Every rank runs the same program and prices are those of the largest shard, so one rank is
simulated for all. A task starts at the latest of: the end of the one before it on its stream, of
the producers of its inputs, of those it is `after`, of the consumers that free its output's slot,
and, but for reads, of the step before. As each of these lies earlier in one fixed order, walking
that order once a step gives the same times as a queue of events.

Where collectives do not overlap with computation, as with an MPI that progresses only in its calls,
one that could start is pending, and takes its time when a task first waits for it or a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mpiflow.errors import PlanError
from mpiflow.plan.join import joined, stage_of
from mpiflow.plan.records import READ, WRITE, Plan, Program, Task
from mpiflow.plan.unroll import slot_before
from mpiflow.plan.verify_order import in_turn, waits_of

KINDS = ("compute", "comm", "send", "receive", "read", "write")


@dataclass(frozen=True, slots=True)
class Event:
    """One firing of a task; times in seconds since the first step may begin."""

    task: str
    stream: str
    start: float
    stop: float
    step: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """Some steps of a program. `busy` (by stream) and `exposed` are those of the last step.

    `exposed` is how long compute stood still, by the kind of stream that it waited for last: of
    pipeline stages, on average. What they wait for one another is there as "receive". `ends` is
    when each step was over.
    """

    program: str
    step_seconds: float
    first_step_seconds: float
    ends: tuple[float, ...]
    events: tuple[Event, ...]
    busy: tuple[tuple[str, float], ...]
    exposed: tuple[tuple[str, float], ...]

    @property
    def exposed_communication(self) -> float:
        """Seconds of a step in which compute waits for communication."""
        return dict(self.exposed)["comm"]

    @property
    def exposed_input(self) -> float:
        """Seconds of a step in which compute waits for reads."""
        return dict(self.exposed)["read"]


def stream_kind(stream: str) -> str:
    """compute, comm, send, receive, read or write."""
    return stream.partition("@")[0].partition(".")[0]


def simulate(
    plan: Plan,
    program: str = "train",
    steps: int = 3,
    *,
    factors: Mapping[str, float] | None = None,
    micro_batches: int | None = None,
) -> Simulation:
    """Run `steps` steps of a program; `factors` multiply the seconds of a stream or of its kind.

    `{"comm": 2.0}` is communication at half the speed, `{"comm.data": 2.0}` that of one axis.
    Where only the order of tasks is wanted, the first few `micro_batches` of a step are enough.
    """
    chosen = plan.program(program)
    if chosen is None:
        names = ", ".join(p.name for p in plan.programs)
        raise PlanError(f"the plan has no program {program!r}; it has {names}")
    if steps < 1:
        raise PlanError(f"{steps} steps cannot be simulated; give 1 or more")
    chosen = joined(plan, program, micro_batches)
    run = _Run(chosen, _durations(chosen, dict(factors or {})), plan.overlap)
    for step in range(steps):
        run.step(step)
    return run.result()


def _durations(program: Program, factors: dict[str, float]) -> list[float]:
    streams = {stream for stream, _ in program.order}
    for name, factor in factors.items():
        if name not in streams | set(KINDS) or factor < 0:
            known = ", ".join(sorted(streams | set(KINDS)))
            raise PlanError(f"factor {name}={factor}: give a factor of 0 or more for {known}")
    return [
        task.seconds * factors.get(task.stream, factors.get(stream_kind(task.stream), 1.0))
        for task in program.tasks
    ]


class _Run:
    """The clock of a program: when each task last stopped, step by step."""

    def __init__(self, program: Program, seconds: list[float], overlap: bool) -> None:
        self.program = program
        self.seconds = seconds
        self.overlap = overlap
        self.needs = [] if overlap else list(program.needs().values())
        self.pending: dict[int, float] = {}  # collectives and when they could start, in order
        waits = waits_of(program)
        self.order = in_turn(program, waits)
        self.waits = [list(earlier) for earlier in waits]
        self.frees = _frees(program)
        self.stops: list[list[float]] = []  # of each step, of each task
        self.ends: list[float] = []
        self.events: list[Event] = []
        self.free = dict.fromkeys((stream for stream, _ in program.order), 0.0)
        self.stages = 1 + max((stage_of(stream) for stream in self.free), default=0)
        self.exposed: list[dict[str, float]] = []

    def step(self, step: int) -> None:
        """Fire every task once."""
        begin = self.ends[-1] if self.ends else 0.0
        stops = [0.0] * len(self.order)
        self.stops.append(stops)
        self.exposed = [dict.fromkeys(KINDS, 0.0) for _ in range(self.stages)]
        computed = [begin] * self.stages
        for i in self.order:
            task = self.program.tasks[i]
            start, reason = self._start(i, task, step, begin)
            if task.kind == "compute":
                stage = stage_of(task.stream)
                self.exposed[stage][reason] += max(0.0, start - computed[stage])
                computed[stage] = start + self.seconds[i]
            if self.overlap or stream_kind(task.stream) != "comm":
                self._fire(i, start, step)
            else:
                self.pending[i] = start
        for i in list(self.pending):
            self._settle(i, computed[stage_of(self.program.tasks[i].stream)], step)
        inside = [stops[i] for i in self.order if not self._outlives(i)]
        self.ends.append(max([begin, *inside]))
        for stage, last in enumerate(computed):
            self._expose_end(stage, last, stops)

    def _expose_end(self, stage: int, last: float, stops: list[float]) -> None:
        """What a stage waits for at the end: its own collectives, then other stages."""
        end = self.ends[-1]
        if self.stages > 1:
            own = (
                stops[i]
                for i, task in enumerate(self.program.tasks)
                if stream_kind(task.stream) == "comm" and stage_of(task.stream) == stage
            )
            over = max(last, *own, last)
            self.exposed[stage]["receive"] += end - over
            end = over
        self.exposed[stage]["comm"] += end - last

    def _fire(self, i: int, start: float, step: int) -> None:
        task = self.program.tasks[i]
        stop = start + self.seconds[i]
        self.stops[step][i] = self.free[task.stream] = stop
        self.events.append(Event(task.name, task.stream, start, stop, step))

    def _settle(self, i: int, now: float, step: int) -> None:
        """Carry out a collective that is waited for now, after those before it on its stream.

        What it needs of other streams comes first: a pending collective does not wait for others.
        """
        stream = self.program.tasks[i].stream
        for other in list(self.pending):
            if i in self.pending and self.program.tasks[other].stream == stream:
                for needed in self._pending_needs(other):
                    self._settle(needed, now, step)
                start = max(now, self.pending.pop(other), self.free[stream])
                self._fire(other, self._without(other, start, step), step)

    def _pending_needs(self, i: int) -> list[int]:
        """The pending collectives that a task needs, other than those before it on its stream."""
        tasks, needs = self.program.tasks, self.needs[i] if self.pending else ()
        return [
            other
            for other in self.pending
            if tasks[other].name in needs and tasks[other].stream != tasks[i].stream
        ]

    def _outlives(self, task: int) -> bool:
        return self.program.tasks[task].stream in (READ, WRITE)

    def _start(self, i: int, task: Task, step: int, begin: float) -> tuple[float, str]:
        """When a task may start, and the kind of stream that it waits for last."""
        start = self.free[task.stream]
        if task.stream != READ:
            start = max(start, begin)
        reason = "compute"
        if stream_kind(task.stream) != "comm":
            for other in self._pending_needs(i):
                self._settle(other, self._without(i, start, step), step)
        for other in self.waits[i]:
            if other in self.pending:
                continue  # this one is to be pending too
            if self.stops[step][other] > start:
                start = self.stops[step][other]
                reason = stream_kind(self.program.tasks[other].stream)
        for other, slots in self.frees[i]:
            if step >= slots and self.stops[step - slots][other] > start:
                start = self.stops[step - slots][other]
                reason = stream_kind(self.program.tasks[other].stream)
        return start, reason

    def _without(self, i: int, start: float, step: int) -> float:
        """When a task could start, at `start` or after, if it waited for nothing pending."""
        done = (self.stops[step][other] for other in self.waits[i] if other not in self.pending)
        return max((start, *done))

    def result(self) -> Simulation:
        """What the steps so far come to."""
        last = len(self.ends) - 1
        busy: dict[str, float] = defaultdict(float)
        for i, task in enumerate(self.program.tasks):
            busy[task.stream] += self.seconds[i]
        return Simulation(
            program=self.program.name,
            step_seconds=self.ends[last] - (self.ends[last - 1] if last else 0.0),
            first_step_seconds=self.ends[0],
            ends=tuple(self.ends),
            events=tuple(sorted(self.events, key=lambda e: (e.step, e.start, e.stop))),
            busy=tuple((stream, busy[stream]) for stream in self.free),
            exposed=tuple(
                (kind, sum(stage[kind] for stage in self.exposed) / self.stages) for kind in KINDS
            ),
        )


def _frees(program: Program) -> list[list[tuple[int, int]]]:
    """Of each task, the consumers that free its output's slot, and how many steps ago they fired.

    The slot of micro-batch k is the one that was filled `slots` micro-batches earlier.
    """
    consumers: dict[str, list[int]] = defaultdict(list)
    for i, task in enumerate(program.tasks):
        for name in task.inputs:
            consumers[name].append(i)
    producer = {name: i for i, task in enumerate(program.tasks) for name in task.outputs}
    frees: list[list[tuple[int, int]]] = [[] for _ in program.tasks]
    for register in program.registers:
        name, steps = slot_before(register, program.micro_batches)
        frees[producer[register.name]] += [(i, steps) for i in consumers[name]]
    return frees
