"""The forward pass of a training graph, and what of it is the model proper."""

from __future__ import annotations

from collections.abc import Iterable

from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.tensor import Tensor


def forward_nodes(graph: Graph) -> list[Node]:
    """The nodes before the first of the backward pass that are live, or lead the way for some.

    Of what is differentiated the value itself may be of no use, as that of a scaled loss.
    """
    live = graph.live()
    used = {*live, *(graph.origins[node] for node in live if node in graph.origins)}
    nodes = [node for node in graph.nodes if node in used]
    first = next((i for i, node in enumerate(nodes) if node in graph.origins), len(nodes))
    return [node for node in nodes[:first] if node not in graph.updates]


def needing_both(graph: Graph, variables: Iterable[Tensor]) -> list[Node]:
    """The forward nodes that depend on the batch and on any of these variables, in order."""
    batch, kept = set(graph.inputs.values()), set(variables)
    found = []
    for node in forward_nodes(graph):
        needs = [not source.isdisjoint(node.inputs) for source in (batch, kept)]
        for source, need in zip((batch, kept), needs, strict=True):
            if need:
                source.update(node.outputs)
        if all(needs):
            found.append(node)
    return found
