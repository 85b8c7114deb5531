"""Step 7: choose the signature of every node and the layout of every variable, jointly.

The choice minimises predicted seconds: kernels on their local shapes, plus the conversions
between the layouts that producers give and consumers take. It is exact for this additive model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpiflow.compiler import boxing
from mpiflow.compiler.bounds import Table
from mpiflow.compiler.cost import op_seconds
from mpiflow.compiler.domains import Choice, Domains
from mpiflow.compiler.elimination import Pairs, Solution, minimise
from mpiflow.compiler.fit import Limit, cheapest_within
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.owners import (
    as_computed,
    as_expected,
    is_message,
    message_seconds,
    owner_axes,
)
from mpiflow.compiler.zero import split_variables
from mpiflow.garbage import no_collection
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Layout, layout_text
from mpiflow.graph.tensor import Tensor

_EXPOSED = 0.3
"""The share that counts of a conversion nobody waits for soon: gradients, and scalar outputs.

They are fused into few messages, and hide behind the backward pass. What the optimizer keeps is
not among them: to gather that, only to update all of a weight everywhere, is never worth it.
"""


@dataclass(frozen=True, slots=True)
class Placed:
    """A graph with the layouts chosen for it: `choice` of each domain of the problem solved."""

    graph: Graph
    nodes: tuple[tuple[Node, Choice], ...]
    sources: dict[Tensor, Layout]
    seconds: float
    lower: float
    """No layouts take fewer seconds; as `seconds`, where these are proven to be the best."""
    problem: Problem
    choice: tuple[int, ...]
    limit: Limit | None = None
    """What they were chosen to hold at most."""

    def kernel_seconds(self) -> dict[Node, float]:
        """The predicted seconds of each node's kernel, all micro-batches together."""
        tables, first = self.problem.kernels, self.problem.first
        return {
            node: float(tables[first + i][self.choice[first + i]])
            for i, (node, _) in enumerate(self.nodes)
        }

    def __str__(self) -> str:
        lines = [f"layouts of {self.graph.name}: {self.seconds:.3e} s predicted"]
        if self.lower < self.seconds:
            lines[0] += f"; there may be some of {self.lower:.3e} s or more"
        lines += [f"  {t.name:34} {layout_text(layout)}" for t, layout in self.sources.items()]
        lines += [f"  {node.name:34} {choice}" for node, choice in self.nodes]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor whose layout is that of one domain, and which another domain takes.

    `reader` takes it as input `operand`, or as its output where that is None; a reader that is
    None is every rank, which takes all of it. `share` of the seconds of the conversion count.
    """

    tensor: Tensor
    reader: int | None
    operand: int | None
    share: float


@dataclass(frozen=True, slots=True)
class Problem:
    """What `choose` minimises: a choice from each domain, by their seconds and those of pairs.

    The domains are those of the inputs, the variables, and from `first` on the live nodes.
    """

    choices: Domains
    machine: Machine
    graph: Graph
    domains: list[list[Choice]]
    kernels: list[Table]
    """The seconds of the kernels of each choice, all micro-batches together."""
    unary: list[Table]
    """These, and those of conversions that depend on one choice alone."""
    pairs: Pairs
    """The seconds of conversions, by the choices of two domains."""
    edges: tuple[Edge, ...]
    """The conversions that `unary` and `pairs` are the seconds of."""
    position: dict[Tensor, tuple[int, int]]
    """The domain that a tensor belongs to, and which of its outputs it is."""
    nodes: tuple[Node, ...]

    @property
    def first(self) -> int:
        """The domain of the first node."""
        return len(self.domains) - len(self.nodes)

    def placed(self, best: Solution) -> Placed:
        """The graph with a solution's layouts."""
        picked = [domain[i] for domain, i in zip(self.domains, best.choice, strict=True)]
        variables = (v.tensor for v in self.graph.variables.values())
        sources = {
            t: picked[index].outputs[i]
            for t in (*self.graph.inputs.values(), *variables)
            for index, i in [self.position[t]]
        }
        nodes = tuple(zip(self.nodes, picked[self.first :], strict=True))
        return Placed(self.graph, nodes, sources, best.total, best.lower, self, best.choice)


