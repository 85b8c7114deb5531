"""Pooling: layers without variables, for use where a list of layers is applied."""

from __future__ import annotations

from collections.abc import Sequence

from mpiflow.graph.tensor import Tensor
from mpiflow.nn.base import Layer
from mpiflow.ops import global_max_pool, global_mean_pool, max_pool, mean_pool
from mpiflow.ops.window import PaddingLike


class MaxPool(Layer):
    """The maximum of windows of x (n, c, *size); their stride is their size by default."""

    def __init__(
        self,
        window: int | Sequence[int],
        *,
        stride: int | Sequence[int] | None = None,
        padding: PaddingLike = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name, "max_pool")
        self.window, self.stride, self.padding = window, stride, padding

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        self._fresh()
        with x.graph.scope(self.name):
            return max_pool(x, self.window, stride=self.stride, padding=self.padding)


class MeanPool(Layer):
    """The mean of windows of x (n, c, *size), without the padding; strides as in `MaxPool`."""

    def __init__(
        self,
        window: int | Sequence[int],
        *,
        stride: int | Sequence[int] | None = None,
        padding: PaddingLike = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name, "mean_pool")
        self.window, self.stride, self.padding = window, stride, padding

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        self._fresh()
        with x.graph.scope(self.name):
            return mean_pool(x, self.window, stride=self.stride, padding=self.padding)


class GlobalMeanPool(Layer):
    """The mean of every channel: x (n, c, *size) -> (n, c)."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name, "global_mean_pool")

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        self._fresh()
        with x.graph.scope(self.name):
            return global_mean_pool(x)


class GlobalMaxPool(Layer):
    """The maximum of every channel: x (n, c, *size) -> (n, c)."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name, "global_max_pool")

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        self._fresh()
        with x.graph.scope(self.name):
            return global_max_pool(x)
