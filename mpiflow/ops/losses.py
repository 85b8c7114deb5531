"""Losses, composed of other ops, so that they are right under any layout."""

from __future__ import annotations

from mpiflow.graph.tensor import Tensor
from mpiflow.ops.elementwise import exp, log
from mpiflow.ops.index import pick
from mpiflow.ops.reduction import reduce_max, reduce_sum
from mpiflow.ops.shape import stop_gradient


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """-log softmax(logits)[label] of each row: logits (..., c), label (...) integers -> (...).

    Split over the classes, only one maximum, one sum and one picked entry a row travel.
    """
    with logits.graph.scope("cross_entropy"):
        shifted = logits - stop_gradient(reduce_max(logits, -1, keep=True))
        return log(reduce_sum(exp(shifted), -1)) - pick(shifted, label)
