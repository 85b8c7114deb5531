"""What all layers share: names, variables and how those start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpiflow.graph.graph import Graph, Hint, current
from mpiflow.graph.op import Op
from mpiflow.graph.tensor import Tensor, is_narrow
from mpiflow.ops import Fill, Normal, Uniform, random_key

Initializer = Callable[[tuple[int, ...], str, tuple[int, int]], Op]
"""Gives the op that fills (shape, dtype) with random numbers of a key."""


def uniform(limit: float) -> Initializer:
    """Uniform in [-limit, limit)."""
    return lambda shape, dtype, key: Uniform(shape, key, -limit, limit, dtype)


def normal(deviation: float, mean: float = 0.0) -> Initializer:
    """Normal with the given standard deviation and mean."""
    return lambda shape, dtype, key: Normal(shape, key, deviation, mean, dtype)


def constant(value: float) -> Initializer:
    """Every element is `value`."""
    return lambda shape, dtype, key: Fill(shape, value, dtype)


def variable(
    name: str,
    shape: Sequence[int],
    init: Initializer,
    *,
    dtype: str = "float32",
    trainable: bool = True,
    sbp: Hint | None = None,
) -> Tensor:
    """A new variable of the model that is being traced; its start does not depend on layouts.

    In a job of 16-bit precision it is float32 all the same, though a layer asks for its input's.
    """
    graph = current()
    if graph.policy is not None and is_narrow(dtype):
        dtype = "float32"
    op = init(tuple(shape), dtype, random_key(graph.seed, name))
    return graph.variable(name, shape, dtype=dtype, init=op, trainable=trainable, sbp=sbp)


class Layer:
    """Base of layers: called twice in one trace, a layer uses the same variables."""

    def __init__(self, name: str | None, kind: str) -> None:
        self._given, self._kind = name, kind
        self._graph: Graph | None = None
        self.name = name or kind

    def _fresh(self) -> bool:
        """Whether this is the layer's first call in the current trace; then it has its name."""
        graph = current()
        if self._graph is graph:
            return False
        self._graph = graph
        self.name = self._given or graph.unique(self._kind)
        return True
