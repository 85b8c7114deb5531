"""Step 12: the order in which each stream fires its tasks.

The plan's own semantics run on a virtual clock with the predicted costs: a task is ready when
what it needs is done, and every free stream takes the ready task that stands first in the program.
What each stream did is recorded, and that is the static order. A stream ends a phase of the step,
or a segment of its last loop, before it begins the next; a loop over micro-batches is run once, as
all its turns are alike. Pipeline stages run together: what one receives another has sent, each in
the order of the messages.

The same clock says before that where kernels stand in the program if what is exchanged behind them
is to go on beside others (early.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from mpiflow.compiler.early import Early, beside, exchanged
from mpiflow.plan.records import COMPUTE, RECEIVE, SEND, Program, Task


def schedule(program: Program) -> Program:
    """The program with the order of every stream."""
    return schedule_together([program])[0]


def schedule_together(programs: Sequence[Program]) -> list[Program]:
    """The programs of all stages of a step, with the order of every stream."""
    return _ordered(programs, _Clock(programs).run())


def hastened(program: Program) -> Program:
    """With kernels listed as early as what others wait for asks; for a program of one stage."""
    program = beside(program)
    clock = _Clock([program])
    clock.hasten()
    return beside(program, clock.run().get((0, COMPUTE), ()))


class _Clock:
    """Fires the tasks of all stages as streams become free."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.tasks = [task for program in programs for task in program.tasks]
        self.needs = _needs(programs)
        self.followers: list[list[int]] = [[] for _ in self.tasks]
        for i, sources in enumerate(self.needs):
            for source in sources:
                self.followers[source].append(i)
        owners = [stage for stage, program in enumerate(programs) for _ in program.tasks]
        self.streams = [(s, task.stream) for s, task in zip(owners, self.tasks, strict=True)]
        self.phases = _phases(self.tasks, self.streams)
        self.ready: dict[Stream, list[Turn]] = {stream: [] for stream in self.phases}
        self.fired = [False] * len(self.tasks)
        self.missing = [len(sources) for sources in self.needs]
        self.urgent: set[int] = set()
        self.early: Early | None = None

    def hasten(self) -> None:
        """Let what others wait for go first."""
        registers = [frozenset(r.name for r in program.registers) for program in self.programs]
        of_task = [r for r, p in zip(registers, self.programs, strict=True) for _ in p.tasks]
        self.urgent = exchanged(self.tasks, self.followers)
        self.early = Early(self.tasks, self.needs, self.followers, of_task)

    def run(self) -> dict[Stream, list[int]]:
        """What each stream did, in order."""
        order: dict[Stream, list[int]] = {stream: [] for stream in self.phases}
        for i, count in enumerate(self.missing):
            if not count:
                self._push(i)
        count, busy, now = len(self.tasks), set[Stream](), 0.0
        events: list[tuple[float, int]] = []  # ends of tasks, and then when exchanges are over
        while True:
            for stream in self.phases:
                if stream not in busy and (i := self._next(stream)) >= 0:
                    busy.add(stream)
                    order[stream].append(i)
                    heapq.heappush(events, (now + self.tasks[i].seconds, i))
            if not events:
                break
            now, event = heapq.heappop(events)
            if event >= count:
                if self.early is not None:
                    self.early.over(event - count, self._promote)
                continue
            busy.remove(self.streams[event])
            if self.early is not None and event in self.early.seconds:
                heapq.heappush(events, (now + self.early.seconds[event], event + count))
            for follower in self.followers[event]:
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self._push(follower)
        late = self.fired.count(False)
        assert not late, f"{late} tasks of {self.programs[0].name} never became ready"
        return order

    def _push(self, i: int) -> None:
        task = self.tasks[i]
        turn = task.phase, task.segment, i not in self.urgent, i
        heapq.heappush(self.ready[self.streams[i]], turn)

    def _promote(self, i: int) -> None:
        """Let a kernel come before all others of its part of the step."""
        self.urgent.add(i)
        if not self.missing[i] and not self.fired[i]:
            self._push(i)

    def _next(self, stream: Stream) -> int:
        """The ready task whose turn it is, which fires now; -1 if there is none."""
        ready, phases = self.ready[stream], self.phases[stream]
        while ready and self.fired[ready[0][-1]]:
            heapq.heappop(ready)
        if not ready or ready[0][:2] != phases[-1]:
            return -1
        i = heapq.heappop(ready)[-1]
        phases.pop()
        self.fired[i] = True
        return i


Stream = tuple[int, str]
"""A stream of a stage."""
Turn = tuple[int, int, bool, int]
"""Phase and segment of a task that is ready, whether it may wait for others, and its place."""


def _needs(programs: Sequence[Program]) -> list[list[int]]:
    """Of each task of all stages, those that must be done before: for a receive, its send."""
    found: list[list[int]] = []
    sends: dict[tuple[int, int, int], int] = {}
    receives: dict[tuple[int, int, int], int] = {}
    for program in programs:
        first = len(found)
        index = {task.name: first + i for i, task in enumerate(program.tasks)}
        found += [[index[name] for name in names] for names in program.needs().values()]
        for one, other in _messages_in_order(program.tasks):
            found[first + other].append(first + one)
        for i, task in enumerate(program.tasks, first):
            if task.kind in (SEND, RECEIVE):
                other, message = task.attributes["stage"], task.attributes["message"]
                if task.kind == SEND:
                    sends[program.stage, other, message] = i
                else:
                    receives[other, program.stage, message] = i
    for key, receive in receives.items():
        found[receive].append(sends[key])
    return found


def _ordered(programs: Sequence[Program], order: dict[Stream, list[int]]) -> list[Program]:
    """The programs with the order that was recorded."""
    made, first = [], 0
    for stage, program in enumerate(programs):
        mine = {name: o for (owner, name), o in order.items() if owner == stage}
        streams = tuple((name, tuple(i - first for i in places)) for name, places in mine.items())
        made.append(replace(program, order=streams))
        first += len(program.tasks)
    return made


def _messages_in_order(tasks: tuple[Task, ...]) -> list[tuple[int, int]]:
    """Each send with the one after it on its stream."""
    lanes: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
        if task.kind == SEND:
            lanes.setdefault(task.stream, []).append(i)
    found: list[tuple[int, int]] = []
    for sends in lanes.values():
        sends.sort(key=lambda i: (tasks[i].phase, tasks[i].segment, tasks[i].attributes["message"]))
        found += pairwise(sends)
    return found


def _phases(tasks: list[Task], streams: list[Stream]) -> dict[Stream, list[tuple[int, int]]]:
    """The phase and the segment of each task of a stream, the last first."""
    found: dict[Stream, list[tuple[int, int]]] = {}
    for task, stream in zip(tasks, streams, strict=True):
        found.setdefault(stream, []).append((task.phase, task.segment))
    return {stream: sorted(phases, reverse=True) for stream, phases in found.items()}
