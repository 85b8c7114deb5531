"""The choices of step 7: what layouts each node may have, and each variable and input.

An axis named `data` splits the batch, and variables are replicated over it; any other axis is free:
inputs are split by it or not, whichever is cheaper, and variables may be split by any dim.

Tables are an exception: where more rows than a step has vectors to meet them, it is the vectors
that had better travel, so `data` too may split the rows (and what has a number for each of them).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import product
from math import prod

from mpiflow.compiler import boxing
from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.owners import are_owned, is_message, owner_axes
from mpiflow.compiler.zero import of_variables
from mpiflow.errors import CompileError, SbpError
from mpiflow.graph.graph import Graph, Hint, Node, Variable
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.rule import Signature
from mpiflow.graph.sbp import B, Layout, Partial, S, Sbp, layout_text
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.matmul import Linear
from mpiflow.ops.rows import Lookup, SumRows
from mpiflow.ops.rowupdate import RowUpdate

DATA = "data"


@dataclass(frozen=True, slots=True)
class Choice:
    """The layouts of a node's inputs and outputs, or of a source's one output."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(layout_text, x)) for x in (self.inputs, self.outputs))
        return f"{inputs} -> {outputs}".lstrip()


class Domains:
    """Lists the choices for a graph on a mesh.

    `variables` fixes the layouts that another program has chosen, and `timing` what everything is
    on the axis of time. Variables named in `split` are split over the axis `data`, those named in
    `free` may be.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        variables: dict[str, Layout] | None = None,
        timing: Timing | None = None,
        split: Set[str] = frozenset(),
        free: Set[str] = frozenset(),
    ) -> None:
        self.graph, self.mesh, self.fixed, self.timing = graph, mesh, variables, timing
        self.split, self.free = split, free
        self.table_rows = table_rows(graph) | self._split_rows()
        self.blocks = block_rows(graph)
        hints = [*graph.hints.values(), *(v.hint for v in graph.variables.values())]
        # A hint for all axes, or for this one, may ask for any split over it; so does ZeRO.
        self.hinted = bool(split) or any(
            h is not None and (not isinstance(h, dict) or DATA in h) for h in hints
        )
        self.of_weights = of_weights(graph) if free else frozenset()
        self._variables: dict[object, list[Choice]] = {}

    def _split_rows(self) -> set[int]:
        """The rows of what another program has chosen to split over the axis `data`."""
        if self.fixed is None or DATA not in self.mesh.names:
            return set()
        axis = self.mesh.index(DATA)
        return {
            variable.tensor.shape[0]
            for name, variable in self.graph.variables.items()
            if name in self.fixed
            for sbp in [self.fixed[name][axis]]
            if isinstance(sbp, S) and sbp.dim == 0
        }

    def of_inputs(self) -> list[tuple[tuple[Tensor, ...], list[Choice]]]:
        """The inputs that are split together, and how.

        Split by the first dim, over any free axes; what `data` and time split is the batch. A rank
        reads the same rows of all fields: they are split alike, but for hints.
        """
        inputs = self.graph.inputs.values()
        free = tuple(t for t in inputs if t.name not in self.graph.hints)
        per_axis: list[tuple[Sbp, ...]] = []
        for axis, (name, size) in enumerate(self.mesh.axes):
            split = (S(0),) if name == DATA or axis < self.mesh.timed else (B, S(0))
            per_axis.append(split if size > 1 else (B,))
        found = [(free, [Choice((), (layout,) * len(free)) for layout in product(*per_axis)])]
        for tensor in inputs:
            if tensor not in free:
                layout = self._stored(self.graph.hints[tensor.name], tensor)
                found.append(((tensor,), [Choice((), (layout,))]))
        return found

    def of_variable(self, variable: Variable) -> list[Choice]:
        """How a variable may be stored: one list for all that may be stored the same ways."""
        tensor, name = variable.tensor, variable.name
        if self.fixed is not None:
            if name not in self.fixed:
                raise CompileError(
                    f"{self.graph.name} uses variable {name}, which training does not have"
                    f"\n  {tensor.where}"
                )
            return self._stored_as((self.fixed[name],))
        if variable.hint is not None:
            return self._stored_as(tuple(self._of_hint(tensor, variable.hint)))
        key = tensor.shape, name in self.free, name in self.split, self.blocks.get(tensor)
        if key not in self._variables:
            self._variables[key] = self._stored_as(self._without_hint(tensor))
        return self._variables[key]

    def _stored_as(self, layouts: tuple[Layout, ...]) -> list[Choice]:
        """The choices of a variable that may have these layouts."""
        return self._variables.setdefault(layouts, [Choice((), (layout,)) for layout in layouts])

    def _without_hint(self, tensor: Tensor) -> tuple[Layout, ...]:
        per_axis: list[list[Sbp]] = []
        for axis, (name, size) in enumerate(self.mesh.axes):
            splits: list[Sbp] = [S(dim) for dim, n in enumerate(tensor.shape) if n >= size]
            blocks = [S(0, self.blocks[tensor])] if tensor in self.blocks else []
            if size == 1 or axis < self.mesh.timed:
                per_axis.append([B])
            elif name != DATA or tensor.name in self.free:
                per_axis.append([B, *splits, *blocks])
            elif tensor.name in self.split:
                per_axis.append(splits or [B])
            else:
                is_table = bool(tensor.shape) and tensor.shape[0] in self.table_rows
                per_axis.append([B, S(0), *blocks] if is_table else [B])
        layouts = [x for x in product(*per_axis) if boxing.is_legal(x, tensor.shape, self.mesh)]
        layouts = [boxing.without_units(x, tensor.shape, self.mesh) for x in layouts]
        return tuple(dict.fromkeys(layouts))

    def _of_hint(self, tensor: Tensor, hint: Hint) -> list[Layout]:
        """The layouts of a hint; one that names axes leaves it to ZeRO to split over `data`."""
        layout = self._stored(hint, tensor)
        if tensor.name not in self.split or not isinstance(hint, dict) or DATA in hint:
            return [layout]
        if DATA not in self.mesh.names:
            return [layout]
        axis = self.mesh.index(DATA)
        units = {sbp.dim: sbp.unit for sbp in layout if isinstance(sbp, S)}
        size = self.mesh.sizes[axis]
        splits = [S(dim, units.get(dim, 1)) for dim, n in enumerate(tensor.shape) if n >= size > 1]
        found = [(*layout[:axis], split, *layout[axis + 1 :]) for split in splits]
        return [x for x in found if boxing.is_legal(x, tensor.shape, self.mesh)] or [layout]

    def of_node(self, node: Node) -> list[Choice]:
        """The combinations of a node's signatures on each axis that its tensors can have."""
        shapes = tuple(t.shape for t in node.inputs)
        signatures = node.op.signatures(shapes, tuple(t.dtype for t in node.inputs))
        owned = node.op.by_owner(shapes) if self._rows_travel(node) else ()
        in_time = self.in_time(node)
        per_axis = [
            (*self._on_axis(axis, node, signatures), *(owned if size > 1 else ()))
            for axis, size in enumerate(self.mesh.sizes)
        ]
        if in_time is not None:
            per_axis[0] = (in_time,)
        hint, wanted = self.graph.hints.get(node.outputs[0].name), None
        if hint is not None:
            parts = in_time.outputs[0] if in_time else B
            wanted = hinted(hint, self.mesh, node.outputs[0], parts)
        domain = []
        for combination in product(*per_axis):
            choice = Choice(
                tuple(
                    self._layout(tensor, [signature.inputs[i] for signature in combination])
                    for i, tensor in enumerate(node.inputs)
                ),
                tuple(
                    self._layout(tensor, [signature.outputs[i] for signature in combination])
                    for i, tensor in enumerate(node.outputs)
                ),
            )
            if self._is_legal(node, choice) and (wanted is None or choice.outputs[0] == wanted):
                domain.append(choice)
        if not domain:
            raise SbpError(
                f"{node.name}: no signature of {node.op.name} gives the layout {wanted} that is"
                f" hinted\n  {node.where}"
            )
        return domain

    def _rows_travel(self, node: Node) -> bool:
        """Whether rows may be sent to those that have them; not in a loop over micro-batches."""
        given = (t.node for t in node.inputs if t.node is not None)
        summed = any(isinstance(before.op, SumRows) for before in given)
        return not self.mesh.timed and (summed or is_message(node.op))

    def in_time(self, node: Node) -> Signature | None:
        """What a node does on the axis of time."""
        return self.timing.signatures[node] if self.timing else None

    def _stored(self, hint: Hint, tensor: Tensor) -> Layout:
        """What a hint asks for an input or a variable, which hold values, never parts of sums."""
        in_time = self.timing.sources[tensor] if self.timing else B
        layout = hinted(hint, self.mesh, tensor, in_time)
        if any(isinstance(sbp, Partial) for sbp in layout):
            raise SbpError(f"{tensor.name} is stored, so it cannot be {hint}\n  {tensor.where}")
        return layout

    def _on_axis(
        self, axis: int, node: Node, signatures: tuple[Signature, ...]
    ) -> tuple[Signature, ...]:
        """The signatures to consider on an axis.

        What the `data` axis splits is the batch, the first dim, and the rows of tables. Without
        hints that say otherwise its other splits are left out, which keeps the choice on two axes
        small, but for nodes that work on weights which it may split.
        """
        name, size = self.mesh.axes[axis]
        if size == 1:
            return signatures[:1]
        only = len(self.mesh.axes) - self.mesh.timed == 1
        if name != DATA or only or self.hinted or node in self.of_weights:
            return signatures
        tensors = (*node.inputs, *node.outputs)
        return tuple(
            signature
            for signature in signatures
            if all(
                not isinstance(sbp, S) or sbp.dim == 0 or tensor.shape[sbp.dim] in self.table_rows
                for tensor, sbp in zip(tensors, signature.inputs + signature.outputs, strict=True)
            )
        )

    def _layout(self, tensor: Tensor, sbps: list[Sbp]) -> Layout:
        return boxing.without_units(tuple(sbps), tensor.shape, self.mesh)

    def _is_legal(self, node: Node, choice: Choice) -> bool:
        pairs = zip((*node.inputs, *node.outputs), (*choice.inputs, *choice.outputs), strict=True)
        if not all(boxing.is_legal(layout, t.shape, self.mesh) for t, layout in pairs):
            return False
        axes = owner_axes(node, choice.inputs, choice.outputs)
        return not axes or are_owned(node.op, axes, choice.inputs, choice.outputs)


