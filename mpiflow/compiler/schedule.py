"""Step 12: the order in which each stream fires its tasks.

The plan's own semantics run on a virtual clock with the predicted costs: a task is ready when
what it needs is done, and every free stream takes the ready task that stands first in the program.
What each stream did is recorded, and that is the static order. A stream ends a phase of the step
before it begins the next; a loop over micro-batches is run once, as all its turns are alike.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from mpiflow.plan.records import Program, Task


def schedule(program: Program) -> Program:
    """The program with the order of every stream."""
    tasks = program.tasks
    index = {task.name: i for i, task in enumerate(tasks)}
    needs = [[index[name] for name in names] for names in program.needs().values()]
    followers: list[list[int]] = [[] for _ in tasks]
    for i, sources in enumerate(needs):
        for source in sources:
            followers[source].append(i)

    streams = list(dict.fromkeys(task.stream for task in tasks))
    phases = {stream: _phases(program, stream) for stream in streams}
    ready: dict[str, list[int]] = {stream: [] for stream in streams}
    order: dict[str, list[int]] = {stream: [] for stream in streams}
    missing = [len(sources) for sources in needs]
    for i, count in enumerate(missing):
        if not count:
            heapq.heappush(ready[tasks[i].stream], i)
    running: list[tuple[float, int]] = []
    busy: set[str] = set()
    now = 0.0
    while True:
        for stream in streams:
            if stream not in busy and (i := _first(tasks, ready[stream], phases[stream])) >= 0:
                heapq.heappop(ready[stream])
                phases[stream].pop()
                busy.add(stream)
                order[stream].append(i)
                heapq.heappush(running, (now + tasks[i].seconds, i))
        if not running:
            break
        now, done = heapq.heappop(running)
        busy.remove(tasks[done].stream)
        for follower in followers[done]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready[tasks[follower].stream], follower)
    fired = sum(map(len, order.values()))
    assert fired == len(tasks), f"{len(tasks) - fired} tasks of {program.name} never became ready"
    return replace(program, order=tuple((s, tuple(o)) for s, o in order.items()))


def _phases(program: Program, stream: str) -> list[int]:
    """The phase of each task of a stream, the last first."""
    return sorted((t.phase for t in program.tasks if t.stream == stream), reverse=True)


def _first(tasks: tuple[Task, ...], ready: list[int], phases: list[int]) -> int:
    """The ready task whose turn it is, -1 if there is none."""
    return ready[0] if ready and tasks[ready[0]].phase == phases[-1] else -1
