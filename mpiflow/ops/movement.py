"""Conversions between layouts that need no message: the compiler inserts them."""

from __future__ import annotations

from typing import Any

from mpiflow.graph.op import OUT, Op, ShardView, op


@op
class Slice(Op):
    """B -> S: keep the span that this rank holds of the output."""

    precision = "any"
    rule = "... -> ..."

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        starts = (shard.start(OUT, d) - shard.start(0, d) for d in range(x.ndim))
        part = tuple(slice(a, a + n) for a, n in zip(starts, out.shape, strict=True))
        shard.xp.copyto(out, x[part])


@op
class KeepFirst(Op):
    """B -> P: the first rank along the axis keeps its value, the others contribute zero."""

    precision = "any"
    rule = "... -> ..."

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        if shard.first():
            shard.xp.copyto(out, x)
        else:
            out.fill(0)
