"""Verify: every tensor has a layout that it can have, every collective one that it does.

What a collective does to the layout along its axis, or alike along several (all others stay as
they are):

    all_reduce      P    -> B        reduce = that of P
    all_gather      S(d) -> B        dim = d
    reduce_scatter  P    -> S(d)     reduce, dim
    all_to_all      S(i) -> S(j)     source = i, target = j, one axis
    exchange        any S, B -> any  along the axes that `exchange_axes` gives, where others change
                                     from B to S only
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

from mpiflow.errors import PlanError, VerifyError
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import Broadcast, Layout, Partial, S, Sbp, layout_text
from mpiflow.plan.exchange import exchange_axes, packing_bytes, staging_bytes
from mpiflow.plan.records import Register, Task, Variable, communication_stream, host_stream
from mpiflow.plan.rows import ROW_KINDS, check_rows
from mpiflow.plan.slice import itemsize
from mpiflow.plan.volume import KINDS


def label(task: Task) -> str:
    """A task in the user's words: `t3 matmul (digits.py:12)`."""
    named = task.name if task.op.lower() in task.name else f"{task.name} {task.op}".strip()
    return f"{named} ({task.where})" if task.where else named


def largest_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest shard; PlanError where the layout does not fit the shape."""
    if len(layout) != len(mesh.axes):
        raise PlanError(f"has {len(layout)} parts for the {len(mesh.axes)} axes of mesh {mesh}")
    lengths = [{size} for size in shape]  # all lengths that occur on any rank
    for sbp, (axis, parts) in zip(layout, mesh.axes, strict=True):
        if isinstance(sbp, S):
            if sbp.dim >= len(shape):
                raise PlanError(f"splits dim {sbp.dim} of a tensor with {len(shape)} dims")
            lengths[sbp.dim] = _split(lengths[sbp.dim], sbp, axis, parts)
    return tuple(max(each) for each in lengths)


def _split(lengths: set[int], sbp: S, axis: str, parts: int) -> set[int]:
    split: set[int] = set()
    for length in sorted(lengths):
        if sbp.unit < 1 or length % sbp.unit:
            raise PlanError(f"splits a dim of {length} on axis {axis} in units of {sbp.unit}")
        base, extra = divmod(length // sbp.unit, parts)
        split |= {base * sbp.unit, (base + (extra > 0)) * sbp.unit}
    return split


def check_tensor(tensor: Register, mesh: Mesh, arenas: Mapping[str, int], context: str) -> None:
    """The layout fits shape and mesh, and the memory fits the shard and the arena of its space."""
    what = f"{context}: {kind_of(tensor)} {tensor.name}"
    try:
        size = itemsize(tensor.dtype)
    except KeyError:
        raise VerifyError(f"{what} has the unknown dtype {tensor.dtype!r}") from None
    try:
        local = largest_shape(tensor.shape, tensor.layout, mesh)
    except PlanError as error:
        text = layout_text(tensor.layout)
        raise VerifyError(f"{what} of shape {tensor.shape}: layout {text!r} {error}") from None
    if tensor.nbytes != prod(local) * size:
        raise VerifyError(
            f"{what}: its largest shard {local} of {tensor.dtype} takes {prod(local) * size} "
            f"bytes, the plan gives it {tensor.nbytes}"
        )
    if tensor.slots < 1:
        raise VerifyError(f"{what}: missing slot: it has {tensor.slots} slots, needs 1 or more")
    if tensor.offset < 0 or tensor.offset % size:
        raise VerifyError(f"{what}: offset {tensor.offset} is no multiple of {size} bytes")
    if tensor.space not in arenas:
        raise VerifyError(f"{what} lies in {tensor.space!r}, which is no memory of the plan")
    stop, arena = tensor.offset + tensor.slots * tensor.nbytes, arenas[tensor.space]
    if stop > arena:
        raise VerifyError(f"{what} ends at byte {stop}, the arena has {arena} bytes")


def kind_of(tensor: Register) -> str:
    """`variable` or `register`, for messages."""
    return "variable" if isinstance(tensor, Variable) else "register"


def check_collective(task: Task, tensors: dict[str, Register], mesh: Mesh, context: str) -> None:
    """Stream, axis, operands and layouts of a collective agree with each other."""
    what = f"{context}: {label(task)}"
    if task.op not in (*KINDS, *ROW_KINDS):
        known = ", ".join((*KINDS, *ROW_KINDS))
        raise VerifyError(f"{what}: {task.op!r} is no collective; known are {known}")
    named = task.axis.split(",")
    if named != [name for name in mesh.names[mesh.timed :] if name in named]:
        raise VerifyError(
            f"{what} runs along axis {task.axis!r}, the mesh is {mesh}; several axes are named"
            " once each, outermost first"
        )
    own = communication_stream(task.axis)
    if task.stream not in (own, host_stream(own)):
        raise VerifyError(
            f"{what} along axis {task.axis} is on stream {task.stream}: its members would not "
            f"all call it in the same order as the others of {own}"
        )
    if task.op in ROW_KINDS:
        check_rows(task, tensors, mesh, what)
        return
    if not task.inputs or len(task.inputs) != len(task.outputs):
        raise VerifyError(
            f"{what} has {len(task.inputs)} inputs and {len(task.outputs)} outputs; "
            "every input needs its output"
        )
    room, dtype = packing_bytes(task), tensors[task.inputs[0]].dtype
    if type(room) is not int or room % itemsize(dtype):
        raise VerifyError(
            f"{what} receives what it sums from byte {room!r} of its workspace, which is no place"
            f" of {dtype} elements"
        )
    if len(task.inputs) > 1:
        _check_fused(task, [tensors[name] for name in task.inputs], tensors, what)
    for source, target in zip(task.inputs, task.outputs, strict=True):
        _check_transition(task, tensors[source], tensors[target], mesh, what)
    if len(task.inputs) == 1:
        needed = staging_bytes(task, tensors[task.inputs[0]], tensors[task.outputs[0]], mesh)
        if room < needed:
            raise VerifyError(
                f"{what} packs pieces into a workspace of {room} bytes, and needs {needed}"
            )


def _check_transition(
    task: Task, source: Register, target: Register, mesh: Mesh, what: str
) -> None:
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise VerifyError(
            f"{what} makes {target.dtype} {target.shape} ({target.name}) of {source.dtype} "
            f"{source.shape} ({source.name}); it may change the layout only"
        )
    axes = mesh.along(task.axis)
    pairs = list(zip(source.layout, target.layout, strict=True))
    change = pairs[axes[0]]
    text = (
        f"{what}: {source.name} {layout_text(source.layout)!r} -> "
        f"{target.name} {layout_text(target.layout)!r}"
    )
    if task.op == "exchange":
        _check_exchange(task, source.layout, target.layout, mesh, text)
        return
    if any(a != b for i, (a, b) in enumerate(pairs) if i not in axes):
        raise VerifyError(f"{text} changes another axis than {task.axis}")
    expected = _transition(task.op, *change)
    alike = all(pairs[axis] == change for axis in axes)
    if expected is None or not alike or (task.op == "all_to_all" and len(axes) > 1):
        raise VerifyError(f"{text} is not what {task.op} does along axis {task.axis}")
    for name, value in expected.items():
        given = task.attributes.get(name, "sum" if name == "reduce" else value)
        if given != value:
            raise VerifyError(f"{text}: {name} is {given!r}, the layouts say {value!r}")
    changed = {sbp.dim for sbp in change if isinstance(sbp, S)}
    for inner, sbp in enumerate(source.layout):
        if inner > axes[0] and inner not in axes and isinstance(sbp, S) and sbp.dim in changed:
            raise VerifyError(
                f"{text}: axis {mesh.names[inner]} inside {task.axis} splits dim {sbp.dim} too, "
                "so the shards would interleave"
            )


def _check_exchange(task: Task, source: Layout, target: Layout, mesh: Mesh, text: str) -> None:
    """The group holds all that its members want, and each element once."""
    changed = [axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a != b]
    if any(isinstance(x[axis], Partial) for x in (source, target) for axis in changed):
        raise VerifyError(f"{text}: an exchange moves values, it can neither add up nor make parts")
    if mesh.timed and 0 in changed:
        raise VerifyError(f"{text}: what changes in time is not exchanged between ranks")
    needed = mesh.joined(exchange_axes(source, target))
    if task.axis != needed:
        raise VerifyError(
            f"{text} exchanges slices along {needed or 'no axis'}, the plan says {task.axis}"
        )


def _transition(op: str, source: Sbp, target: Sbp) -> dict[str, Any] | None:
    """The attributes that op has where it turns source into target; None where it does not."""
    match op, source, target:
        case "all_reduce", Partial(reduce), Broadcast():
            return {"reduce": reduce}
        case "all_gather", S(dim), Broadcast():
            return {"dim": dim}
        case "reduce_scatter", Partial(reduce), S(dim):
            return {"reduce": reduce, "dim": dim}
        case "all_to_all", S(i), S(j) if source != target:
            return {"source": i, "target": j}
    return None


def _check_fused(
    task: Task, inputs: list[Register], tensors: dict[str, Register], what: str
) -> None:
    """Several tensors in one call are one buffer: side by side, or packed in the workspace."""
    if task.op not in ("all_reduce", "all_gather", "reduce_scatter"):
        raise VerifyError(f"{what} has {len(inputs)} inputs; {task.op} takes one")
    for left, right in pairwise(inputs):
        if left.dtype != right.dtype:
            raise VerifyError(
                f"{what} fuses {left.name} of {left.dtype} with {right.name} of {right.dtype}"
            )
    if task.op == "all_reduce":
        _check_side_by_side(task, inputs, tensors, what)
        return
    needed = sum(tensors[name].nbytes for name in (*task.inputs, *task.outputs))
    if packing_bytes(task) < needed:
        raise VerifyError(
            f"{what} packs {len(inputs)} tensors and their parts, {needed} bytes; its workspace"
            f" has {packing_bytes(task)}"
        )


def _check_side_by_side(
    task: Task, inputs: list[Register], tensors: dict[str, Register], what: str
) -> None:
    """They make up one buffer, which is reduced in place."""
    for left, right in pairwise(inputs):
        if left.offset + left.nbytes != right.offset:
            raise VerifyError(
                f"{what} fuses {left.name}, which ends at byte {left.offset + left.nbytes}, with "
                f"{right.name}, which begins at {right.offset}; they must lie side by side"
            )
    for source, name in zip(inputs, task.outputs, strict=True):
        if source.slots != 1 or tensors[name].aliases != source.name:
            raise VerifyError(
                f"{what} is fused: {name} must alias {source.name}, with one slot each; it "
                f"aliases {tensors[name].aliases or 'nothing'}, {source.slots} slots"
            )
