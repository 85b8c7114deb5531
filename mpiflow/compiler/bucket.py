"""Step 11: one all_reduce for many small tensors, and reductions in place.

Tensors of a bucket lie side by side in memory, so that a fused reduction copies nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from mpiflow.compiler.cost import collective_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.order import in_order
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import Program, Register, Task

_SMALLEST, _LARGEST = 256 << 10, 25 << 20


@dataclass
class _Bucket:
    name: str
    key: tuple[str, str, str, int]
    tasks: list[Task] = field(default_factory=list)
    nbytes: int = 0


def bucket(program: Program, mesh: Mesh, machine: Machine) -> Program:
    """Fuse all_reduces that can wait for one another, each in place."""
    registers = {r.name: r for r in program.registers}
    readers = Counter(name for task in program.tasks for name in set(task.inputs))
    # In place: the reduction is the only reader of its input.
    candidates = [t for t in program.tasks if t.op == "all_reduce" and readers[t.inputs[0]] == 1]
    for task in candidates:
        registers[task.outputs[0]] = replace(registers[task.outputs[0]], aliases=task.inputs[0])
    limit = bucket_bytes(program, candidates, registers, machine, mesh)
    before = _ancestors(program)
    buckets: list[_Bucket] = []
    for task in candidates:
        size = registers[task.inputs[0]].nbytes
        # What is the result of another reduction lies where that one has it.
        if size and not registers[task.inputs[0]].aliases:
            _put(task, size, registers, limit, before, buckets)
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
    axis = mesh.sizes.index(max(mesh.sizes))
    fixed = collective_seconds(machine, "all_reduce", 0, mesh, axis)
    moving = collective_seconds(machine, "all_reduce", total, mesh, axis) - fixed
    if compute > moving:
        size = total * fixed / (compute - moving)
    else:
        size = total * (fixed / compute) ** 0.5
    return int(min(max(size, _SMALLEST), _LARGEST))


def _put(
    task: Task,
    size: int,
    registers: dict[str, Register],
    limit: int,
    before: dict[str, int],
    buckets: list[_Bucket],
) -> None:
    """Add to the newest bucket of the same kind, unless that one is full or must come first."""
    key = (task.axis, task.attributes["reduce"], registers[task.inputs[0]].dtype, task.phase)
    open_one = next((b for b in reversed(buckets) if b.key == key), None)
    if open_one is None or open_one.nbytes + size > limit or _depends(task, buckets, before):
        open_one = _Bucket(f"bucket.{task.axis}.{len(buckets)}", key)
        buckets.append(open_one)
    open_one.tasks.append(task)
    open_one.nbytes += size


def _depends(task: Task, buckets: list[_Bucket], before: dict[str, int]) -> bool:
    """Whether the task needs a result of any bucket: fusing across it could make a circle."""
    return any(before[task.name] & before[f"\0{t.name}"] for b in buckets for t in b.tasks)


def _ancestors(program: Program) -> dict[str, int]:
    """Per task the bits of all tasks before it; under "\\0name" the task's own bit."""
    needs = program.needs()
    found: dict[str, int] = {}
    for i, task in enumerate(program.tasks):
        found[f"\0{task.name}"] = 1 << i
        found[task.name] = 0
        for name in needs[task.name]:
            found[task.name] |= found[name] | found[f"\0{name}"]
    return found


def _fused(group: _Bucket, mesh: Mesh, machine: Machine) -> Task:
    first = group.tasks[0]
    axis = mesh.index(first.axis)
    return replace(
        first,
        name=group.name,
        inputs=tuple(t.inputs[0] for t in group.tasks),
        outputs=tuple(t.outputs[0] for t in group.tasks),
        seconds=collective_seconds(machine, "all_reduce", group.nbytes, mesh, axis),
        where=group.tasks[-1].where,
    )
