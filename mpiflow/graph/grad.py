"""Reverse-mode differentiation: adds the backward nodes to the graph itself."""

from __future__ import annotations

from mpiflow.errors import GraphError
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.tensor import Tensor, arithmetic, is_float


def gradients(graph: Graph, loss: Tensor, wrt: list[Tensor]) -> list[Tensor | None]:
    """The gradient of the scalar `loss` with respect to each tensor; None where it has none."""
    if loss.shape or not is_float(loss.dtype):
        raise GraphError(f"the loss must be a floating-point scalar, not {loss}\n  {loss.where}")
    needed = _reaching(graph, wrt)
    found: dict[Tensor, Tensor] = {}
    with graph.scope("grad", loss.where):
        found[loss] = arithmetic["fill"]((), 1.0, loss.dtype)
    for node in reversed(list(graph.nodes)):
        dys = [found.get(output) for output in node.outputs]
        if all(dy is None for dy in dys) or not any(t in needed for t in node.outputs):
            continue
        before = len(graph.nodes)
        with graph.scope(f"grad/{node.name}", node.where):
            whole = tuple(
                arithmetic["fill"](t.shape, 0.0, t.dtype) if dy is None else dy
                for t, dy in zip(node.outputs, dys, strict=True)
            )
            dxs = _gradients_of(node, whole)
            _check(node, dxs)
            for tensor, dx in zip(node.inputs, dxs, strict=True):
                if dx is not None and tensor in needed:
                    found[tensor] = found[tensor] + dx if tensor in found else dx
        graph.origins.update(dict.fromkeys(graph.nodes[before:], node))
    return [found.get(tensor) for tensor in wrt]


def _gradients_of(node: Node, dys: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    try:
        return node.op.grad(node.inputs, node.outputs, dys)
    except GraphError as error:
        line = f"\n  {node.where}"
        raise GraphError(f"{error}" if f"{error}".endswith(line) else f"{error}{line}") from error


def _check(node: Node, dxs: tuple[Tensor | None, ...]) -> None:
    name = node.op.name
    if not isinstance(dxs, tuple) or len(dxs) != len(node.inputs):
        given = f"{len(dxs)}" if isinstance(dxs, tuple) else f"{dxs!r}"
        raise GraphError(
            f"{name}.grad gives a tuple of {len(node.inputs)} gradients, one for each input, not"
            f" {given}\n  {node.where}"
        )
    for i, (tensor, dx) in enumerate(zip(node.inputs, dxs, strict=True)):
        if dx is not None and dx.shape != tensor.shape:
            raise GraphError(
                f"{name}.grad: the gradient of input {i} is {list(dx.shape)}, the input"
                f" {list(tensor.shape)}\n  {node.where}"
            )


def _reaching(graph: Graph, wrt: list[Tensor]) -> set[Tensor]:
    """Floating-point tensors that depend on any of `wrt`."""
    needed = set(wrt)
    for node in graph.nodes:
        if any(t in needed for t in node.inputs):
            needed.update(t for t in node.outputs if is_float(t.dtype))
    return needed
