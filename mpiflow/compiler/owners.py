"""Rows that travel to and from the ranks that have them of a table, each distinct one once.

Where a table is split by rows and the ids by the batch, a rank asks each owner for the rows that
its ids name, and gets these back (`fetch_rows`); a gradient is added up by row where it was made,
and then goes to the owner of the row (`send_rows`). How many there are the ids decide, in the step;
the plan has the most that can be. The alternative without such messages is that every rank sees all
ids, gives zeros for rows that it does not have, and the ranks add up the results: where they then
take a part each, that sends (p-1)/p of the looked up rows, and this on average a p-th of it.
"""

from __future__ import annotations

from math import prod

from mpiflow.compiler.boxing import local_shape
from mpiflow.compiler.cost import collective_seconds, compute_seconds, op_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.graph.graph import Node
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import Op
from mpiflow.graph.rule import Signature
from mpiflow.graph.sbp import UNION, B, Layout, Partial, S
from mpiflow.ops.rows import Lookup, RowGradient, SumRows
from mpiflow.ops.rowupdate import RowUpdate
from mpiflow.plan.rows import COUNT, joint
from mpiflow.plan.slice import itemsize

Layouts = tuple[Layout, ...]


def owner_axes(node: Node, inputs: Layouts, outputs: Layouts) -> tuple[int, ...]:
    """The axes on which layouts of a node's inputs and outputs are those of `Op.by_owner`."""
    known = node.op.by_owner(tuple(tensor.shape for tensor in node.inputs))
    if not known:
        return ()
    on_axis = zip(zip(*inputs, strict=True), zip(*outputs, strict=True), strict=True)
    found = [axis for axis, (a, b) in enumerate(on_axis) if Signature(a, b) in known]
    return tuple(found)


def is_message(op: Op) -> bool:
    """Whether a message is what `Op.by_owner` takes: updates find their rows where they are."""
    return isinstance(op, Lookup | RowGradient | SumRows)


def are_owned(op: Op, axes: tuple[int, ...], inputs: Layouts, outputs: Layouts) -> bool:
    """Whether owners along the axes have whole spans of the table: no other axis splits rows.

    Nor does one split the ids of what is sent, or leave its values in parts of sums: all ranks of a
    group send the same rows there.
    """
    if is_message(op) and not isinstance(op, Lookup):
        beside = [
            pair for axis, pair in enumerate(zip(*inputs[:2], strict=True)) if axis not in axes
        ]
        if any(ids != B or isinstance(values, Partial) for values, ids in beside):
            return False
    tables = {Lookup: inputs[:1], RowGradient: outputs[:1], RowUpdate: inputs[:1]}
    layouts = next((found for kind, found in tables.items() if isinstance(op, kind)), ())
    return all(
        not isinstance(sbp, S) or sbp.dim != 0
        for layout in layouts
        for axis, sbp in enumerate(layout)
        if axis not in axes
    )


def as_computed(node: Node, inputs: Layouts, axes: tuple[int, ...]) -> Layouts:
    """The layouts of what a kernel takes, which a message before it makes of the inputs."""
    if isinstance(node.op, Lookup) or not is_message(node.op):
        return inputs
    return tuple(as_owned(layout, axes) for layout in inputs)


def as_owned(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout with, along the axes, what owners have of a list."""
    return tuple(UNION if axis in axes else sbp for axis, sbp in enumerate(layout))


def as_expected(op: Op, inputs: Layouts, outputs: Layouts) -> Layouts:
    """The layouts by which a kernel on rows is priced, of inputs and outputs.

    Owners are taken to get equal parts. They have memory for all entries, and pass over those that
    are not theirs, or padding.
    """
    layouts = (*inputs, *outputs)
    if isinstance(op, RowUpdate) and not op.block:
        axes = tuple(axis for axis, sbp in enumerate(inputs[0]) if sbp == S(0))
        return (inputs[0], *(_split(layout, axes) for layout in inputs[1:3]), *layouts[3:])
    if isinstance(op, SumRows | RowGradient):
        axes = tuple(axis for axis, sbp in enumerate(inputs[0]) if sbp == UNION)
        return tuple(_split(layout, axes) for layout in layouts)
    return layouts


def _split(layout: Layout, axes: tuple[int, ...]) -> Layout:
    return tuple(S(0) if axis in axes else sbp for axis, sbp in enumerate(layout))


def message_seconds(
    machine: Machine,
    node: Node,
    inputs: Layouts,
    outputs: Layouts,
    mesh: Mesh,
    axes: tuple[int, ...],
    share: float,
) -> float:
    """What a node's message takes beside its kernel, from layouts of its inputs and outputs.

    A `share` counts of what a gradient is on its way.
    """
    if isinstance(node.op, Lookup):
        (rows,) = node.outputs
        return fetch_seconds(machine, rows.shape, rows.dtype, outputs[0], mesh, axes)
    values, layout = node.inputs[0], inputs[0]
    seconds = rows_seconds(machine, values.shape, values.dtype, layout, mesh, axes)
    return share * seconds + _summing(machine, values.shape, values.dtype, layout, mesh)


def fetch_seconds(
    machine: Machine,
    shape: tuple[int, ...],
    dtype: str,
    layout: Layout,
    mesh: Mesh,
    axes: tuple[int, ...],
) -> float:
    """A fetch of rows: finding the distinct ids, the message, and putting together what leaves."""
    nbytes = prod(local_shape(shape, layout, mesh)) * itemsize(dtype)
    seconds = rows_seconds(machine, shape, dtype, layout, mesh, axes)
    seconds += _summing(machine, (*shape[:-1], 1), dtype, layout, mesh)
    return seconds + compute_seconds(machine, 0, 2 * nbytes, dtype)


def rows_seconds(
    machine: Machine,
    shape: tuple[int, ...],
    dtype: str,
    layout: Layout,
    mesh: Mesh,
    axes: tuple[int, ...],
) -> float:
    """The three exchanges of a message: of how many, of ids, and of rows.

    The shape is that of what is looked up, or of its gradient, in the layout of a rank's own. Rows
    are taken to lie with all ranks alike, and to be all different.
    """
    everyone = local_shape(shape, joint(layout, axes), mesh)
    ids, rows = COUNT * prod(everyone[:-1]), prod(everyone) * itemsize(dtype)
    return sum(
        collective_seconds(machine, "all_to_all", nbytes, mesh, axes)
        for nbytes in (COUNT * mesh.extent(axes) ** 2, ids, rows)
    )


def _summing(
    machine: Machine, shape: tuple[int, ...], dtype: str, layout: Layout, mesh: Mesh
) -> float:
    """Adding up a rank's own values by row."""
    own = local_shape(shape, layout, mesh)
    shapes = ((prod(own[:-1]), own[-1]), (prod(own[:-1]),))
    return op_seconds(machine, SumRows(1), shapes, shapes, (dtype, "int64") * 2)
