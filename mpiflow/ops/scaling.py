"""Dynamic loss scaling, for gradients that float16 would round to zero.

Micikevicius et al. 2018. The loss is multiplied by a scale before it is differentiated. A step
whose gradients are not all finite changes no weight and halves the scale; after many good steps in
a row the scale doubles.
"""

from __future__ import annotations

from math import prod
from typing import Any

from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.ops.base import require_float


@op
class CountNonFinite(Op):
    """How many elements are infinite or not a number, as a float32 scalar."""

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return Rule((tuple((f"d{i}",) for i in range(len(shapes[0]))),), ((),))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return ("float32",)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return prod(inputs[0])

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        xp = shard.xp
        wrong = shard.work[: x.size].view(bool).reshape(x.shape)
        xp.isfinite(x, out=wrong)
        xp.logical_not(wrong, out=wrong)
        xp.add.reduce(wrong, axis=tuple(range(x.ndim)), dtype=out.dtype, out=out)


@op
class NextLossScale(Op):
    """Scalars bad, scale, good -> scale', good'.

    `bad` counts what was not finite, `good` the steps in a row without. A bad step halves the
    scale, `interval` good ones double it, within [1, most].
    """

    interval: int
    most: float

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return Rule(((), (), ()), ((), ()))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes) * 2

    def kernel(self, shard: ShardView, out: Any, bad: Any, scale: Any, good: Any) -> None:
        xp = shard.xp
        next_scale, next_good = out
        fine = xp.equal(bad, 0)
        counted = (good + 1) * fine
        due = xp.greater_equal(counted, self.interval)
        factor = xp.where(fine, xp.where(due, 2.0, 1.0), 0.5)
        xp.copyto(next_scale, xp.clip(scale * factor, 1.0, self.most), casting="unsafe")
        xp.copyto(next_good, xp.where(due, 0.0, counted), casting="unsafe")
