"""Norms of gradients and weights, and the factors that they decide.

A norm is composed of sums of squares, so that it is that of the logical tensor under any layout:
over a split dim the sum is partial, and the compiler adds the reduction.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.ops.base import require_float
from mpiflow.ops.schedule import LINE, ScalarOp, scratch

_PIECE = 1 << 13
"""Elements whose squares are summed in their own dtype; the sums of pieces are in float64."""


def add_squares(xp: Any, x: Any, part: Any, out: Any) -> None:
    """Add the sum of the squares of a flat array to `out`; `part` has no dims, and its dtype."""
    for first in range(0, x.size, _PIECE):
        piece = x[first : first + _PIECE]
        xp.dot(piece, piece, out=part)
        xp.add(out, part, out=out)


@op
class SumOfSquares(Op):
    """The sum of the squares of all elements, a float64 scalar."""

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return Rule((tuple((f"d{i}",) for i in range(len(shapes[0]))),), ((),))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return ("float64",)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return LINE

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return 2 * prod(inputs[0])

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        out.fill(0.0)
        add_squares(shard.xp, x.reshape(-1), scratch(shard, 0, x.dtype), out)


@op
class SumScalars(ScalarOp):
    """The sum of any number of scalars of one dtype; partial ones give a partial sum."""

    def groups(self, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(len(dtypes))),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        if len(set(dtypes)) > 1:
            raise GraphError(f"{self.name}: scalars of {', '.join(dtypes)}; cast them to one dtype")
        return dtypes[:1]

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return 0

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return len(inputs)

    def kernel(self, shard: ShardView, out: Any, *parts: Any) -> None:
        shard.xp.copyto(out, parts[0])
        for part in parts[1:]:
            shard.xp.add(out, part, out=out)


@op
class ClipFactor(ScalarOp):
    """Sum of squares -> min(1, limit / (norm + 1e-6)), as PyTorch's clip_grad_norm_; norm."""

    limit: float
    outputs = 2

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return _float64(self, dtypes) * 2

    def kernel(self, shard: ShardView, out: Any, squares: Any) -> None:
        xp, (factor, norm) = shard.xp, out
        xp.sqrt(squares, out=norm)
        xp.add(norm, 1e-6, out=factor)
        xp.divide(self.limit, factor, out=factor)
        xp.minimum(factor, 1.0, out=factor)


@op
class TrustRatio(ScalarOp):
    """rate, |w|^2, |d|^2 -> rate trust |w| / (|d| + decay |w|), in `dtype`.

    Where either norm is 0, the rate itself. LARS: d is the gradient (You, Gitman, Ginsburg 2017);
    LAMB: the whole direction, with neither trust nor decay (You et al. 2019).
    """

    trust: float = 1.0
    decay: float = 0.0
    dtype: str = "float32"

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        _float64(self, dtypes)
        return (self.dtype,)

    def kernel(self, shard: ShardView, out: Any, rate: Any, w: Any, d: Any) -> None:
        xp = shard.xp
        numerator, denominator, decay = (scratch(shard, i) for i in range(3))
        zero = scratch(shard, 3, np.bool_)
        xp.sqrt(w, out=numerator)
        xp.sqrt(d, out=denominator)
        xp.multiply(numerator, denominator, out=decay)
        xp.equal(decay, 0.0, out=zero)
        xp.multiply(numerator, self.decay, out=decay)
        xp.add(denominator, decay, out=denominator)
        xp.divide(numerator, denominator, out=numerator)
        xp.multiply(numerator, self.trust, out=numerator)
        xp.copyto(numerator, 1.0, where=zero)
        xp.multiply(numerator, rate, out=out)


def _float64(op: Op, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    for dtype in dtypes:
        if dtype != "float64":
            raise GraphError(f"{op.name} takes float64 scalars, not {dtype}; cast it")
    return ("float64",)
