"""Step 11b: what is gathered of variables alone is gathered one message ahead, not at once.

Nothing but its place in the order holds such a gather back, and a stream without work would fire
all of them at the start of a step, where what they give would wait for its use, in memory:

    gather    [ a ][ b ]     [ c ]      [ d ]
    compute        [ with a  ][ with b  ][ with c ] ...

So each waits for the last task before the first use of the one before it: while that is used, this
one is on its way, and no more than two are held that nobody has finished with.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from mpiflow.plan.records import Program, Task


def put_off(program: Program, variables: Set[str]) -> Program:
    """The program with gathers of what variables alone give after the use of those before."""
    stored = of_variables(program, variables)
    uses = first_uses(program, stored)
    before = _computed_before(program, stored)
    gathers = sorted(
        (uses[t.name], i)
        for i, t in enumerate(program.tasks)
        if t.kind == "collective" and t.name in stored and t.name in uses
    )
    after: dict[str, str] = {}
    held: list[int] = []  # the distinct uses so far, of the phase
    for use, i in gathers:
        task = program.tasks[i]
        if held and program.tasks[held[-1]].phase != program.tasks[use].phase:
            held = []
        if not held or held[-1] != use:
            held.append(use)
        needed = before[held[-2]] if len(held) > 1 else None
        if needed is not None and needed.phase == task.phase:
            after[task.name] = needed.name
    tasks = tuple(
        replace(t, after=tuple(dict.fromkeys((*t.after, after[t.name])))) if t.name in after else t
        for t in program.tasks
    )
    return replace(program, tasks=tasks)


def of_variables(program: Program, variables: Set[str]) -> set[str]:
    """The tasks that need nothing but variables, as they are before the step."""
    given, found = set(variables), set()
    for task in program.tasks:
        if task.inputs and given.issuperset(task.inputs) and variables.isdisjoint(task.outputs):
            found.add(task.name)
            given.update(task.outputs)
    return found


def first_uses(program: Program, stored: set[str]) -> dict[str, int]:
    """Of each of these tasks that is used: the place of the first other that needs it."""
    needed: dict[str, int] = {}  # by register
    found: dict[str, int] = {}
    for i, task in reversed(list(enumerate(program.tasks))):
        place = i
        if task.name in stored:
            uses = [needed[name] for name in task.outputs if name in needed]
            if not uses:
                continue
            found[task.name] = place = min(uses)
        for name in task.inputs:
            needed[name] = min(place, needed.get(name, place))
    return found


def _computed_before(program: Program, stored: set[str]) -> list[Task | None]:
    """By place in the program: the last compute task before it that is none of these."""
    found: list[Task | None] = []
    last = None
    for task in program.tasks:
        found.append(last)
        if task.kind == "compute" and task.name not in stored:
            last = task
    return found
