"""Norms: all have a scale that starts at 1 and, but for RMSNorm, a shift that starts at 0."""

from __future__ import annotations

from mpiflow.errors import GraphError
from mpiflow.graph.tensor import Tensor
from mpiflow.nn.base import Layer, constant, variable
from mpiflow.ops import (
    batch_norm,
    group_norm,
    layer_norm,
    reshape,
    rms_norm,
    running_moments,
    sqrt,
)


class Norm(Layer):
    """Base of norms: `_made` gives the scale and the shift of a width."""

    def __init__(self, name: str | None, kind: str, epsilon: float) -> None:
        super().__init__(name, kind)
        if epsilon <= 0:
            raise GraphError(f"{type(self).__name__} {self.name}: epsilon {epsilon} must be > 0")
        self.epsilon = epsilon
        self._variables: tuple[Tensor, ...] = ()

    def _made(self, x: Tensor, width: int, starts: dict[str, float]) -> tuple[Tensor, ...]:
        """Trainable variables (width,) by name, made in the first call of a trace."""
        if self._fresh():
            self._variables = tuple(
                variable(f"{self.name}.{name}", (width,), constant(start), dtype=x.dtype)
                for name, start in starts.items()
            )
        return self._variables


_AFFINE = {"scale": 1.0, "shift": 0.0}


class LayerNorm(Norm):
    """Each row of x (..., c) with mean 0 and variance 1, times scale (c,) plus shift (c,)."""

    def __init__(self, *, epsilon: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name, "layer_norm", epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if x.ndim < 1:
            raise GraphError(f"LayerNorm {self.name}: {x} is a scalar\n  {x.graph.where}")
        scale, shift = self._made(x, x.shape[-1], _AFFINE)
        with x.graph.scope(self.name):
            return layer_norm(x, scale, shift, epsilon=self.epsilon)


class RMSNorm(Norm):
    """Each row of x (..., c) over the root of its mean square, times scale (c,)."""

    def __init__(self, *, epsilon: float = 1e-6, name: str | None = None) -> None:
        super().__init__(name, "rms_norm", epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if x.ndim < 1:
            raise GraphError(f"RMSNorm {self.name}: {x} is a scalar\n  {x.graph.where}")
        (scale,) = self._made(x, x.shape[-1], {"scale": 1.0})
        with x.graph.scope(self.name):
            return rms_norm(x, scale, epsilon=self.epsilon)


class GroupNorm(Norm):
    """The channels of x (n, c, *size) in `groups` groups, each with mean 0 and variance 1.

    Times scale (c,) plus shift (c,).
    """

    def __init__(self, groups: int, *, epsilon: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name, "group_norm", epsilon)
        self.groups = groups

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if x.ndim < 2:
            raise GraphError(f"GroupNorm {self.name}: {x} is not (n, c, *size)\n  {x.graph.where}")
        scale, shift = self._made(x, x.shape[1], _AFFINE)
        with x.graph.scope(self.name):
            return group_norm(x, scale, shift, groups=self.groups, epsilon=self.epsilon)


class BatchNorm(Norm):
    """Each channel of x (n, c, *size) with mean 0 and variance 1, times scale plus shift.

    In training over `group` rows of the logical batch (a micro-batch by default), so the number of
    ranks changes nothing; in evaluation by the running mean and variance, which every call in a
    training step moves by the share `momentum` towards those of what it is given.
    """

    def __init__(
        self,
        *,
        group: int | None = None,
        momentum: float = 0.1,
        epsilon: float = 1e-5,
        name: str | None = None,
    ) -> None:
        super().__init__(name, "batch_norm", epsilon)
        if not 0 <= momentum <= 1:
            raise GraphError(f"BatchNorm {self.name}: momentum {momentum} must be from 0 to 1")
        self.group, self.momentum = group, momentum
        self._running: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer; in a training trace also update the running statistics."""
        if x.ndim < 2:
            raise GraphError(f"BatchNorm {self.name}: {x} is not (n, c, *size)\n  {x.graph.where}")
        known = self._graph is x.graph
        scale, shift = self._made(x, x.shape[1], _AFFINE)
        if not known:
            self._running = tuple(
                variable(f"{self.name}.running_{what}", x.shape[1:2], constant(start),
                         dtype=x.dtype, trainable=False)
                for what, start in (("mean", 0.0), ("variance", 1.0))
            )  # fmt: skip
        with x.graph.scope(self.name):
            if x.graph.training:
                return self._train(x, scale, shift)
            return self._evaluate(x, scale, shift)

    def _train(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y, sums = batch_norm(x, scale, shift, group=self.group, epsilon=self.epsilon)
        # A second call moves the statistics on from where the first has moved them.
        assigns = x.graph.assigns
        mean, variance = (assigns.pop(running.name, running) for running in self._running)
        moved = running_moments(mean, variance, x, sums, self.momentum)
        for running, value in zip(self._running, moved, strict=True):
            x.graph.assign(running, value)
        return y

    def _evaluate(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        mean, variance = self._running
        factor = scale / sqrt(variance + self.epsilon)
        offset = shift - mean * factor
        stretched = (x.shape[1], *(1,) * (x.ndim - 2))
        return x * reshape(factor, stretched) + reshape(offset, stretched)
