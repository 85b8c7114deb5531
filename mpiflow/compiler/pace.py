"""Step 11b: what nothing would hold back, or nobody would wait for, keeps pace with the rest.

A stream that has nothing else to do fires what is ready. What needs variables alone is ready when a
step begins: all weights would be gathered at once, and wait for their use in memory. And what comes
out of a reduce_scatter is needed when the weights change, at the end of a step: until then the
memory of all that was sent could not be used again, as nobody would have seen that it has left.

    gather     [ a ][ b ]     [ c ]      [ d ]       b on its way while a is used; then c
    compute         [ with a  ][ with b  ][ with c ] ...

    compute    [ grads 0 ][ grads 1 ][ grads 2 ]     waits for scatter 0 before it makes grads 2
    scatter               [ 0 ]      [ 1 ]

So of either kind there are two at a time, and a stream only waits where the other is slower.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Set
from dataclasses import replace
from itertools import pairwise

from mpiflow.compiler.order import in_order, part_of, pulled
from mpiflow.plan.records import COMPUTE, SEND, Program, Task

_Extra = dict[str, str]
"""By task the one that it has to come after."""


def pace(program: Program, variables: Set[str]) -> Program:
    """The program in which gathers of weights, and what is scattered, wait for their turn."""
    stored = of_variables(program, variables)
    program = in_order(_after(program, _put_off(program, stored)))
    return pulled(_after(program, _waits(program, variables)))


def of_variables(program: Program, variables: Set[str]) -> set[str]:
    """The tasks that need nothing but variables, as they are before the step; but no messages.

    These are not for this stage to put off.
    """
    given, found = set(variables), set()
    for task in program.tasks:
        if task.kind == SEND or not task.inputs:
            continue
        if given.issuperset(task.inputs) and variables.isdisjoint(task.outputs):
            found.add(task.name)
            given.update(task.outputs)
    return found


def _after(program: Program, extra: _Extra) -> Program:
    tasks = tuple(
        replace(t, after=tuple(dict.fromkeys((*t.after, extra[t.name])))) if t.name in extra else t
        for t in program.tasks
    )
    return replace(program, tasks=tasks)


def _put_off(program: Program, stored: set[str]) -> _Extra:
    """Gathers of what variables alone give come after the first use of the last but one.

    That is, just before the last one's is used. What such a gather needs waits as long as it does,
    and what a kernel makes of variables alone until just before it is used.
    """
    tasks, uses = program.tasks, _first_uses(program, stored)
    before = _computed_before(program, stored)
    gathered = sorted({uses[t.name] for t in tasks if t.kind == "collective" and t.name in uses})
    earlier = {use: before[last] for last, use in pairwise(gathered)}
    waits: dict[str, int] = {}  # the place of what a task waits for, -1 for nothing
    needed: dict[str, int] = {}  # by register: no later than what waits for it
    for task in reversed(tasks):
        if task.name in uses:
            use = uses[task.name]
            own = before[use] if task.kind == "compute" else earlier.get(use, -1)
            wait = min((own, *(needed[name] for name in task.outputs if name in needed)))
            waits[task.name] = wait
            for name in task.inputs:
                needed[name] = min(wait, needed.get(name, wait))
    return {
        task.name: tasks[waits[task.name]].name
        for task in tasks
        if waits.get(task.name, -1) >= 0 and part_of(tasks[waits[task.name]]) == part_of(task)
    }


def _first_uses(program: Program, stored: set[str]) -> dict[str, int]:
    """Of each of these tasks that is used: the place of the first other that needs it."""
    needed: dict[str, int] = {}  # by register, or by task where others are after it
    found: dict[str, int] = {}
    for i, task in reversed(list(enumerate(program.tasks))):
        place = i
        if task.name in stored:
            uses = [needed[name] for name in (*task.outputs, task.name) if name in needed]
            if not uses:
                continue
            found[task.name] = place = min(uses)
        for name in (*task.inputs, *task.after):
            needed[name] = min(place, needed.get(name, place))
    return found


def _computed_before(program: Program, stored: set[str]) -> list[int]:
    """By place in the program: that of the last compute task before it that is none of these."""
    found: list[int] = []
    last = -1
    for i, task in enumerate(program.tasks):
        found.append(last)
        if task.kind == "compute" and task.name not in stored:
            last = i
    return found


def _waits(program: Program, variables: Set[str]) -> _Extra:
    """The compute tasks that come after a message which others need much later, or never.

    It is the first one after the next such message is ready.
    """
    tasks, ready = program.tasks, _ready(program)
    readers: dict[str, int] = {}
    for i, task in reversed(list(enumerate(tasks))):
        if task.stream == COMPUTE:
            readers.update(dict.fromkeys(task.inputs, i))
    computed = [i for i, task in enumerate(tasks) if task.stream == COMPUTE]
    streams: dict[tuple[str, str, int, int], list[Task]] = {}
    for task in tasks:
        updates = task.op == "all_gather" and not variables.isdisjoint(task.outputs)
        if task.op == "reduce_scatter" or updates:
            streams.setdefault((task.stream, task.op, *part_of(task)), []).append(task)
    extra: _Extra = {}
    for messages in streams.values():
        for message, second in pairwise(sorted(messages, key=lambda t: ready[t.name])):
            at = bisect_right(computed, ready[second.name])
            following = computed[at] if at < len(computed) else -1
            needed = min(readers.get(name, len(tasks)) for name in message.outputs)
            if 0 <= following < needed and part_of(tasks[following]) == part_of(message):
                extra[tasks[following].name] = message.name
    return extra


def _ready(program: Program) -> dict[str, int]:
    """The place of the last compute task that a task needs; its own, if it is one."""
    needs = program.needs()
    ready: dict[str, int] = {}
    for i, task in enumerate(program.tasks):
        before = (ready[name] for name in needs[task.name])
        ready[task.name] = i if task.stream == COMPUTE else max(before, default=-1)
    return ready
