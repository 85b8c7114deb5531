"""What a model is made of, without weights, files or ranks: parameters and operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from mpiflow.graph.graph import Graph, building
from mpiflow.graph.tensor import Tensor

Fields = Mapping[str, tuple[tuple[int, ...], str]]


def traced(
    model: Callable[[dict[str, Tensor]], object],
    fields: Fields,
    *,
    rows: int = 1,
    training: bool = True,
) -> Graph:
    """The graph of a model function on `rows` rows of fields (name -> row shape, dtype)."""
    graph = Graph("model", training=training)
    with building(graph):
        model({name: graph.input(name, (rows, *s), dtype) for name, (s, dtype) in fields.items()})
    return graph


def parameters(graph: Graph) -> int:
    """How many numbers are trained."""
    return sum(prod(v.tensor.shape) for v in graph.variables.values() if v.trainable)


def flops(graph: Graph) -> int:
    """Operations of all nodes; a multiply-add counts as two."""
    return sum(
        node.op.flops(tuple(t.shape for t in node.inputs), tuple(t.shape for t in node.outputs))
        for node in graph.nodes
    )
