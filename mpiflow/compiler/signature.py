"""Step 7: choose the signature of every node and the layout of every variable, jointly.

The choice minimises predicted seconds: kernels on their local shapes, plus the conversions
between the layouts that producers give and consumers take. It is exact for this additive model.

An axis named `data` splits the batch, and variables are replicated over it; any other axis is free:
inputs are split by it or not, whichever is cheaper, and variables may be split by any dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mpiflow.compiler import boxing
from mpiflow.compiler.bounds import Table
from mpiflow.compiler.cost import op_seconds
from mpiflow.compiler.elimination import minimise
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.zero import split_variables
from mpiflow.errors import CompileError, SbpError
from mpiflow.graph.graph import Graph, Hint, Node, Variable
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.rule import Signature
from mpiflow.graph.sbp import B, Layout, Partial, S, Sbp, layout_text
from mpiflow.graph.tensor import Tensor

DATA = "data"
_EXPOSED = 0.3
"""The share that counts of a conversion nobody waits for soon: gradients, and scalar outputs.

They are fused into few messages, and hide behind the backward pass.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The layouts of a node's inputs and outputs, or of a source's one output."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(layout_text, x)) for x in (self.inputs, self.outputs))
        return f"{inputs} -> {outputs}".lstrip()


@dataclass(frozen=True, slots=True)
class Placed:
    """A graph with the layouts chosen for it."""

    graph: Graph
    nodes: tuple[tuple[Node, Choice], ...]
    sources: dict[Tensor, Layout]
    seconds: float
    lower: float
    """No layouts take fewer seconds; as `seconds`, where these are proven to be the best."""

    def __str__(self) -> str:
        lines = [f"layouts of {self.graph.name}: {self.seconds:.3e} s predicted"]
        if self.lower < self.seconds:
            lines[0] += f"; there may be some of {self.lower:.3e} s or more"
        lines += [f"  {t.name:34} {layout_text(layout)}" for t, layout in self.sources.items()]
        lines += [f"  {node.name:34} {choice}" for node, choice in self.nodes]
        return "\n".join(lines)


def choose(
    graph: Graph,
    mesh: Mesh,
    machine: Machine,
    variables: dict[str, Layout] | None = None,
    timing: Timing | None = None,
    zero: int = 0,
) -> Placed:
    """The cheapest layouts; `variables` fixes those that another program has chosen.

    `timing` fixes what everything is on the axis of time, where the mesh has one. By the level of
    `zero`, some variables are split over the axis `data`.
    """
    return _Solver(graph, mesh, machine, variables, timing, split_variables(graph, zero)).solve()


