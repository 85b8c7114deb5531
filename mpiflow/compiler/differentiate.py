"""Step 3: add the backward pass and the optimizer's updates to the training graph."""

from __future__ import annotations

from mpiflow.compiler.scaling import LossScale
from mpiflow.errors import JobError
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, building
from mpiflow.ops.step import STEP
from mpiflow.optim import Optimizer
from mpiflow.optim.rows import row_gradients


def differentiate(graph: Graph, optimizer: Optimizer, *, scaled: bool = False) -> tuple[str, ...]:
    """Extend `graph`; gives remarks, such as on variables that the loss does not depend on.

    `scaled` scales the loss, as gradients in float16 need.
    """
    trainable = [v for v in graph.variables.values() if v.trainable]
    if not trainable:
        raise JobError("the model has no trainable variable, so there is nothing to train")
    with building(graph):
        scale = LossScale(graph) if scaled else None
        loss = scale.loss() if scale else graph.outputs["loss"]
        found = gradients(graph, loss, [v.tensor for v in trainable])
        whole = {v: g for v, g in zip(trainable, found, strict=True) if g is not None}
        if not whole:
            raise JobError(
                "the loss depends on no trainable variable, so there is nothing to train"
            )
        given, remarks = row_gradients(graph, optimizer, whole)
        if scale:
            given = scale.unscale(given)
        before = set(graph.assigns)
        optimizer.update(graph, given)
        if scale:
            scale.guard(before | {STEP})
    idle = (v.name for v in trainable if v not in given)
    return *(f"the loss does not depend on variable {name}; it stays" for name in idle), *remarks
