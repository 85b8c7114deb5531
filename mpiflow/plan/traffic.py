"""What a step sends, worked out from the plan alone, in time that does not grow with the ranks.

Along an axis the shards change only where the longer spans end, and so what a collective sends: one
rank from each stretch between such places stands for all of them. What ranks send in an exchange of
slices may differ from each to the next.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import S, box_shape, unit_span
from mpiflow.plan.exchange import copies
from mpiflow.plan.pieces import is_in_pieces, pieces_of
from mpiflow.plan.records import SEND, Plan, Program, Register, Task
from mpiflow.plan.rows import ROW_KINDS
from mpiflow.plan.rows import most_sent as most_rows_sent
from mpiflow.plan.slice import RankPlan, common, itemsize, reduced_elements
from mpiflow.plan.volume import sent_elements


def bytes_sent(plan: Plan, program: Program) -> int:
    """Payload bytes that one step sends, of the rank that sends most."""
    return sum(nbytes for _, nbytes in sent_each(plan, program))


def most_sent(plan: Plan, name: str) -> int:
    """Payload bytes that a step of a program sends, of the rank that sends most on any stage."""
    return max((bytes_sent(plan, p) for p in plan.programs if p.name == name), default=0)


def sent_each(plan: Plan, program: Program) -> list[tuple[Task, int]]:
    """Collectives and sends, with what each sends in a step on the rank that sends most of all."""
    firings = [
        (task, program.micro_batches if task.phase % 2 else 1)
        for task in program.tasks if task.kind in ("collective", SEND)
    ]  # fmt: skip
    return _most_sent(firings, plan.tensors(program), plan.mesh_of(program))


def firing_bytes(task: Task, tensors: dict[str, Register], mesh: Mesh) -> int:
    """Payload bytes that one firing of a collective sends, of the rank that sends most."""
    return _most_sent([(task, 1)], tensors, mesh)[0][1]


def _most_sent(
    firings: list[tuple[Task, int]], tensors: dict[str, Register], mesh: Mesh
) -> list[tuple[Task, int]]:
    """Of collectives that fire so many times each, the bytes of the rank that sends most."""
    each = [_by_place(mesh, task, tensors) for task, _ in firings]
    joint = [
        sorted({0}.union(*(places[axis] for places, _ in each))) for axis in range(len(mesh.axes))
    ]
    sent = np.zeros((len(firings), *map(len, joint)), np.int64)
    for i, (_, times) in enumerate(firings):
        places, known = each[i]
        stretches = (
            np.searchsorted(own, every, side="right") - 1
            for own, every in zip(places, joint, strict=True)
        )
        sent[i] = times * known[np.ix_(*stretches)]
    flat = sent.reshape(len(firings), prod(map(len, joint)))
    most = flat[:, flat.sum(axis=0).argmax()]
    return [(task, int(nbytes)) for (task, _), nbytes in zip(firings, most, strict=True)]


def _by_place(
    mesh: Mesh, task: Task, tensors: dict[str, Register]
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Where stretches begin on each axis, and what a rank of each sends in one firing.

    Collectives that are alike but for names and lines, those of repeated layers, share the answer.
    """
    names = tuple(dict.fromkeys((*task.inputs, *task.outputs)))
    number = {name: str(i) for i, name in enumerate(names)}
    registers = tuple(
        Register(number[name], x.shape, x.dtype, x.layout, 0, x.nbytes, micro=x.micro)
        for name in names for x in [tensors[name]]
    )  # fmt: skip
    inputs, outputs = (tuple(number[name] for name in x) for x in (task.inputs, task.outputs))
    attributes = tuple(task.attributes.items())
    return _by_place_once(
        mesh, task.kind, task.op, task.axis, attributes, inputs, outputs, registers
    )


