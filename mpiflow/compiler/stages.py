"""Step 6: which nodes run on which pipeline stage.

The model is a list of nodes, cut into as many pieces as there are *chunks*: one for each stage, or
several with virtual stages, where chunk c is on stage c modulo the number of stages.

    cut       forward nodes that need both the batch and a variable    a piece of the list
    follow    nodes of the backward pass                               as what they differentiate
              updates                                                  as their variable
    shared    all others: masks, casts of weights, learning rates      as those who need them

What is shared is computed on each stage that needs it, rather than sent. A variable is on every
stage that reads it: tied weights are kept, and updated alike, on several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpiflow.compiler.budget import Share
from mpiflow.compiler.cuts import Room, crossing_bytes, ends, pinned_pieces
from mpiflow.compiler.forward import forward_nodes, needing_both
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.compiler.signature import Placed
from mpiflow.errors import CompileError
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.gradnorm import SumScalars

Chunks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """The chunks of every live node and of every variable, in ascending order."""

    count: int
    stages: int
    nodes: dict[Node, Chunks]
    variables: dict[Tensor, Chunks]
    seconds: tuple[float, ...]
    """Predicted for the kernels of each chunk, all micro-batches together."""

    def stage(self, chunk: int) -> int:
        """The stage of a chunk."""
        return chunk % self.stages

    def first(self, chunks: Chunks) -> int:
        """The first of the stages that have these chunks."""
        return min(map(self.stage, chunks))

    def of(self, tensor: Tensor) -> Chunks:
        """The chunks where a tensor is made, or kept; none for an input, which any may read."""
        if tensor.node is not None:
            return self.nodes[tensor.node]
        return self.variables.get(tensor, ())

    def on(self, node: Node, stage: int) -> bool:
        """Whether a node runs on a stage."""
        return any(self.stage(chunk) == stage for chunk in self.nodes[node])

    def __str__(self) -> str:
        lines = [f"{self.count} pieces on {self.stages} stages"]
        for chunk, seconds in enumerate(self.seconds):
            nodes = [n.name for n, chunks in self.nodes.items() if chunks == (chunk,)]
            ends = f"{nodes[0]} .. {nodes[-1]}" if nodes else "nothing of its own"
            lines.append(
                f"  piece {chunk} on stage {self.stage(chunk)}: {len(nodes)} nodes, {ends},"
                f" {seconds:.3e} s"
            )
        return "\n".join(lines)


def part(placed: Placed, stages: Stages, stage: int) -> Placed:
    """What a stage does of a graph: its nodes, the variables and the fields that they read."""
    graph = placed.graph
    nodes = tuple((n, choice) for n, choice in placed.nodes if stages.on(n, stage))
    read = {tensor for node, _ in nodes for tensor in node.inputs}
    variables = {
        name: v
        for name, v in graph.variables.items()
        if any(stages.stage(chunk) == stage for chunk in stages.variables[v.tensor])
    }
    mine = replace(
        graph,
        nodes=[node for node, _ in nodes],
        inputs={name: tensor for name, tensor in graph.inputs.items() if tensor in read},
        variables=variables,
        assigns={name: value for name, value in graph.assigns.items() if name in variables},
    )
    kept = {*mine.inputs.values(), *(v.tensor for v in variables.values())}
    sources = {tensor: layout for tensor, layout in placed.sources.items() if tensor in kept}
    return replace(placed, graph=mine, nodes=nodes, sources=sources)


def shares_of(
    stages: Stages, pipeline: Pipeline, count: int, chosen: Sequence[int]
) -> tuple[Share, ...]:
    """What the `chosen` stages have of a graph, and how much of `count` micro-batches at once."""
    return tuple(
        Share(
            frozenset(node for node in stages.nodes if stages.on(node, stage)),
            frozenset(
                tensor
                for tensor, chunks in stages.variables.items()
                if any(stages.stage(chunk) == stage for chunk in chunks)
            ),
            pipeline.alive(stage, stages.stages, count),
        )
        for stage in chosen
    )


def assign_stages(
    graph: Graph,
    seconds: Sequence[dict[Node, float]],
    virtual: int = 1,
    rooms: Sequence[Room] = (),
) -> Stages:
    """Cut a graph so that the longest piece is as short as can be; `seconds` are of kernels.

    Each stage has seconds of its own: it may have more ranks than another. What `mf.stage` pins
    stays where it is pinned. Of cuts about equally good, those that send the least are taken.
    `rooms` say what fits each stage, where that is limited. CompileError where there are fewer
    nodes than pieces, or pins contradict, or no cut fits.
    """
    stages = len(seconds)
    count = stages * virtual
    nodes = _cut_nodes(graph)
    if len(nodes) < count:
        raise CompileError(
            f"the model has {len(nodes)} nodes that depend on the batch and on variables; they"
            f" cannot be cut into {count} pieces, use fewer stages"
        )
    known = {id(each): _with_backward(graph, nodes, each) for each in seconds}
    own = [known[id(each)] for each in seconds]
    spent = [np.array(list(own[c % stages].values())) for c in range(count)]
    each = [Room(r.nbytes, r.limit / virtual) for r in rooms] * virtual
    cut = ends(spent, crossing_bytes(nodes), pinned_pieces(graph, nodes, count), each)
    if cut is None:
        held = "what stages may hold, and " if rooms else ""
        raise CompileError(
            f"{held}the nodes pinned with mf.stage leave no way to cut the model into {count}"
            " pieces"
        )
    chunks = {node: c for c in range(count) for node in nodes[cut[c] : cut[c + 1]]}
    return _Spread(graph, chunks, {}).stages(
        count, stages, {node: own[c % stages][node] for node, c in chunks.items()}
    )


def node_by_node(graph: Graph) -> tuple[list[Node], Stages]:
    """The nodes that are cut, in order, and what goes with each if it is a piece of its own."""
    nodes = _cut_nodes(graph)
    chunks = {node: i for i, node in enumerate(nodes)}
    return nodes, _Spread(graph, chunks, {}).stages(len(nodes), len(nodes), dict.fromkeys(nodes, 0))


def _with_backward(
    graph: Graph, nodes: list[Node], seconds: dict[Node, float]
) -> dict[Node, float]:
    """The seconds of nodes that are cut, and of what goes with them in the backward pass."""
    own = dict.fromkeys(nodes, 0.0)
    for node, spent in seconds.items():
        first = graph.origins.get(node, node)
        if first in own:
            own[first] += spent
    return own


def assign_like(graph: Graph, trained: Stages) -> Stages:
    """The chunks of another trace of a model, whose variables have theirs in training.

    A node is where the variables are that it reads, and no earlier than its inputs.
    """
    variables = {tensor.name: chunks for tensor, chunks in trained.variables.items()}
    kept = {v.tensor: variables[name] for name, v in graph.variables.items()}
    both, chunks = set(_cut_nodes(graph)), dict[Node, int]()
    reached: dict[Tensor, set[Tensor]] = {tensor: {tensor} for tensor in kept}
    for node in graph.live():
        read = set[Tensor]().union(*(reached.get(t, ()) for t in node.inputs))
        if node not in both:
            reached.update(dict.fromkeys(node.outputs, read))
            continue
        first = max((chunks[t.node] for t in node.inputs if t.node in chunks), default=0)
        where = sorted({chunk for tensor in read for chunk in kept[tensor]})
        chunks[node] = next((c for c in where if c >= first), max(where, default=first))
    spread = _Spread(graph, chunks, kept)
    return spread.stages(trained.count, trained.stages, dict.fromkeys(both, 0.0))


def assign_equally(graph: Graph, other: Stages) -> Stages:
    """The chunks of the same nodes, traced for another number of rows; CompileError for others."""
    nodes = {node.name: chunks for node, chunks in other.nodes.items()}
    variables = {tensor.name: chunks for tensor, chunks in other.variables.items()}
    for node in graph.live():
        if node.name not in nodes:
            raise CompileError(
                f"{graph.name} has {node.name}, which the model does not compute for other numbers"
                f" of rows; with pipeline stages it has to do the same for any\n  {node.where}"
            )
    return replace(
        other,
        nodes={node: nodes[node.name] for node in graph.live()},
        variables={v.tensor: variables[name] for name, v in graph.variables.items()},
    )


def _cut_nodes(graph: Graph) -> list[Node]:
    """What is cut: the forward nodes that depend on the batch and on a variable."""
    return needing_both(graph, (v.tensor for v in graph.variables.values()))


class _Spread:
    """From the chunks of the nodes that are cut to those of all nodes and variables."""

    def __init__(self, graph: Graph, cut: dict[Node, int], variables: dict[Tensor, Chunks]) -> None:
        self.graph, self.cut, self.fixed = graph, cut, variables
        self.nodes = graph.live()
        self.readers: dict[Tensor, list[Node]] = {}
        for node in self.nodes:
            for tensor in node.inputs:
                self.readers.setdefault(tensor, []).append(node)
        self.assigned: dict[Tensor, list[Tensor]] = {}
        for name, value in graph.assigns.items():
            self.assigned.setdefault(value, []).append(graph.variables[name].tensor)
        self.chunks: dict[Node, set[int]] = {node: {chunk} for node, chunk in cut.items()}
        self.variables: dict[Tensor, set[int]] = {}

    def stages(self, count: int, stages: int, seconds: dict[Node, float]) -> Stages:
        """All of it; whatever nobody needs anywhere is on the last piece."""
        forward = forward_nodes(self.graph)
        at_home = self._of_one_piece(forward)
        for node in reversed(forward):
            if node not in self.cut:
                self.chunks[node] = at_home.get(node) or self._wanted(node)
        self._place_variables()
        ahead = set(forward)
        led = self._follow([node for node in self.nodes if node not in ahead])
        placed = self.cut.keys() | led | at_home.keys()
        self._share([node for node in self.nodes if node not in placed])
        self._leave_out_unread(stages)
        spent = [0.0] * count
        for node, chunk in self.cut.items():
            spent[chunk] += seconds[node]
        last = {count - 1}
        return Stages(
            count,
            stages,
            {node: tuple(sorted(self.chunks[node] or last)) for node in self.nodes},
            {
                v.tensor: self.fixed.get(v.tensor)
                or tuple(sorted(self.variables[v.tensor] or last))
                for v in self.graph.variables.values()
            },
            tuple(spent),
        )

    def _of_one_piece(self, forward: list[Node]) -> dict[Node, set[int]]:
        """The chunk of scalars that are made of variables alone, and of what these are made of.

        If only one chunk reads the variables otherwise: so a penalty on weights, which the loss
        takes, sends a scalar and not the weights.
        """
        self._place_variables()
        home: dict[Tensor, set[int]] = dict(self.variables)
        found: dict[Node, set[int]] = {}
        for node in forward:
            if node not in self.cut and node.inputs and all(t in home for t in node.inputs):
                where = set[int]().union(*(home[t] for t in node.inputs))
                if len(where) == 1:
                    home.update(dict.fromkeys(node.outputs, where))
        wanted: set[Tensor] = set()
        for node in reversed(forward):
            if node in self.cut or any(tensor not in home for tensor in node.outputs):
                continue
            if wanted.intersection(node.outputs) or not any(t.shape for t in node.outputs):
                found[node] = home[node.outputs[0]]
                wanted.update(node.inputs)
        return found

    def _leave_out_unread(self, stages: int) -> None:
        """Let a node that is on several stages be on those only that read what it gives.

        What a tied weight adds to a norm of all is added once.
        """
        for node in reversed(self.nodes):
            chunks = self.chunks[node]
            if len(chunks) > 1:
                read = {chunk % stages for chunk in self._wanted(node)}
                self.chunks[node] = {c for c in chunks if c % stages in read} or {max(chunks)}

    def _wanted(self, node: Node) -> set[int]:
        """Where what a node gives is read, as far as that is known, or becomes a variable."""
        found: set[int] = set()
        for tensor in node.outputs:
            for reader in self.readers.get(tensor, ()):
                found |= self.chunks.get(reader, set())
            for variable in self.assigned.get(tensor, ()):
                found |= self.variables.get(variable, set())
        return found

    def _place_variables(self) -> None:
        for variable in self.graph.variables.values():
            found = set(self.fixed.get(variable.tensor, ()))
            for reader in self.readers.get(variable.tensor, ()):
                found |= self.chunks.get(reader, set())
            self.variables[variable.tensor] = found

    def _follow(self, nodes: list[Node]) -> set[Node]:
        """Place what has somebody to follow: what it differentiates, its variable, its inputs.

        A scalar is made where the last of those that it is made from is, but for a sum of some:
        the backward pass comes to the first stage last, so there it is known at once. What is made
        of one scalar alone is made wherever it is needed: only that one is sent.
        """
        led = set()
        for node in nodes:
            origin = self.graph.origins.get(node)
            known = [(t, where) for t in node.inputs if (where := self._known(t))]
            variables = [where for t, where in known if t.node is None]
            arrays = [where for t, where in known if t.shape]
            if origin is not None:
                found = self.chunks[origin]
            elif variables or arrays:
                found = (variables or arrays)[-1]
            elif known and isinstance(node.op, SumScalars):
                found = {min(min(where) for _, where in known)}
            elif len(known) == 1:
                continue
            else:
                found = {max(where) for _, where in known[-1:]}
            self.chunks[node] = set(found)
            if found:
                led.add(node)
        return led

    def _known(self, tensor: Tensor) -> set[int]:
        """Where a tensor is, if that is known already."""
        if tensor.node is None:
            return self.variables.get(tensor, set())
        return self.chunks.get(tensor.node, set())

    def _share(self, nodes: list[Node]) -> None:
        """Let the other nodes be wherever they are needed, and variables wherever they are read."""
        changed = True
        while changed:
            changed = False
            self._place_variables()
            for node in reversed(nodes):
                found = self._wanted(node)
                changed |= found != self.chunks.get(node)
                self.chunks[node] = found
