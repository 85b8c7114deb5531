"""Checks on a traced graph: what no single op can see."""

from __future__ import annotations

from mpiflow.errors import GraphError
from mpiflow.graph.graph import Graph
from mpiflow.graph.tensor import is_float


def check(graph: Graph) -> tuple[str, ...]:
    """Raise GraphError on a graph that cannot be meant; gives remarks on what looks odd."""
    for name, tensor in graph.outputs.items():
        if tensor.shape:
            raise GraphError(
                f"output {name!r} has shape {tensor.shape}; outputs are scalars, take"
                f" mf.mean(x) or mf.total(x)\n  {tensor.where}"
            )
        if not is_float(tensor.dtype):
            raise GraphError(
                f"output {name!r} is {tensor.dtype}; outputs are floating-point\n  {tensor.where}"
            )
    if graph.training and "loss" not in graph.outputs:
        given = ", ".join(graph.outputs) or "nothing"
        raise GraphError(f"the model gives {given}; training needs an output named 'loss'")
    seen = set(graph.inputs.values()) | {v.tensor for v in graph.variables.values()}
    for node in graph.nodes:
        for tensor in node.inputs:
            if tensor not in seen:
                raise GraphError(f"{node.name} reads {tensor.name} before it is made: {node.where}")
        seen.update(node.outputs)
    read = {t for node in graph.nodes for t in node.inputs} | set(graph.assigns.values())
    return tuple(
        f"variable {v.name} is never read\n  {v.tensor.where}"
        for v in graph.variables.values()
        if v.tensor not in read
    )
