"""Dynamic loss scaling in the graph: a bad step is skipped by all ranks together."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

from mpiflow.graph.graph import Graph, Variable
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import apply
from mpiflow.ops.elementwise import multiply
from mpiflow.ops.gradnorm import SumScalars
from mpiflow.ops.random import Fill, fill
from mpiflow.ops.rowupdate import RowUpdate
from mpiflow.ops.scaling import CountNonFinite, NextLossScale
from mpiflow.ops.select import equal, where
from mpiflow.optim.rows import Gradient, Rows

SCALE, GOOD = "loss_scale", "loss_scale.good_steps"
SKIPPED = "skipped"
"""The output that is 1 where a step changed no weight."""
_FIRST, _MOST, _INTERVAL = 2.0**16, 2.0**24, 2000


class LossScale:
    """Multiplies the loss, divides the gradients, and holds back what a bad step would change."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        with self._scope():
            self.scale = graph.variable(SCALE, (), init=Fill((), _FIRST), trainable=False)
            self.good = graph.variable(GOOD, (), init=Fill((), 0.0), trainable=False)

    def loss(self) -> Tensor:
        """What is differentiated instead of the loss."""
        with self._scope():
            return multiply(self.graph.outputs["loss"], self.scale)

    def _scope(self) -> AbstractContextManager[None]:
        # The user's line is that of the loss: this is not called by what the user wrote.
        return self.graph.scope(SCALE, self.graph.outputs["loss"].where)

    def unscale(self, gradients: dict[Variable, Gradient]) -> dict[Variable, Gradient]:
        """The gradients of the loss itself; counts what is not finite in them."""
        with self._scope():
            counts = [
                apply(CountNonFinite(), g.values if isinstance(g, Rows) else g)
                for g in gradients.values()
            ]
            bad = apply(SumScalars(), *counts)
            self.fine = equal(bad, fill((), 0.0))
            scale, good = self.graph.add(
                NextLossScale(_INTERVAL, _MOST), bad, self.scale, self.good
            )
            self.graph.outputs[SCALE] = self.scale
            self.graph.outputs[SKIPPED] = where(self.fine, fill((), 0.0), fill((), 1.0))
            self.graph.assign(self.scale, scale)
            self.graph.assign(self.good, good)
            inverse = 1.0 / self.scale
            return {v: self._unscaled(g, inverse) for v, g in gradients.items()}

    def _unscaled(self, gradient: Gradient, inverse: Tensor) -> Gradient:
        if not isinstance(gradient, Rows):
            return multiply(gradient, inverse)
        # In a bad step no row is updated, which spares the table a look at every row.
        ids = where(self.fine, gradient.ids, -1)
        return replace(gradient, values=multiply(gradient.values, inverse), ids=ids)

    def guard(self, before: set[str]) -> None:
        """Let every variable that was not assigned `before` change in good steps only."""
        for name in [name for name in self.graph.assigns if name not in before]:
            node = self.graph.assigns[name].node
            if node is not None and isinstance(node.op, RowUpdate):
                continue
            old = self.graph.variables[name].tensor
            with self._scope():
                kept = where(self.fine, self.graph.assigns[name], old)
            self.graph.assigns[name] = kept
