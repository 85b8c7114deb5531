"""Waits: what each task of a program without loops waits for, and the tasks in one valid order."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from mpiflow.errors import VerifyError
from mpiflow.plan.records import Program

Waits = list[dict[int, str]]


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


def in_turn(program: Program, waits: Waits) -> list[int]:
    """The tasks so that each follows all it waits for; VerifyError where some never get to fire."""
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
    if len(order) < len(waits):
        stuck = min(set(range(len(waits))) - set(order))
        raise VerifyError(f"program {program.name}: {program.tasks[stuck].name} never gets to fire")
    return order
