"""Step 12: the order in which each stream fires its tasks.

The plan's own semantics run on a virtual clock with the predicted costs: a task is ready when
what it needs is done, and every free stream takes the ready task that stands first in the program.
What each stream did is recorded, and that is the static order. A stream ends a phase of the step,
or a segment of its last loop, before it begins the next; a loop over micro-batches is run once, as
all its turns are alike. Pipeline stages run together: what one receives another has sent, each in
the order of the messages.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from mpiflow.plan.records import RECEIVE, SEND, Program, Task


def schedule(program: Program) -> Program:
    """The program with the order of every stream."""
    return schedule_together([program])[0]


def schedule_together(programs: Sequence[Program]) -> list[Program]:
    """The programs of all stages of a step, with the order of every stream."""
    tasks = [task for program in programs for task in program.tasks]
    needs = _needs(programs)
    followers: list[list[int]] = [[] for _ in tasks]
    for i, sources in enumerate(needs):
        for source in sources:
            followers[source].append(i)

    owners = [stage for stage, program in enumerate(programs) for _ in program.tasks]
    streams = [(stage, task.stream) for stage, task in zip(owners, tasks, strict=True)]
    phases = _phases(tasks, streams)
    ready: dict[Stream, list[int]] = {stream: [] for stream in phases}
    order: dict[Stream, list[int]] = {stream: [] for stream in phases}
    missing = [len(sources) for sources in needs]
    for i, count in enumerate(missing):
        if not count:
            heapq.heappush(ready[streams[i]], i)
    running: list[tuple[float, int]] = []
    busy: set[Stream] = set()
    now = 0.0
    while True:
        for stream, waiting in ready.items():
            if stream not in busy and (i := _first(tasks, waiting, phases[stream])) >= 0:
                heapq.heappop(waiting)
                phases[stream].pop()
                busy.add(stream)
                order[stream].append(i)
                heapq.heappush(running, (now + tasks[i].seconds, i))
        if not running:
            break
        now, done = heapq.heappop(running)
        busy.remove(streams[done])
        for follower in followers[done]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready[streams[follower]], follower)
    fired = sum(map(len, order.values()))
    names = programs[0].name
    assert fired == len(tasks), f"{len(tasks) - fired} tasks of {names} never became ready"
    return _ordered(programs, order)


Stream = tuple[int, str]
"""A stream of a stage."""


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


def _first(tasks: list[Task], ready: list[int], phases: list[tuple[int, int]]) -> int:
    """The ready task whose turn it is, -1 if there is none."""
    if not ready:
        return -1
    task = tasks[ready[0]]
    return ready[0] if (task.phase, task.segment) == phases[-1] else -1
