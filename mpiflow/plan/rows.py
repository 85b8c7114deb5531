"""Rows that travel by owner: how many there are is decided by ids, in the step.

A table (v, d) is split by rows along some axes; who has a row is its owner.

    fetch_rows   table S(0), ids S(0)   -> rows S(0)      a rank asks for each distinct row once
    send_rows    values S(0), ids S(0)  -> P(union) both  for each shard of ids, which ascend and do
                                                          not repeat, what owners get of all

Members first tell one another how many rows come. The plan has memory for the most that can be, and
says how many bytes these are; a run never sends more.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from mpiflow.errors import VerifyError
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import UNION, B, Layout, Partial, S, Sbp, layout_text, shard_box
from mpiflow.plan.records import Register, Task
from mpiflow.plan.slice import RankPlan, itemsize

FETCH, SEND = "fetch_rows", "send_rows"
ROW_KINDS = (FETCH, SEND)
COUNT = 8
"""Bytes of a count, and of an id on its way."""


def owned_span(rank: RankPlan, axis: str, rows: int) -> tuple[int, int]:
    """The rows of a table that a rank has, where these axes split it."""
    axes = rank.mesh.along(axis)
    layout = tuple(S(0) if i in axes else B for i in range(len(rank.mesh.axes)))
    (span,) = shard_box((rows,), layout, rank.mesh.sizes, rank.coordinates)
    return span


def joint(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout of what a group along the axes has together."""
    return tuple(B if axis in axes else sbp for axis, sbp in enumerate(layout))


def most_sent(rank: RankPlan, task: Task, tensors: Mapping[str, Register]) -> int:
    """The most bytes that a rank sends: counts, ids that it does not own, rows that others want."""
    axes = rank.mesh.along(task.axis)
    members = rank.mesh.extent(axes)
    if task.op == FETCH:
        table, ids = (tensors[name] for name in task.inputs)
        rows, width = table.shape[0], rank.shape(table)[1] * itemsize(table.dtype)
        everyone = _count(rank, ids, joint(ids.layout, axes))
        start, stop = owned_span(rank, task.axis, rows)
        own = prod(rank.shape(ids))
        wanted = min(everyone - own, (members - 1) * (stop - start)) * width
    else:
        values, ids = (tensors[name] for name in task.inputs)
        rows, own = task.attributes["rows"], prod(rank.shape(ids))
        width = rank.shape(values)[-1] * itemsize(values.dtype)
        wanted = min(own, rows - rows // members) * width
    asked = min(own, rows - rows // members)
    return COUNT * (members - 1) + COUNT * asked + wanted


def _count(rank: RankPlan, ids: Register, layout: Layout) -> int:
    box = shard_box(ids.shape, layout, rank.mesh.sizes, rank.coordinates)
    return prod(stop - start for start, stop in box)


def row_staging(task: Task, tensors: Mapping[str, Register], mesh: Mesh) -> int:
    """Bytes of workspace: counts; for a fetch also ids asked of this rank, their rows, and own."""
    counts = 2 * COUNT * mesh.extent(mesh.along(task.axis))
    if task.op == SEND:
        return counts
    table, ids = (tensors[name] for name in task.inputs)
    largest = RankPlan(mesh, 0, (0,) * len(mesh.axes))
    width = largest.shape(table)[1] * itemsize(table.dtype)
    own = prod(largest.shape(ids))
    asked = _count(largest, ids, joint(ids.layout, mesh.along(task.axis)))
    return counts + asked * (COUNT + width) + own * width


def check_rows(task: Task, tensors: Mapping[str, Register], mesh: Mesh, what: str) -> None:
    """VerifyError where operands, layouts or workspace are not those of the message."""
    wanted = (2, 1) if task.op == FETCH else (2, 2)
    if (len(task.inputs), len(task.outputs)) != wanted:
        raise VerifyError(
            f"{what} has {len(task.inputs)} inputs and {len(task.outputs)} outputs, not"
            f" {wanted[0]} and {wanted[1]}"
        )
    operands = [tensors[name] for name in (*task.inputs, *task.outputs)]
    (_check_fetch if task.op == FETCH else _check_send)(task, operands, what)
    axes = mesh.along(task.axis)
    known = _fetched if task.op == FETCH else _sent
    for axis, sbps in enumerate(zip(*(r.layout for r in operands), strict=True)):
        if not known(axis in axes, sbps, len(operands[1].shape)):
            texts = ", ".join(f"{r.name} {layout_text(r.layout)!r}" for r in operands)
            raise VerifyError(
                f"{what}: {texts} is not what {task.op} does on axis {mesh.names[axis]}"
            )
    needed = row_staging(task, tensors, mesh)
    if task.workspace[1] < needed:
        raise VerifyError(
            f"{what} has a workspace of {task.workspace[1]} bytes, and needs {needed}"
        )


def _check_fetch(task: Task, operands: list[Register], what: str) -> None:
    table, ids, rows = operands
    if len(table.shape) != 2 or rows.shape != (*ids.shape, table.shape[1]):
        raise VerifyError(
            f"{what} takes rows {rows.shape} of a table {table.shape} by ids {ids.shape}"
        )
    if rows.dtype != table.dtype or not ids.shape:
        raise VerifyError(f"{what} takes {rows.dtype} rows of a {table.dtype} table")


def _check_send(task: Task, operands: list[Register], what: str) -> None:
    values, ids, made, found = operands
    shapes = (ids.shape, made.shape[:-1], found.shape)
    if made.shape != values.shape or any(x != values.shape[:-1] for x in shapes):
        raise VerifyError(
            f"{what} sends values {values.shape} by ids {ids.shape} to {made.shape}, {found.shape}"
        )
    if made.dtype != values.dtype or {ids.dtype, found.dtype} != {"int64"}:
        raise VerifyError(
            f"{what} sends {values.dtype} by {ids.dtype} to {made.dtype} by {found.dtype}"
        )
    rows = task.attributes.get("rows")
    if type(rows) is not int or rows < 1:
        raise VerifyError(f"{what} sends to the owners of {rows!r} rows")


def _fetched(along: bool, sbps: tuple[Sbp, ...], dims: int) -> bool:
    table, ids, rows = sbps
    if along:
        return sbps == (S(0), S(0), S(0))
    if isinstance(ids, S):
        return table == B and rows == ids
    return (table, rows) in ((B, B), (S(1), S(dims))) or (
        isinstance(table, Partial) and rows == table and ids == B
    )


def _sent(along: bool, sbps: tuple[Sbp, ...], dims: int) -> bool:
    if along:
        return sbps == (S(0), S(0), UNION, UNION)
    values, ids = sbps[:2]
    return sbps[2:] == (values, ids) and ids == B and values in (B, S(dims))
