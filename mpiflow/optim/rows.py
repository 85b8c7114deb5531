"""Which tables are updated by rows, and what their gradients are then.

The gradient of a table that is used by lookups only is zero but for the rows that a step looks up.
It stays a pair of small tensors from the backward pass to the update, wherever an update of these
rows alone is the same as one of the whole table, or the user takes it for that by `sparse=True`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from mpiflow.errors import JobError
from mpiflow.graph.graph import Graph, Node, Variable
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.concat import concat
from mpiflow.ops.elementwise import Add
from mpiflow.ops.rows import Lookup, RowGradient, SumRows, TakeRowsGrad
from mpiflow.ops.shape import cast, reshape

if TYPE_CHECKING:
    from mpiflow.optim.base import Optimizer


@dataclass(frozen=True, slots=True)
class Rows:
    """A gradient that is zero outside of some rows: the values (n, d) of the rows `ids` (n,).

    Ids ascend and do not repeat. With a `block` they are (blocks, k), and values (blocks, k, d);
    see `ops.rowupdate`.
    """

    values: Tensor
    ids: Tensor
    block: int = 0


Gradient = Tensor | Rows


def row_gradients(
    graph: Graph, optimizer: Optimizer, gradients: dict[Variable, Tensor]
) -> tuple[dict[Variable, Gradient], tuple[str, ...]]:
    """The gradients, of rows where that is what the update takes; and remarks for the user."""
    found: dict[Variable, Gradient] = {}
    remarks = []
    every = [node for node in graph.nodes if isinstance(node.op, Lookup)]
    for variable, gradient in gradients.items():
        found[variable] = gradient
        lookups = [node for node in every if _reads(node, variable)]
        if not lookups:
            continue
        parts = _parts(gradient)
        sparse, remark = _decide(graph, optimizer, variable, lookups, parts)
        if sparse:
            with graph.scope(f"grad/{variable.name}", variable.tensor.where):
                found[variable] = _rows(graph, parts, variable.tensor.shape[0])
        if remark:
            remarks.append(f"{variable.name}: {remark}")
    return found, tuple(remarks)


def _reads(node: Node, variable: Variable) -> bool:
    return isinstance(node.op, Lookup) and node.inputs[0] is variable.tensor


def _parts(gradient: Tensor) -> tuple[Node, ...]:
    """The lookups' gradients that add up to this one; none if anything else has a share in it."""
    node = gradient.node
    if node is not None and isinstance(node.op, RowGradient):
        return (node,)
    if node is None or not isinstance(node.op, Add):
        return ()
    first, second = (_parts(tensor) for tensor in node.inputs)
    alike = first and second and not any(isinstance(n.op, TakeRowsGrad) for n in first + second)
    return first + second if alike else ()


def _decide(
    graph: Graph,
    optimizer: Optimizer,
    variable: Variable,
    lookups: list[Node],
    parts: tuple[Node, ...],
) -> tuple[bool, str]:
    """Whether the table is updated by rows, and a remark."""
    asked = {node.op.sparse for node in lookups}  # type: ignore[attr-defined]
    if asked >= {True, False}:
        raise JobError(
            f"table {variable.name} is looked up with sparse=True and with sparse=False; choose"
            f" one\n  {variable.tensor.where}"
        )
    refusal = _refusal(graph, optimizer, variable, parts)
    still = optimizer.drifting(optimizer.decay_of(variable))
    if True in asked:
        if refusal:
            return False, f"sparse=True has no effect, and all rows are updated: {refusal}"
        return True, _lazy(optimizer, still) if still else ""
    count, rows = sum(prod(node.inputs[1].shape) for node in parts), variable.tensor.shape[0]
    if False in asked or not parts or count >= rows:
        return False, ""  # a pair for so many lookups is no smaller than the table
    if refusal:
        return False, f"all rows are updated: {refusal}"
    if still:
        return False, (
            f"all {rows} rows are updated, since {type(optimizer).__name__} changes them by"
            f" {' and '.join(still)} even where a step looks up none; sparse=True updates the"
            f" {count} or fewer that it looks up"
        )
    return True, ""


def _lazy(optimizer: Optimizer, still: tuple[str, ...]) -> str:
    return (
        f"only rows that a step looks up are updated (sparse=True), the lazy form of"
        f" {type(optimizer).__name__}: for all others {' and '.join(still)} stand still"
    )


def _refusal(
    graph: Graph, optimizer: Optimizer, variable: Variable, parts: tuple[Node, ...]
) -> str:
    """Why the table cannot be updated by rows, if so."""
    if not parts:
        uses = [n for n in graph.nodes if variable.tensor in n.inputs and not _reads(n, variable)]
        if uses:
            return f"{uses[0].name} ({uses[0].where}) uses the table too"
        return "its gradient is not that of lookups alone"
    if not optimizer.rows:
        return f"{type(optimizer).__name__} has no update by rows"
    return "an average (ema) changes in every row" if optimizer.ema else ""


def _rows(graph: Graph, parts: tuple[Node, ...], rows: int) -> Rows:
    values, ids = zip(*(node.inputs for node in parts), strict=True)
    if isinstance(parts[0].op, TakeRowsGrad):
        return Rows(values[0], cast(ids[0], "int64"), parts[0].op.size)
    values = tuple(reshape(v, (-1, v.shape[-1])) if v.ndim != 2 else v for v in values)
    ids = tuple(reshape(i, (-1,)) if i.ndim != 1 else i for i in ids)
    before = len(graph.nodes)
    if len(parts) > 1:
        values, ids = (concat(values, 0),), (concat([cast(i, "int64") for i in ids], 0),)
    sums, order = graph.add(SumRows(rows), values[0], ids[0])
    graph.updates.update(graph.nodes[before:])
    return Rows(sums, order)