@lru_cache(maxsize=4096)
def _by_place_once(
    mesh: Mesh,
    kind: str,
    op: str,
    axis: str,
    attributes: tuple[tuple[str, Any], ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    registers: tuple[Register, ...],
) -> tuple[list[list[int]], NDArray[np.int64]]:
    task = Task("", kind, "", op, inputs, outputs, dict(attributes), axis)
    tensors = {register.name: register for register in registers}
    places = _places(mesh, task, tensors)
    sent = np.array([
        sent_by(RankPlan(mesh, mesh.rank(where), where), task, tensors)
        for where in product(*places)
    ])  # fmt: skip
    return places, sent.reshape([*map(len, places)])


def sent_by(rank: RankPlan, task: Task, tensors: dict[str, Register]) -> int:
    """Payload bytes that a rank sends in a collective; as `RankPlan.sent_bytes`, without peers."""
    if task.kind == SEND:
        sent = tensors[task.inputs[0]]
        shapes = (box_shape(box) for _, box in pieces_of(task, sent, rank))
        return sum(map(prod, shapes)) * itemsize(sent.dtype)
    if task.op in ROW_KINDS:
        return most_rows_sent(rank, task, tensors)
    source, target = tensors[task.inputs[0]], tensors[task.outputs[0]]
    axes = rank.mesh.along(task.axis)
    pairs = [(tensors[a], tensors[b]) for a, b in zip(task.inputs, task.outputs, strict=True)]
    own = sum(prod(rank.shape(member)) for member, _ in pairs)
    staying = sum(common(rank.box(a), rank.box(b)) for a, b in pairs)
    match task.op:
        case "all_reduce":
            count = reduced_elements([member for member, _ in pairs], rank)
            index = 0
            for axis in axes:
                index = index * rank.mesh.sizes[axis] + rank.coordinates[axis]
            elements = sent_elements("all_reduce", (count,), rank.mesh.extent(axes), index)
        case "all_gather":
            elements = (rank.mesh.extent(axes) - 1) * own
        case "exchange":
            elements = _wanted(rank, source, target, axes) - staying
        case _:  # all but what stays here
            elements = own - staying
    return elements * itemsize(source.dtype)


def _wanted(rank: RankPlan, source: Register, target: Register, axes: tuple[int, ...]) -> int:
    """Elements of a rank's shard that the members of its group want, itself among them.

    Their target shards vary in each dim with other axes, so the sums over these can be multiplied.
    """
    elements = copies(target.layout, axes, rank.mesh)
    splits: list[list[tuple[int, int, int]]] = [[] for _ in target.shape]
    for axis, sbp in enumerate(target.layout):
        if isinstance(sbp, S):
            index = -1 if axis in axes else rank.coordinates[axis]
            splits[sbp.dim].append((rank.mesh.sizes[axis], sbp.unit, index))
    for size, split, (start, stop) in zip(target.shape, splits, rank.box(source), strict=True):
        spans = _spans(size, tuple(split))
        shared = np.minimum(spans[:, 1], stop) - np.maximum(spans[:, 0], start)
        elements *= int(shared.clip(min=0).sum())
    return elements


@lru_cache(maxsize=4096)
def _spans(size: int, splits: tuple[tuple[int, int, int], ...]) -> NDArray[np.int64]:
    """Where the parts of a dim begin and end, split by (parts, unit, index), all where that is -1.

    The outermost split comes first.
    """
    spans = [(0, size)]
    for parts, unit, index in splits:
        spans = [
            (first + start, first + stop)
            for first, last in spans
            for i in (range(parts) if index < 0 else (index,))
            for start, stop in [unit_span(last - first, unit, parts, i)]
        ]
    return np.array(spans, np.int64)


def _differs_by_rank(task: Task, source: Register, target: Register) -> tuple[int, ...]:
    """The axes along which what a rank sends may differ from each to the next.

    Those of an exchange, and where a dim is split in units of one size and then of another.
    """
    pairs = list(enumerate(zip(source.layout, target.layout, strict=True)))
    changed = tuple(axis for axis, (a, b) in pairs if a != b)
    one_dim = any(
        isinstance(a, S) and isinstance(b, S) and a.dim == b.dim for _, (a, b) in pairs if a != b
    )
    return changed if task.op == "exchange" or one_dim else ()


def _places(mesh: Mesh, task: Task, tensors: dict[str, Register]) -> list[list[int]]:
    """On each axis where the stretches begin on which all ranks send alike; one in time."""
    places = [{0} for _ in mesh.axes]
    for name in (*task.inputs, *task.outputs):
        register = tensors[name]
        lengths = [{size} for size in register.shape]
        for axis, sbp in enumerate(register.layout):
            if isinstance(sbp, S):
                parts, shorter = mesh.sizes[axis], set()
                for length in lengths[sbp.dim]:
                    base, extra = divmod(length // sbp.unit, parts)
                    places[axis].add(extra)
                    shorter |= {base * sbp.unit, (base + (extra > 0)) * sbp.unit}
                lengths[sbp.dim] = shorter
    if task.kind == SEND and is_in_pieces(task):
        places = [set(range(size)) for size in mesh.sizes]
    axes = mesh.along(task.axis) if task.axis else ()
    targets = task.outputs or task.inputs  # a send has none
    differing = _differs_by_rank(task, tensors[task.inputs[0]], tensors[targets[0]])
    for axis in (*axes, *differing) if differing else ():
        places[axis].update(range(mesh.sizes[axis]))
    if task.op == "all_reduce":  # whose segments are spans of the shard's elements
        members = [tensors[name] for name in task.inputs]
        for where in product(*map(sorted, places)):
            rank = RankPlan(mesh, mesh.rank(where), where)
            longer = reduced_elements(members, rank) % mesh.extent(axes)
            for axis in reversed(axes):
                longer, index = divmod(longer, mesh.sizes[axis])
                places[axis] |= {index, min(index + 1, mesh.sizes[axis] - 1)}
    return [[0] if mesh.timed and not axis else sorted(each) for axis, each in enumerate(places)]
