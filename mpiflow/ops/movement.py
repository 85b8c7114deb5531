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


@op
class Accumulate(Op):
    """P -> B in time: add, or take the maximum of, what the micro-batches contribute.

    From the second on, the sum so far is given too, in the memory of `out`.
    """

    reduce_by: str = "sum"
    precision = "any"
    rule = "... -> ..."

    def kernel(self, shard: ShardView, out: Any, x: Any, *before: Any) -> None:
        if not before:
            shard.xp.copyto(out, x)
        elif self.reduce_by == "sum":
            shard.xp.add(before[0], x, out=out)
        else:
            shard.xp.maximum(before[0], x, out=out)


@op
class Collect(Op):
    """S -> B in time: put the rows of a micro-batch where they belong in those of all.

    From the second on, what is there already is given too, in the memory of `out`.
    """

    precision = "any"
    rule = "... -> ..."

    def kernel(self, shard: ShardView, out: Any, x: Any, *before: Any) -> None:
        starts = (shard.start(0, d) - shard.start(OUT, d) for d in range(x.ndim))
        part = tuple(slice(a, a + n) for a, n in zip(starts, x.shape, strict=True))
        shard.xp.copyto(out[(..., *part)], x)
