"""Step 11a: kernels that nobody in the step waits for, and that wait for other ranks, come last.

A stream does what stands next. A kernel that takes what another rank has to send, and gives nothing
but a variable, would hold up all kernels behind it: the running moments of a batch norm, in the
midst of the forward pass. At the end of the step what it waits for has long come.

    compute    [ sums ][ moments: waits ][ conv ]        [ sums ][ conv ] ... [ moments ]
    gather             [ a message      ]                        [ a message, or one for many ]

What they take waits in memory as long, so only what is small is put off.
"""

from __future__ import annotations

from dataclasses import replace

from mpiflow.plan.records import COMPUTE, Program, Task

_LARGEST = 256 << 10
"""Bytes that a kernel may let wait."""


def put_off(program: Program) -> Program:
    """With such kernels listed behind all that others need, in each part of the step."""
    late = awaiting(program)
    followers = _followers(program)
    last: dict[tuple[int, int], int] = {}
    for i, task in enumerate(program.tasks):
        if task.stream == COMPUTE and followers[task.name]:
            last[task.phase, task.segment] = i
    keys = [
        (max(i, last.get((task.phase, task.segment), 0)) if task.name in late else i, i)
        for i, task in enumerate(program.tasks)
    ]
    return replace(program, tasks=tuple(program.tasks[i] for _, i in sorted(keys)))


def awaiting(program: Program) -> set[str]:
    """The kernels that take what is exchanged, if only such kernels take what they give."""
    needs, followers = program.needs(), _followers(program)
    sizes = {register.name: register.nbytes for register in program.registers}
    exchanges = {task.name for task in program.tasks if task.kind == "collective"}
    leaves: set[str] = set()
    for task in reversed(program.tasks):
        if _may_wait(task, sizes) and leaves.issuperset(followers[task.name]):
            leaves.add(task.name)
    found: set[str] = set()
    for task in program.tasks:
        if task.name in leaves and any(n in exchanges or n in found for n in needs[task.name]):
            found.add(task.name)
    return found


def _may_wait(task: Task, sizes: dict[str, int]) -> bool:
    nbytes = sum(sizes.get(name, 0) for name in {*task.inputs, *task.outputs})
    return task.stream == COMPUTE and nbytes <= _LARGEST


def _followers(program: Program) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {task.name: [] for task in program.tasks}
    for name, needs in program.needs().items():
        for need in needs:
            found[need].append(name)
    return found