class _Solver:
    """Builds the tables of costs and solves them."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        machine: Machine,
        variables: dict[str, Layout] | None,
        timing: Timing | None,
        split: set[str],
    ) -> None:
        self.graph, self.mesh, self.machine = graph, mesh, machine
        self.fixed, self.timing, self.split = variables, timing, split
        self.live = graph.live()
        # A mean is summed over the ranks before it is scaled, so that a count is exact on any.
        self.values = {*graph.assigns.values(), *graph.outputs.values()}
        hints = [*graph.hints.values(), *(v.hint for v in graph.variables.values())]
        # A hint for all axes, or for this one, may ask for any split over it; so does ZeRO.
        self.hinted = bool(split) or any(
            h is not None and (not isinstance(h, dict) or DATA in h) for h in hints
        )
        self.domains: list[list[Choice]] = []
        # Repeated layers ask the same again: domains by (op, shapes, dtypes), prices beside them.
        self.known: dict[Any, tuple[list[Choice], Table]] = {}
        self.tables: dict[Any, Table] = {}
        self.position: dict[Tensor, tuple[int, int]] = {}
        self.pairs: dict[tuple[int, int], Table] = {}

    def solve(self) -> Placed:
        sources = [*self.graph.inputs.values(), *(v.tensor for v in self.graph.variables.values())]
        self._place_inputs()
        for variable in self.graph.variables.values():
            self._place((variable.tensor,), self._variable_domain(variable))
        first = len(self.domains)
        for node in self.live:
            self._place(node.outputs, self._priced_domain(node)[0])
        unary = [np.zeros(len(domain)) for domain in self.domains]
        for index, node in enumerate(self.live, first):
            unary[index] += self._priced_domain(node)[1]
            self._input_edges(index, node)
        self._output_costs(unary)
        self._assign_edges(unary)
        best = minimise(unary, self.pairs)
        picked = [domain[i] for domain, i in zip(self.domains, best.choice, strict=True)]
        return Placed(
            self.graph,
            tuple(zip(self.live, picked[first:], strict=True)),
            {t: picked[index].outputs[i] for t in sources for index, i in [self.position[t]]},
            best.total,
            best.lower,
        )

    def _place(self, outputs: tuple[Tensor, ...], domain: list[Choice]) -> None:
        for i, tensor in enumerate(outputs):
            self.position[tensor] = (len(self.domains), i)
        self.domains.append(domain)

    def _place_inputs(self) -> None:
        """Split by the first dim, over any free axes; what `data` and time split is the batch.

        A rank reads the same rows of all fields: they are split alike, but for hints.
        """
        inputs = self.graph.inputs.values()
        free = tuple(t for t in inputs if t.name not in self.graph.hints)
        per_axis: list[tuple[Sbp, ...]] = []
        for axis, (name, size) in enumerate(self.mesh.axes):
            split = (S(0),) if name == DATA or axis < self.mesh.timed else (B, S(0))
            per_axis.append(split if size > 1 else (B,))
        self._place(free, [Choice((), (layout,) * len(free)) for layout in product(*per_axis)])
        for tensor in inputs:
            if tensor not in free:
                layout = self._stored(self.graph.hints[tensor.name], tensor)
                self._place((tensor,), [Choice((), (layout,))])

    def _variable_domain(self, variable: Variable) -> list[Choice]:
        tensor = variable.tensor
        if self.fixed is not None:
            if tensor.name not in self.fixed:
                raise CompileError(
                    f"{self.graph.name} uses variable {tensor.name}, which training does not have"
                    f"\n  {tensor.where}"
                )
            return [Choice((), (self.fixed[tensor.name],))]
        if variable.hint is not None:
            return [Choice((), (self._stored(variable.hint, tensor),))]
        per_axis: list[list[Sbp]] = []
        for axis, (name, size) in enumerate(self.mesh.axes):
            splits: list[Sbp] = [S(dim) for dim, n in enumerate(tensor.shape) if n >= size]
            if (
                size == 1
                or axis < self.mesh.timed
                or (name == DATA and tensor.name not in self.split)
            ):
                per_axis.append([B])
            elif name == DATA:
                per_axis.append(splits or [B])
            else:
                per_axis.append([B, *splits])
        layouts = [x for x in product(*per_axis) if boxing.is_legal(x, tensor.shape, self.mesh)]
        return [Choice((), (layout,)) for layout in layouts]

    def _priced_domain(self, node: Node) -> tuple[list[Choice], Table]:
        """The choices of a node, and the seconds of each."""
        hint = self.graph.hints.get(node.outputs[0].name)
        shapes = tuple((t.shape, t.dtype) for t in node.inputs)
        key = (node.op, shapes, repr(hint), self._in_time(node))
        if key not in self.known:
            domain = self._node_domain(node)
            times = self.mesh.micro_batches if self._fires_in_loop(node) else 1
            self.known[key] = domain, np.array([self._seconds(node, c) * times for c in domain])
        return self.known[key]

    def _in_time(self, node: Node) -> Signature | None:
        return self.timing.signatures[node] if self.timing else None

    def _fires_in_loop(self, node: Node) -> bool:
        return self.timing is not None and bool(self.timing.loops[node])

    def _stored(self, hint: Hint, tensor: Tensor) -> Layout:
        """What a hint asks for an input or a variable, which hold values, never parts of sums."""
        in_time = self.timing.sources[tensor] if self.timing else B
        layout = hinted(hint, self.mesh, tensor, in_time)
        if any(isinstance(sbp, Partial) for sbp in layout):
            raise SbpError(f"{tensor.name} is stored, so it cannot be {hint}\n  {tensor.where}")
        return layout

    def _on_axis(self, axis: int, signatures: tuple[Signature, ...]) -> tuple[Signature, ...]:
        """The signatures to consider on an axis.

        What the `data` axis splits is the batch, the first dim. Without hints that say otherwise
        its other splits are left out, which keeps the choice on two axes small.
        """
        name, size = self.mesh.axes[axis]
        if size == 1:
            return signatures[:1]
        if name != DATA or len(self.mesh.axes) - self.mesh.timed == 1 or self.hinted:
            return signatures
        return tuple(
            signature
            for signature in signatures
            if all(not isinstance(x, S) or x.dim == 0 for x in signature.inputs + signature.outputs)
        )

    def _node_domain(self, node: Node) -> list[Choice]:
        signatures = node.op.signatures(
            tuple(t.shape for t in node.inputs), tuple(t.dtype for t in node.inputs)
        )
        in_time = self._in_time(node)
        per_axis = [self._on_axis(axis, signatures) for axis in range(len(self.mesh.axes))]
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

    def _layout(self, tensor: Tensor, sbps: list[Sbp]) -> Layout:
        return boxing.without_units(tuple(sbps), tensor.shape, self.mesh)

    def _is_legal(self, node: Node, choice: Choice) -> bool:
        pairs = zip((*node.inputs, *node.outputs), (*choice.inputs, *choice.outputs), strict=True)
        return all(boxing.is_legal(layout, t.shape, self.mesh) for t, layout in pairs)

    def _seconds(self, node: Node, choice: Choice) -> float:
        inputs, outputs = (
            tuple(
                boxing.local_shape(t.shape, layout, self.mesh)
                for t, layout in zip(tensors, layouts, strict=True)
            )
            for tensors, layouts in ((node.inputs, choice.inputs), (node.outputs, choice.outputs))
        )
        dtypes = tuple(t.dtype for t in (*node.inputs, *node.outputs))
        return op_seconds(self.machine, node.op, inputs, outputs, dtypes)

    def _convert(self, tensor: Tensor, sources: list[Layout], targets: list[Layout]) -> Table:
        """Seconds to convert a tensor, by source and target."""
        shape, dtype = tensor.shape, tensor.dtype
        return boxing.prices(sources, targets, shape, dtype, self.mesh, self.machine)

    def _table(self, tensor: Tensor, consumer: int, operand: int | None) -> Table:
        """Seconds to convert a tensor, by choice of its producer and of a consumer.

        The consumer takes it as input `operand`; if that is None, it is a variable that becomes it.
        """
        producer, output = self.position[tensor]
        sources, targets = self.domains[producer], self.domains[consumer]
        key = (id(sources), output, id(targets), operand, tensor.shape, tensor.dtype)
        if key not in self.tables:
            given = [s.outputs[output] for s in sources]
            wanted = [t.outputs[0] if operand is None else t.inputs[operand] for t in targets]
            self.tables[key] = self._convert(tensor, given, wanted)
        return self.tables[key]

    def _input_edges(self, index: int, node: Node) -> None:
        updates = node in self.graph.updates or not self.values.isdisjoint(node.outputs)
        for i, tensor in enumerate(node.inputs):
            table = self._table(tensor, index, i)
            self._add_pair(self.position[tensor][0], index, table * (_EXPOSED if updates else 1.0))

    def _output_costs(self, unary: list[Table]) -> None:
        """Scalars end on every rank, what has a value for each row with the rows of the input."""
        everywhere = (B,) * len(self.mesh.axes)
        for tensor in self.graph.outputs.values():
            producer, output = self.position[tensor]
            given = [choice.outputs[output] for choice in self.domains[producer]]
            if tensor.shape and self.graph.inputs:
                rows = self.position[next(iter(self.graph.inputs.values()))][0]
                wanted = [choice.outputs[0] for choice in self.domains[rows]]
                self._add_pair(producer, rows, _EXPOSED * self._convert(tensor, given, wanted))
            else:
                unary[producer] += _EXPOSED * self._convert(tensor, given, [everywhere])[:, 0]

    def _assign_edges(self, unary: list[Table]) -> None:
        for name, value in self.graph.assigns.items():
            variable = self.position[self.graph.variables[name].tensor][0]
            producer = self.position[value][0]
            table = self._table(value, variable, None)
            if producer == variable:
                unary[producer] += table.diagonal()
            else:
                self._add_pair(producer, variable, table)

    def _add_pair(self, a: int, b: int, table: Table) -> None:
        key, table = ((a, b), table) if a < b else ((b, a), table.T)
        self.pairs[key] = self.pairs[key] + table if key in self.pairs else table


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