@no_collection()
def choose(
    graph: Graph,
    mesh: Mesh,
    machine: Machine,
    variables: dict[str, Layout] | None = None,
    timing: Timing | None = None,
    zero: int = 0,
    limit: Limit | None = None,
) -> Placed:
    """The cheapest layouts; `variables` fixes those that another program has chosen.

    `timing` fixes what everything is on the axis of time, where the mesh has one. By the level of
    `zero`, some variables are split over the axis `data`. Raises CompileError where no layouts
    keep the `limit`, see `fit.TooLarge`.
    """
    split = split_variables(graph, zero)
    free = split_variables(graph, 3) if limit and limit.free else set()
    problem = pose(Domains(graph, mesh, variables, timing, split, free), machine)
    if limit is None:
        return problem.placed(minimise(problem.unary, problem.pairs))
    held = limit.budget(problem)
    best = cheapest_within(problem, held, limit.nbytes)
    return replace(problem.placed(best), limit=limit)


def pose(domains: Domains, machine: Machine) -> Problem:
    """The problem of a graph's choices, with prices."""
    return _Pricing(domains, machine).problem()


class _Pricing:
    """Collects the domains, and the tables of their seconds."""

    def __init__(self, choices: Domains, machine: Machine) -> None:
        self.choices, self.machine = choices, machine
        self.graph, self.mesh, self.timing = choices.graph, choices.mesh, choices.timing
        # A mean is summed over the ranks before it is scaled, so that a count is exact on any.
        self.values = {*self.graph.assigns.values(), *self.graph.outputs.values()}
        self.variables = {variable.tensor for variable in self.graph.variables.values()}
        self.domains: list[list[Choice]] = []
        # Repeated layers ask the same again: domains by (op, shapes, dtypes), prices beside them.
        self.known: dict[Any, tuple[list[Choice], Table]] = {}
        self.tables: dict[Any, Table] = {}
        self.position: dict[Tensor, tuple[int, int]] = {}
        self.pairs: Pairs = {}
        self.edges: list[Edge] = []

    def problem(self) -> Problem:
        nodes = tuple(self.graph.live())
        for tensors, domain in self.choices.of_inputs():
            self._place(tensors, domain)
        for variable in self.graph.variables.values():
            self._place((variable.tensor,), self.choices.of_variable(variable))
        kernels = [np.zeros(len(domain)) for domain in self.domains]
        for node in nodes:
            domain, seconds = self._priced_domain(node)
            self._place(node.outputs, domain)
            kernels.append(seconds)
        unary = [seconds.copy() for seconds in kernels]
        for index, node in enumerate(nodes, len(self.domains) - len(nodes)):
            self._input_edges(index, node)
        self._output_costs(unary)
        self._assign_edges(unary)
        return Problem(
            self.choices, self.machine, self.graph, self.domains, kernels, unary, self.pairs,
            tuple(self.edges), self.position, nodes,
        )  # fmt: skip

    def _place(self, outputs: tuple[Tensor, ...], domain: list[Choice]) -> None:
        for i, tensor in enumerate(outputs):
            self.position[tensor] = (len(self.domains), i)
        self.domains.append(domain)

    def _priced_domain(self, node: Node) -> tuple[list[Choice], Table]:
        """The choices of a node, and the seconds of each."""
        hint = self.graph.hints.get(node.outputs[0].name)
        shapes = tuple((t.shape, t.dtype) for t in node.inputs)
        key = (
            node.op, shapes, repr(hint), self.choices.in_time(node),
            node in self.choices.of_weights,
        )  # fmt: skip
        if key not in self.known:
            domain = self.choices.of_node(node)
            times = self.mesh.micro_batches if self._fires_in_loop(node) else 1
            self.known[key] = domain, np.array([self._seconds(node, c) * times for c in domain])
        return self.known[key]

    def _fires_in_loop(self, node: Node) -> bool:
        return self.timing is not None and bool(self.timing.loops[node])

    def _seconds(self, node: Node, choice: Choice) -> float:
        axes = owner_axes(node, choice.inputs, choice.outputs)
        given = as_computed(node, choice.inputs, axes)
        tensors = (*node.inputs, *node.outputs)
        expected = as_expected(node.op, given, choice.outputs)
        shapes = tuple(
            boxing.local_shape(t.shape, layout, self.mesh)
            for t, layout in zip(tensors, expected, strict=True)
        )
        inputs, outputs = shapes[: len(node.inputs)], shapes[len(node.inputs) :]
        dtypes = tuple(t.dtype for t in tensors)
        seconds = op_seconds(self.machine, node.op, inputs, outputs, dtypes)
        if axes and is_message(node.op):
            share = _EXPOSED if node in self.graph.updates else 1.0
            seconds += message_seconds(
                self.machine, node, choice.inputs, choice.outputs, self.mesh, axes, share
            )
        return seconds

    def _convert(
        self, tensor: Tensor, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> Table:
        """Seconds to convert a tensor, by source and target."""
        shape, dtype = tensor.shape, tensor.dtype
        return boxing.prices(sources, targets, shape, dtype, self.mesh, self.machine)

    def _table(self, edge: Edge) -> Table:
        """The seconds of a conversion that count, by choice of its producer and of its reader."""
        assert edge.reader is not None
        tensor, operand = edge.tensor, edge.operand
        producer, output = self.position[tensor]
        sources, targets = self.domains[producer], self.domains[edge.reader]
        key = (id(sources), output, id(targets), operand, tensor.shape, tensor.dtype, edge.share)
        if key not in self.tables:
            given = tuple(s.outputs[output] for s in sources)
            wanted = tuple(t.outputs[0] if operand is None else t.inputs[operand] for t in targets)
            alike = (given, wanted, *key[4:])  # of other operands, which are taken the same way
            if alike not in self.tables:
                self.tables[alike] = edge.share * self._convert(tensor, given, wanted)
            self.tables[key] = self.tables[alike]
        return self.tables[key]

    def _input_edges(self, index: int, node: Node) -> None:
        updates = node in self.graph.updates or not self.values.isdisjoint(node.outputs)
        for i, tensor in enumerate(node.inputs):
            share = _EXPOSED if updates and tensor not in self.variables else 1.0
            edge = Edge(tensor, index, i, share)
            self.edges.append(edge)
            self._add_pair(self.position[tensor][0], index, self._table(edge))

    def _output_costs(self, unary: list[Table]) -> None:
        """Scalars end on every rank, what has a value for each row with the rows of the input."""
        everywhere = (B,) * len(self.mesh.axes)
        for tensor in self.graph.outputs.values():
            producer, output = self.position[tensor]
            given = [choice.outputs[output] for choice in self.domains[producer]]
            if tensor.shape and self.graph.inputs:
                rows = self.position[next(iter(self.graph.inputs.values()))][0]
                wanted = [choice.outputs[0] for choice in self.domains[rows]]
                self.edges.append(Edge(tensor, rows, None, _EXPOSED))
                self._add_pair(producer, rows, _EXPOSED * self._convert(tensor, given, wanted))
            else:
                self.edges.append(Edge(tensor, None, None, _EXPOSED))
                unary[producer] += _EXPOSED * self._convert(tensor, given, [everywhere])[:, 0]

    def _assign_edges(self, unary: list[Table]) -> None:
        for name, value in self.graph.assigns.items():
            variable = self.position[self.graph.variables[name].tensor][0]
            producer = self.position[value][0]
            edge = Edge(value, variable, None, 1.0)
            self.edges.append(edge)
            table = self._table(edge)
            if producer == variable:
                unary[producer] += table.diagonal()
            else:
                self._add_pair(producer, variable, table)

    def _add_pair(self, a: int, b: int, table: Table) -> None:
        key, table = ((a, b), table) if a < b else ((b, a), table.T)
        self.pairs[key] = self.pairs[key] + table if key in self.pairs else table
