"""Step 11, then: one update for many variables, which goes over them as over one flat array.

    bucket.0   [ g1 | g2 | g3 ]      update.0   weights [ w1 | w2 | w3 ]  moments [ m1 | m2 | m3 ]

A small tensor's kernel costs more than its elements do. Updates go together that do the same with
the same numbers: all whose gradients one collective brings, or else as many as are worth it. The
memory step lays side by side what they use; where the parts of a rank do lie so, they are one array
to the kernel, see `graph.op.Op.abreast`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mpiflow.compiler.build import priced
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.order import in_order
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import build_op
from mpiflow.plan.records import COMPUTE, Program, Register, Task, Variable, in_time

_WORTH = 50
"""So many times what a kernel costs at least: what takes longer need not be joined to another."""
_LARGEST, _SHARE = 25 << 20, 256
"""Bytes that may wait in memory for one another, and the share of a limit on memory that may."""

Tensors = Mapping[str, Register]


def join_updates(
    program: Program,
    mesh: Mesh,
    machine: Machine,
    variables: Iterable[Variable],
    memory: int = 0,
) -> Program:
    """With updates joined where the last of them was. `mesh` is that of the program's layouts.

    Where `memory` is limited to so many bytes, hardly any are held for longer by that.
    """
    tensors = {t.name: t for t in (*in_time(variables, mesh), *program.registers)}
    most = min(_LARGEST, memory // _SHARE) if memory else _LARGEST
    groups = [g for g in _groups(program, tensors, machine, most) if len(g) > 1]
    if not groups:
        return program
    made = [_joined(f"update.{i}", g, tensors, mesh, machine) for i, g in enumerate(groups)]
    renamed = {t.name: one.name for g, one in zip(groups, made, strict=True) for t in g}
    order = {task.name: i for i, task in enumerate(program.tasks)}
    last = {max(order[t.name] for t in g): one for g, one in zip(groups, made, strict=True)}
    tasks = [
        _renamed(last.get(i, task), renamed)
        for i, task in enumerate(program.tasks)
        if i in last or task.name not in renamed
    ]
    return in_order(replace(program, tasks=tuple(tasks)))


@dataclass(slots=True)
class _Group:
    """Updates that become one.

    `seconds` is what they take beyond what a kernel costs at least, and `nbytes` what has to wait
    in memory for the last of them: no variables, nor gradients that one collective brings.
    """

    tasks: list[Task] = field(default_factory=list)
    seconds: float = 0.0
    nbytes: int = 0


def _groups(program: Program, tensors: Tensors, machine: Machine, most: int) -> list[list[Task]]:
    """The updates that go together, in the order in which their gradients are made."""
    makers = {name: i for i, task in enumerate(program.tasks) for name in task.outputs}
    updates = [(task, depth) for task, depth in _updates(program) if _gradient(task) in makers]
    found: list[_Group] = []
    newest: dict[tuple[object, ...], _Group] = {}
    for task, depth in sorted(updates, key=lambda update: makers[_gradient(update[0])]):
        maker = program.tasks[makers[_gradient(task)]]
        brought = maker.name if maker.kind == "collective" else ""
        kernel = machine.kernels.get(task.op)
        least = kernel.seconds if kernel else machine.launch
        seconds = 0.0 if brought else task.seconds - least
        nbytes = _waiting(task, tensors, bool(brought))
        key = (*_settings(task, tensors), brought, depth, task.phase, task.segment)
        group = newest.get(key)
        if (
            group is None
            or any(_gradient(task) == _gradient(other) for other in group.tasks)
            or group.seconds + seconds > _WORTH * least
            or group.nbytes + nbytes > most
        ):
            found.append(group := _Group())
            if seconds <= _WORTH * least and nbytes <= most:
                newest[key] = group
        group.tasks.append(task)
        group.seconds += seconds
        group.nbytes += nbytes
    return [group.tasks for group in found]


def _gradient(task: Task) -> str:
    """What an update takes besides what it updates."""
    _, gradients, *_ = build_op(task.op, task.attributes).abreast()[0]
    return task.inputs[gradients.start]


def _waiting(task: Task, tensors: Tensors, brought: bool) -> int:
    """The bytes of an update that wait for others: registers, but for a gradient that is there."""
    names = {*task.inputs, *task.outputs} - ({_gradient(task)} if brought else set())
    return sum(tensors[n].nbytes for n in names if not isinstance(tensors[n], Variable))


def _updates(program: Program) -> list[tuple[Task, int]]:
    """The tasks that can be joined, each with how many of them are before it on any way to it.

    Where that is the same for two of them, neither comes before the other.
    """
    needs = program.needs()
    depths: dict[str, int] = {}
    found = []
    for task in program.tasks:
        depth = max((depths[name] for name in needs[task.name]), default=0)
        if task.kind == COMPUTE and build_op(task.op, task.attributes).abreast()[0]:
            found.append((task, depth))
            depth += 1
        depths[task.name] = depth
    return found


def _settings(task: Task, tensors: Tensors) -> tuple[object, ...]:
    """What is the same of updates that can be joined: the op, its attributes, scalars, dtype."""
    given, _ = build_op(task.op, task.attributes).abreast()
    own = {i for each in given for i in each}
    scalars = tuple(name for i, name in enumerate(task.inputs) if i not in own)
    return task.op, repr(task.attributes), scalars, tensors[task.inputs[0]].dtype


def _joined(
    name: str, group: Sequence[Task], tensors: Tensors, mesh: Mesh, machine: Machine
) -> Task:
    """One task for a group: its operands by kind, the members' one after another."""
    first = group[0]
    alone = build_op(first.op, first.attributes)
    given, made = alone.abreast()
    starts = {each.start for each in given}
    inputs = [
        name
        for i in range(len(first.inputs))
        for name in ([t.inputs[i] for t in group] if i in starts else [first.inputs[i]])
    ]
    outputs = [t.outputs[each.start] for each in made for t in group]
    kinds = (
        tuple((tensors[n].shape, tensors[n].dtype, tensors[n].layout) for n in names)
        for names in (inputs, outputs)
    )
    names = {task.name for task in group}
    return replace(
        priced(alone.joined(len(group)), *kinds, mesh, machine),
        name=name,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        after=tuple(dict.fromkeys(n for t in group for n in t.after if n not in names)),
        where=group[-1].where,
        phase=first.phase,
        segment=first.segment,
    )


def _renamed(task: Task, renamed: Mapping[str, str]) -> Task:
    if renamed.keys().isdisjoint(task.after):
        return task
    return replace(task, after=tuple(dict.fromkeys(renamed.get(n, n) for n in task.after)))
