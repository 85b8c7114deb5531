"""Convolution over 1, 2, 3 or more spatial dims."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

from mpiflow.errors import GraphError
from mpiflow.graph.graph import Hint, current
from mpiflow.graph.tensor import Tensor
from mpiflow.nn.base import Initializer, Layer, constant, normal, variable
from mpiflow.ops import conv, reshape
from mpiflow.ops.window import PaddingLike, per_dim


class Conv(Layer):
    """x (n, c, *size) convolved with a weight (channels, c / groups, *kernel), plus a bias.

    There are as many spatial dims as x has; settings are one number for all of them or one for
    each, and `padding` may be "same". Weights start normal with the deviation of He et al. (2015),
    sqrt(2 / inputs of a window), biases (channels,) at zero. `sbp` hints at the weight's layout.
    """

    def __init__(
        self,
        channels: int,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: PaddingLike = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        name: str | None = None,
        bias: bool = True,
        init: Initializer | None = None,
        sbp: Hint | None = None,
    ) -> None:
        super().__init__(name, "conv")
        if channels < 1 or groups < 1 or channels % groups:
            raise GraphError(f"Conv {self.name}: {groups} groups do not divide {channels} channels")
        self.channels, self.kernel, self.groups = channels, kernel, groups
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.bias, self.init, self.sbp = bias, init, sbp
        self._variables: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if x.ndim < 3 or x.shape[1] % self.groups:
            raise GraphError(
                f"Conv {self.name}: takes (n, c, *size) with c divisible by {self.groups} groups,"
                f" not {x}\n  {x.graph.where}"
            )
        if self._fresh():
            self._variables = self._make(x)
        with current().scope(self.name):
            y = conv(
                x, self._variables[0], stride=self.stride, padding=self.padding,
                dilation=self.dilation, groups=self.groups,
            )  # fmt: skip
            if not self.bias:
                return y
            return y + reshape(self._variables[1], (self.channels, *(1,) * (x.ndim - 2)))

    def _make(self, x: Tensor) -> tuple[Tensor, ...]:
        kernel = per_dim(self.kernel, x.ndim - 2, "kernel")
        inputs = x.shape[1] // self.groups
        init = self.init or normal(sqrt(2 / (inputs * prod(kernel))))
        shape = (self.channels, inputs, *kernel)
        weight = variable(f"{self.name}.weight", shape, init, dtype=x.dtype, sbp=self.sbp)
        if not self.bias:
            return (weight,)
        bias = variable(f"{self.name}.bias", (self.channels,), constant(0.0), dtype=x.dtype)
        return weight, bias
