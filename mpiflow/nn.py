"""Layers: they own names and make the variables that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

from mpiflow.errors import GraphError
from mpiflow.graph.graph import Graph, Hint, current
from mpiflow.graph.op import Op
from mpiflow.graph.tensor import Tensor
from mpiflow.ops import Fill, Normal, Uniform, linear, random_key

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
    """A new variable of the model that is being traced; its start does not depend on layouts."""
    graph = current()
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


class Dense(Layer):
    """x (..., k) times a weight (k, width), plus a bias (width,).

    Weights start uniform in +-1/sqrt(k), biases at zero. `sbp` is a hint for the weight's layout.
    """

    def __init__(
        self,
        width: int,
        *,
        name: str | None = None,
        bias: bool = True,
        init: Initializer | None = None,
        sbp: Hint | None = None,
    ) -> None:
        super().__init__(name, "dense")
        if width < 1:
            raise GraphError(f"Dense {self.name}: width must be at least 1, not {width}")
        self.width, self.bias, self.init, self.sbp = width, bias, init, sbp
        self._variables: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if x.ndim < 1:
            raise GraphError(f"Dense {self.name}: {x} is a scalar\n  {x.where}")
        if self._fresh():
            self._variables = self._make(x)
        with current().scope(self.name):
            y = linear(x, self._variables[0])
            return y + self._variables[1] if self.bias else y

    def _make(self, x: Tensor) -> tuple[Tensor, ...]:
        inputs = x.shape[-1]
        init = self.init or uniform(1 / sqrt(inputs))
        weight = variable(
            f"{self.name}.weight", (inputs, self.width), init, dtype=x.dtype, sbp=self.sbp
        )
        if not self.bias:
            return (weight,)
        return weight, variable(f"{self.name}.bias", (self.width,), constant(0.0), dtype=x.dtype)
