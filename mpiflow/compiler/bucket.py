"""Step 11: one all_reduce for many small tensors, along one axis or two, and reductions in place.

Tensors of a bucket lie side by side in memory, so that a fused reduction copies nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from mpiflow.compiler.cost import collective_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.order import in_order
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import Program, Register, Task

_SMALLEST, _LARGEST = 256 << 10, 25 << 20


@dataclass
class _Bucket:
    """Reductions that become one, before `deadline`, where the first of others needs a result.

    Those of what another bucket reduced are next to each other there; `place` is the last one's.
    """

    name: str
    deadline: int
    tasks: list[Task] = field(default_factory=list)
    nbytes: int = 0
    place: int = 0


def bucket(program: Program, mesh: Mesh, machine: Machine) -> Program:
    """Fuse all_reduces that can wait for one another, each in place."""
    registers = {r.name: r for r in program.registers}
    readers = Counter(name for task in program.tasks for name in set(task.inputs))
    # In place: the reduction is the only reader of its input.
    reductions = [t for t in program.tasks if t.op == "all_reduce" and readers[t.inputs[0]] == 1]
    for task in reductions:
        registers[task.outputs[0]] = replace(registers[task.outputs[0]], aliases=task.inputs[0])
    candidates = {task.name for task in reductions}
    program = _second_late(program, registers, candidates)
    limit = bucket_bytes(program, reductions, registers, machine, mesh)
    buckets = _buckets(program, registers, candidates, limit)
    merged = {t.name: b for b in buckets if len(b.tasks) > 1 for t in b.tasks}
    tasks: list[Task] = []
    for task in program.tasks:
        group = merged.get(task.name)
        if group is None:
            tasks.append(task)
        elif task is group.tasks[-1]:
            tasks.append(_fused(group, mesh, machine))
    renamed = {name: b.name for name, b in merged.items()}
    tasks = [
        replace(t, after=tuple(dict.fromkeys(renamed.get(n, n) for n in t.after))) for t in tasks
    ]
    return in_order(replace(program, registers=tuple(registers.values()), tasks=tuple(tasks)))


def _second_late(program: Program, registers: dict[str, Register], candidates: set[str]) -> Program:
    """With reductions of what was reduced already, on another axis, as late as others allow.

    So the first reductions of all members of a bucket come before the second of any.
    """
    deadlines, needs = _deadlines(program, candidates), program.needs()
    index = {task.name: i for i, task in enumerate(program.tasks)}
    place: dict[str, int] = {}
    for i, task in enumerate(program.tasks):
        second = task.name in candidates and registers[task.inputs[0]].aliases
        before = (place[name] for name in needs[task.name])
        place[task.name] = max(deadlines[i] if second else i, *before, 0)

    def key(task: Task) -> tuple[int, bool, int]:
        """What has moved comes before what has its place there."""
        own, wanted = index[task.name], place[task.name]
        return wanted, wanted == own, own

    return replace(program, tasks=tuple(sorted(program.tasks, key=key)))


def _buckets(
    program: Program, registers: dict[str, Register], candidates: set[str], limit: int
) -> list[_Bucket]:
    """The candidates in buckets, each in the newest of its kind that is neither full nor due.

    A kind is also for whom: the final results of all members have one deadline, so none waits for
    another that nobody needs yet. And as every bucket ends before its deadline, along any chain of
    buckets that need one another the last members come later and later: there are no circles.
    """
    deadlines = _deadlines(program, candidates)
    again = {t.inputs[0]: i for i, t in enumerate(program.tasks) if t.name in candidates}
    buckets: list[_Bucket] = []
    newest: dict[tuple[Any, ...], _Bucket] = {}
    home: dict[str, tuple[str, int]] = {}  # by register: the bucket that gives it, and where in it
    for position, task in enumerate(program.tasks):
        source = registers[task.inputs[0]] if task.name in candidates else None
        if source is None or not source.nbytes:
            continue
        whole, place = home[source.name] if source.aliases else ("", 0)
        last = position
        while program.tasks[last].outputs[0] in again:
            last = again[program.tasks[last].outputs[0]]
        onward = program.tasks[last].axis
        data = (task.axis, task.attributes["reduce"], source.dtype)
        key = (*data, task.phase, onward, deadlines[last], whole)
        found = newest.get(key)
        if (
            found is None
            or found.nbytes + source.nbytes > limit
            or found.deadline <= position
            or (whole and found.place + 1 != place)
        ):
            name = f"bucket.{task.axis}.{len(buckets)}"
            found = newest[key] = _Bucket(name, deadlines[position])
            buckets.append(found)
        home[task.outputs[0]] = found.name, len(found.tasks)
        found.tasks.append(task)
        found.nbytes += source.nbytes
        found.place, found.deadline = place, min(found.deadline, deadlines[position])
    return buckets


def _deadlines(program: Program, candidates: set[str]) -> list[int]:
    """By task the place of the first candidate that needs it, or one behind all tasks."""
    index = {task.name: i for i, task in enumerate(program.tasks)}
    deadlines = [len(index)] * len(index)
    for i, needs in reversed(list(enumerate(program.needs().values()))):
        mine = i if program.tasks[i].name in candidates else deadlines[i]
        for name in needs:
            deadlines[index[name]] = min(deadlines[index[name]], mine)
    return deadlines


def bucket_bytes(
    program: Program,
    reductions: list[Task],
    registers: dict[str, Register],
    machine: Machine,
    mesh: Mesh,
) -> int:
    """The size at which waiting for more costs as much as another message.

    With G bytes to reduce beside T seconds of compute, a message costing a + b n: if compute
    hides it all, the smallest n with (G/n) a + G b <= T; else n = G sqrt(a / T).
    """
    total = sum(registers[t.inputs[0]].nbytes for t in reductions)
    compute = sum(t.seconds for t in program.tasks if t.kind == "compute")
    if not total or not compute:
        return _SMALLEST
    axes = (mesh.sizes.index(max(mesh.sizes)),)
    fixed = collective_seconds(machine, "all_reduce", 0, mesh, axes)
    moving = collective_seconds(machine, "all_reduce", total, mesh, axes) - fixed
    if compute > moving:
        size = total * fixed / (compute - moving)
    else:
        size = total * (fixed / compute) ** 0.5
    return int(min(max(size, _SMALLEST), _LARGEST))


def _fused(group: _Bucket, mesh: Mesh, machine: Machine) -> Task:
    first = group.tasks[0]
    axes = mesh.along(first.axis)
    return replace(
        first,
        name=group.name,
        inputs=tuple(t.inputs[0] for t in group.tasks),
        outputs=tuple(t.outputs[0] for t in group.tasks),
        seconds=collective_seconds(machine, "all_reduce", group.nbytes, mesh, axes),
        where=group.tasks[-1].where,
    )
