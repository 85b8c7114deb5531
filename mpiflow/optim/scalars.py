"""The numbers of a step that updates share: rate, corrections, factor; each is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpiflow.graph.graph import Graph
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.elementwise import scale
from mpiflow.ops.gradnorm import ClipFactor, SumOfSquares, SumScalars
from mpiflow.ops.random import fill
from mpiflow.ops.schedule import BiasCorrection, Constant, Schedule
from mpiflow.ops.shape import cast
from mpiflow.ops.step import graph_step


class Scalars:
    """Makes scalars of the training graph, which is being built, where they are first needed."""

    def __init__(self, graph: Graph, lr: float | Schedule) -> None:
        self.graph = graph
        constant = isinstance(lr, Constant) and not lr.warmup
        self.lr = lr.lr if constant else lr  # type: ignore[union-attr]
        self.factor: Tensor | None = None
        """What every gradient is to be multiplied with, a float64 scalar, if anything."""
        self._made: dict[object, Tensor] = {}

    def rate(self, by: float, dtype: str) -> Tensor:
        """The learning rate times a number."""
        lr = self.lr
        if not isinstance(lr, Schedule):
            return self._once(("rate", by, dtype), lambda: fill((), float(lr * by), dtype))
        rate = self._once("rate", lambda: self.graph.add(lr, graph_step())[0])
        if by != 1:
            rate = self._once(("rate", by), lambda: scale(rate, float(by)))
        return self.cast(rate, dtype)

    def correction(self, beta: float, dtype: str) -> Tensor:
        """1 / (1 - beta^steps), the steps counted with this one."""
        op = BiasCorrection(beta)
        made = self._once(op, lambda: self.graph.add(op, graph_step())[0])
        return self.cast(made, dtype)

    def squares(self, x: Tensor) -> Tensor:
        """The sum of the squares of x, in float64."""
        return self._once(("squares", x), lambda: self.graph.add(SumOfSquares(), x)[0])

    def clip(self, limit: float, squares: Sequence[Tensor]) -> Tensor:
        """Let `factor` bound the norm that is the root of these squares; gives the norm."""
        total = self.graph.add(SumScalars(), *squares)[0]
        self.factor, norm = self.graph.add(ClipFactor(float(limit)), total)
        return norm

    def cast(self, scalar: Tensor, dtype: str) -> Tensor:
        """The scalar in the dtype of a weight."""
        if scalar.dtype == dtype:
            return scalar
        return self._once(("cast", scalar, dtype), lambda: cast(scalar, dtype))

    def _once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
