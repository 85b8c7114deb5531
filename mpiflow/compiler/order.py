"""The order in which a program lists its tasks: what a task needs stands before it."""

from __future__ import annotations

from dataclasses import replace
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from itertools import pairwise

from mpiflow.plan.records import RECEIVE, SEND, Program, Task

_SUM = "Accumulate"
"""The op of a task that adds a micro-batch's part of a tensor to that of those before."""


def needs_in_order(program: Program) -> dict[str, tuple[str, ...]]:
    """By task: what it needs, and of messages to and from other stages the one made before it.

    Messages are numbered in an order in which they can be made. While each stage lists them in that
    order, whatever comes to wait for something listed earlier, no stages wait in a circle.
    """
    needs = program.needs()
    lists: dict[tuple[int, int], list[Task]] = {}
    for task in program.tasks:
        if task.kind in (SEND, RECEIVE):
            lists.setdefault(part_of(task), []).append(task)
    for messages in lists.values():
        messages.sort(key=lambda task: task.attributes["message"])
        for first, second in pairwise(messages):
            needs[second.name] = (*needs[second.name], first.name)
    return needs


def in_order(program: Program) -> Program:
    """With the tasks in topological order again, by phase and segment, otherwise as they stood.

    What had stood too early comes as soon as what it needs is there.
    """
    tasks = program.tasks
    index = {task.name: i for i, task in enumerate(tasks)}
    followers: list[list[int]] = [[] for _ in tasks]
    missing = []
    for i, needs in enumerate(needs_in_order(program).values()):
        missing.append(len(needs))
        for name in needs:
            followers[index[name]].append(i)
    ready = [(*part_of(task), i) for i, task in enumerate(tasks) if not missing[i]]
    heapify(ready)
    ordered: list[Task] = []
    while ready:
        *_, i = heappop(ready)
        ordered.append(tasks[i])
        for follower in followers[i]:
            missing[follower] -= 1
            if not missing[follower]:
                heappush(ready, (*part_of(tasks[follower]), follower))
    assert len(ordered) == len(tasks), f"the tasks of {program.name} make a circle"
    return replace(program, tasks=tuple(sorted(ordered, key=part_of)))


def sums_at_once(program: Program) -> Program:
    """With sums over micro-batches right behind what they add: it is then needed no longer."""
    maker = {name: i for i, task in enumerate(program.tasks) for name in task.outputs}

    def place(i: int) -> tuple[int, int]:
        task = program.tasks[i]
        if task.op != _SUM:
            return i, 0
        return max(maker.get(name, -1) for name in task.inputs), 1

    ordered = sorted(range(len(program.tasks)), key=place)
    return replace(program, tasks=tuple(program.tasks[i] for i in ordered))


def part_of(task: Task) -> tuple[int, int]:
    """Which part of a step a task belongs to: its phase, and its segment there."""
    return task.phase, task.segment


def order_updates(tasks: list[Task], variables: set[str]) -> tuple[Task, ...]:
    """Let every task that overwrites a variable come after the tasks that read it."""
    readers: dict[str, list[str]] = {}
    for task in tasks:
        for name in task.inputs:
            if name in variables:
                readers.setdefault(name, []).append(task.name)
    ordered = []
    for task in tasks:
        after = [r for o in task.outputs for r in readers.get(o, ()) if r != task.name]
        ordered.append(replace(task, after=tuple(dict.fromkeys(after))) if after else task)
    return tuple(ordered)


def pulled(program: Program) -> Program:
    """With the tasks in topological order again, each no later than the first that needs it.

    Nothing else moves: what has come too late for others is brought to them, with all it needs.
    """
    needs = needs_in_order(program)
    place = {task.name: i for i, task in enumerate(program.tasks)}
    rank = {name: i for i, name in enumerate(TopologicalSorter(needs).static_order())}
    for name in reversed(rank):
        for need in needs[name]:
            place[need] = min(place[need], place[name])
    tasks = sorted(program.tasks, key=lambda t: (*part_of(t), place[t.name], rank[t.name]))
    return replace(program, tasks=tuple(tasks))
