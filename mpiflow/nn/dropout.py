"""The dropout layer."""

from __future__ import annotations

from mpiflow.graph.graph import current
from mpiflow.graph.tensor import Tensor
from mpiflow.nn.base import Layer
from mpiflow.ops import dropout


class Dropout(Layer):
    """x with a share `rate` of its elements zeroed in training, and the others scaled up."""

    def __init__(self, rate: float, *, name: str | None = None) -> None:
        super().__init__(name, "dropout")
        self.rate = rate

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer; every call drops other elements."""
        self._fresh()
        with current().scope(self.name):
            return dropout(x, self.rate)
