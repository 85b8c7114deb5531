"""The step count: a variable of the graph, so that what depends on it is exact on resume."""

from __future__ import annotations

from mpiflow.graph.graph import current
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import refusal
from mpiflow.ops.elementwise import add
from mpiflow.ops.random import Fill

STEP = "step"


def graph_step() -> Tensor:
    """How many steps were done before this one: an int64 scalar, made where it is first needed."""
    graph = current()
    made = graph.variables.get(STEP)
    if made is not None:
        if made.trainable or (made.tensor.shape, made.tensor.dtype) != ((), "int64"):
            raise refusal(f"a variable named {STEP!r} counts the steps; give yours another name")
        return made.tensor
    start = Fill((), 0, "int64")
    step = graph.variable(STEP, (), dtype="int64", init=start, trainable=False)
    if graph.training:
        with graph.scope(STEP):
            graph.assign(step, add(step, 1))
    return step
