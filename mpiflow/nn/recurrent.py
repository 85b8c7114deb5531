"""Recurrent layers, unrolled: each position is nodes of its own, so the length is static.

The product with the inputs is one for all positions. Gates stand as in PyTorch, side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import ClassVar

from mpiflow.errors import GraphError
from mpiflow.graph.graph import current
from mpiflow.graph.tensor import Tensor
from mpiflow.nn.base import Initializer, Layer, uniform
from mpiflow.nn.dense import Dense
from mpiflow.ops import add, fill, multiply, sigmoid, split, stack, subtract, tanh, unstack


class Recurrent(Layer):
    """Base of recurrent layers: x (n, t, k) -> the state after each position, (n, t, width).

    With `last`, the state after the last position only, (n, width). Weights start uniform in
    +-1/sqrt(width), biases at zero.
    """

    gates: ClassVar[int]
    hidden_bias: ClassVar[bool]

    def __init__(
        self,
        width: int,
        *,
        last: bool = False,
        init: Initializer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name, type(self).__name__.lower())
        if width < 1:
            raise GraphError(f"{type(self).__name__} {self.name}: width {width} is below 1")
        self.width, self.last, self.init = width, last, init or uniform(1 / sqrt(width))
        self._input, self._hidden = self._dense("input", True), self._dense("hidden", False)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if x.ndim != 3 or not x.shape[1]:
            raise GraphError(f"{self.name}: {x} is not (n, t, width)\n  {current().where}")
        if self._fresh():
            self._input = self._dense("input", True)
            self._hidden = self._dense("hidden", self.hidden_bias)
        projected = self._input(x)
        with current().scope(self.name):
            states = self._states(unstack(projected, 1), self._hidden)
            return states[-1] if self.last else stack(states, 1)

    def _dense(self, key: str, bias: bool) -> Dense:
        width = self.gates * self.width
        return Dense(width, name=f"{self.name}.{key}", bias=bias, init=self.init)

    def _start(self, like: Tensor) -> Tensor:
        return fill((like.shape[0], self.width), 0.0, like.dtype)

    def _states(
        self, inputs: tuple[Tensor, ...], hidden: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """The state after each position; `hidden` is the product with the state."""
        raise NotImplementedError


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997), gates input, forget, cell, output.

    c' = f c + i g, h' = o tanh(c'), where i, f, o are sigmoids and g is the tanh of
    x W + h U + b. PyTorch's two biases are one here, their sum.
    """

    gates = 4
    hidden_bias = False

    def _states(
        self, inputs: tuple[Tensor, ...], hidden: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        h = c = self._start(inputs[0])
        states = []
        for x in inputs:
            i, f, g, o = split(add(x, hidden(h)), 4)
            c = add(multiply(sigmoid(f), c), multiply(sigmoid(i), tanh(g)))
            h = multiply(sigmoid(o), tanh(c))
            states.append(h)
        return states


class GRU(Recurrent):
    """Gated recurrent unit (Cho et al. 2014) in PyTorch's form, gates reset, update, new.

    h' = n + z (h - n) with n = tanh(x W_n + b_n + r (h U_n + c_n)), and the sigmoids r, z.
    """

    gates = 3
    hidden_bias = True

    def _states(
        self, inputs: tuple[Tensor, ...], hidden: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        h = self._start(inputs[0])
        states = []
        for x in inputs:
            x_gates, x_new = split(x, (2 * self.width, self.width))
            h_gates, h_new = split(hidden(h), (2 * self.width, self.width))
            r, z = split(sigmoid(add(x_gates, h_gates)), 2)
            n = tanh(add(x_new, multiply(r, h_new)))
            h = add(n, multiply(z, subtract(h, n)))
            states.append(h)
        return states