def of_weights(graph: Graph) -> set[Node]:
    """The nodes that work on weights and gradients alone: casts, and what the optimizer does."""
    given = of_variables(graph)
    first = next((i for i, node in enumerate(graph.nodes) if node in graph.updates), None)
    updates = set() if first is None else set(graph.nodes[first:])
    return {n for n in graph.live() if n in updates or (n.inputs and given.issuperset(n.inputs))}


def hinted(hint: Hint, mesh: Mesh, tensor: Tensor, in_time: Sbp = B) -> Layout:
    """The layout that a hint asks for: one SBP for every axis, or by axis name with B elsewhere.

    An axis that this mesh does not have is passed over: one program serves all meshes. On that of
    time a tensor is what `in_time` says.
    """
    if isinstance(hint, dict):
        layout = tuple(hint.get(name, B) for name in mesh.names)
    else:
        layout = (hint,) * len(mesh.axes)
    layout = tuple(sbp if size > 1 else B for sbp, size in zip(layout, mesh.sizes, strict=True))
    layout = (in_time, *layout[1:]) if mesh.timed else layout
    if not boxing.is_legal(layout, tensor.shape, mesh):
        raise SbpError(f"{tensor.name}: shape {tensor.shape} cannot be {hint}\n  {tensor.where}")
    return boxing.without_units(layout, tensor.shape, mesh)


def block_rows(graph: Graph) -> dict[Tensor, int]:
    """The rows of a block, by each table that is updated by rows in whole blocks."""
    return {
        tensor: node.op.block
        for node in graph.nodes
        if isinstance(node.op, RowUpdate) and node.op.block
        for tensor in node.inputs
        if tensor.shape == node.inputs[0].shape
    }


def table_rows(graph: Graph) -> set[int]:
    """The rows of tables that are larger than all that a step looks up or compares with them.

    To split the classes of a loss moves fewer bytes than to add up gradients where there are more
    classes than rows in the batch. What a tensor is used for first says whether it is a table: the
    gradient of any layer is a product with its transposed weight.
    """
    found: set[int] = set()
    seen: set[Tensor] = set()
    for node in graph.nodes:
        if isinstance(node.op, Lookup):
            table, vectors = node.inputs[0], prod(node.inputs[1].shape)
        elif isinstance(node.op, Linear) and node.op.transpose:
            table, vectors = node.inputs[1], prod(node.inputs[0].shape[:-1])
        else:
            table, vectors = None, 0
        if table is not None and table not in seen and table.shape[0] > vectors:
            found.add(table.shape[0])
        seen.update(node.inputs)
    return found
