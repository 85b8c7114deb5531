"""Verify, part two: what waits for what within a step, and which task surely ends before another.

One rank stands for all: every rank has the same program, and a collective is one event for all
members. A circle of waits over several ranks would, read as tasks, be a circle on one of them; so
a program without circles ends on all ranks, whatever the timing and without any buffering.
A slot that is freed by an earlier step, and the end of a step itself, come with a token: they can
delay, never block.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from mpiflow.errors import VerifyError
from mpiflow.plan.records import Program
from mpiflow.plan.verify_layout import label

Waits = list[dict[int, str]]


@dataclass(frozen=True, slots=True)
class Order:
    """Of each task: its place in one valid order, and a bit for each task done when it starts."""

    position: tuple[int, ...]
    before: tuple[int, ...]

    def last(self, tasks: int) -> int:
        """Of tasks given as bits, the one at the highest position."""
        return max((i for i in range(len(self.position)) if tasks >> i & 1), key=self._place)

    def _place(self, task: int) -> int:
        return self.position[task]


def order_of(program: Program) -> Order:
    """Happens-before of one step; VerifyError with the shortest circle where there is one."""
    waits = waits_of(program)
    order = in_turn(program, waits)
    before = [0] * len(waits)
    position = [0] * len(waits)
    for place, task in enumerate(order):
        position[task] = place
        for earlier in waits[task]:
            before[task] |= before[earlier] | 1 << earlier
    return Order(tuple(position), tuple(before))


def in_turn(program: Program, waits: Waits) -> list[int]:
    """The tasks in one valid order; VerifyError with the shortest circle where there is none."""
    order = _topological(waits)
    if len(order) < len(waits):
        stuck = set(range(len(waits))) - set(order)
        raise VerifyError(_describe(program, waits, _shortest_circle(waits, stuck)))
    return order


def waits_of(program: Program) -> Waits:
    """Of each task, those that must be complete before it starts, and why."""
    waits: Waits = [{} for _ in program.tasks]
    index = {task.name: i for i, task in enumerate(program.tasks)}
    registers = {register.name for register in program.registers}
    producer = {n: i for i, task in enumerate(program.tasks) for n in task.outputs}
    for i, task in enumerate(program.tasks):
        for name in task.inputs:
            if name in registers:
                waits[i].setdefault(producer[name], f"for {name}")
        for name in task.after:
            waits[i].setdefault(index[name], "by its `after`")
    for stream, tasks in program.order:
        for first, second in pairwise(tasks):
            waits[second].setdefault(first, f"by the order of stream {stream}")
    return waits


def _topological(waits: Waits) -> list[int]:
    """Tasks so that each follows all it waits for; those in or behind a circle are left out."""
    missing = [len(earlier) for earlier in waits]
    followers: list[list[int]] = [[] for _ in waits]
    for task, earlier in enumerate(waits):
        for other in earlier:
            followers[other].append(task)
    ready = deque(task for task, count in enumerate(missing) if not count)
    order = []
    while ready:
        task = ready.popleft()
        order.append(task)
        for follower in followers[task]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    return order


def _shortest_circle(waits: Waits, stuck: set[int]) -> list[int]:
    """Tasks of which each waits for the next and the last for the first."""
    best: list[int] = []
    for start in sorted(stuck)[:500]:  # beyond that any circle is good enough
        circle = _circle_through(start, waits, stuck)
        if circle and (not best or len(circle) < len(best)):
            best = circle
    return best or _walk(waits, stuck)


def _circle_through(start: int, waits: Waits, stuck: set[int]) -> list[int]:
    came: dict[int, int] = {}
    queue = deque([start])
    while queue:
        task = queue.popleft()
        for other in waits[task]:
            if other == start:
                path = [task]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if other in stuck and other not in came:
                came[other] = task
                queue.append(other)
    return []


def _walk(waits: Waits, stuck: set[int]) -> list[int]:
    """A circle found by walking on: every stuck task waits for a stuck one."""
    path = [min(stuck)]
    while True:
        following = next(other for other in waits[path[-1]] if other in stuck)
        if following in path:
            return path[path.index(following) :]
        path.append(following)


def _describe(program: Program, waits: Waits, circle: list[int]) -> str:
    tasks = [label(program.tasks[i]) for i in circle]
    lines = [f"program {program.name} would hang: {len(circle)} tasks wait for each other"]
    for place, task in enumerate(circle):
        following = (place + 1) % len(circle)
        why = waits[task][circle[following]]
        lines.append(f"  {tasks[place]} waits for {tasks[following]} ({why})")
    if len(lines) > 12:
        lines[7:-5] = [f"  ... and {len(lines) - 12} more ..."]
    return "\n".join(lines)
