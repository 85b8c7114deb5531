"""The dense layer."""

from __future__ import annotations

from math import sqrt

from mpiflow.errors import GraphError
from mpiflow.graph.graph import Hint, current
from mpiflow.graph.tensor import Tensor
from mpiflow.nn.base import Initializer, Layer, constant, uniform, variable
from mpiflow.ops import linear


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
            raise GraphError(f"Dense {self.name}: {x} is a scalar\n  {x.graph.where}")
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
