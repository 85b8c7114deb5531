"""Optimizers: they add the update of every trainable variable to the training graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mpiflow.errors import JobError
from mpiflow.graph.graph import Graph, Variable
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.random import Fill
from mpiflow.ops.update import SgdUpdate


class Optimizer(Protocol):
    """Adds the nodes that update one variable from its gradient."""

    def update(self, graph: Graph, variable: Variable, gradient: Tensor) -> None:
        """Assign the variable's next value, and those of the optimizer's own variables."""


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent.

    m' = momentum m + g + weight_decay w; w' = w - lr m', or with `nesterov`
    w' = w - lr (g + weight_decay w + momentum m').
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or value < 0:
                raise JobError(f"SGD: {name} must be a number that is not negative, not {value!r}")
        if self.nesterov and not self.momentum:
            raise JobError("SGD: nesterov needs a momentum above 0")

    def update(self, graph: Graph, variable: Variable, gradient: Tensor) -> None:
        """One elementwise op on weight, gradient and momentum."""
        weight = variable.tensor
        op = SgdUpdate(
            float(self.lr), float(self.momentum), float(self.weight_decay), self.nesterov
        )
        if not self.momentum:
            graph.assign(weight, graph.add(op, weight, gradient)[0])
            return
        momentum = graph.variable(
            f"{variable.name}.momentum",
            weight.shape,
            dtype=weight.dtype,
            init=Fill(weight.shape, 0.0, weight.dtype),
            trainable=False,
            sbp=variable.hint,
        )
        new_weight, new_momentum = graph.add(op, weight, gradient, momentum)
        graph.assign(weight, new_weight)
        graph.assign(momentum, new_momentum)
