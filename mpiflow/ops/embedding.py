"""Rows of a table by number, and the sum of row gradients back into the table."""

from __future__ import annotations

from math import prod
from typing import Any

from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, require_float
from mpiflow.ops.index import require_index

_BLOCK = 1 << 18
"""Elements of gradient rows that are sorted and summed at a time."""
_ROWS = 1 << 11
"""The most rows of a block."""


@op
class Embedding(Op):
    """table (v, d), ids (...) -> the rows (..., d); zeros for rows that are held elsewhere."""

    rule = "v d, ... -> ... d"
    linear = ((0,),)
    indexes = ((1, 0, 0),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes[:1])
        require_index(self, dtypes[1])
        return dtypes[:1]

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(outputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return 9 * prod(inputs[1])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        table, ids = inputs
        return apply(EmbeddingGrad(table.shape[0]), dys[0], ids), None

    def kernel(self, shard: ShardView, out: Any, table: Any, ids: Any) -> None:
        xp, n = shard.xp, ids.size
        if not out.size or not len(table):
            out.fill(0)
            return
        local, mine = shard.work[: 8 * n].view(xp.int64), shard.work[8 * n :][:n].view(bool)
        xp.copyto(local, ids.reshape(-1), casting="unsafe")
        xp.subtract(local, shard.start(0, 0), out=local)
        rows = out.reshape(n, -1)
        xp.take(table, local, axis=0, out=rows, mode="clip")
        # One unsigned comparison says whether 0 <= local < the rows held here.
        xp.greater_equal(local.view(xp.uint64), len(table), out=mine)
        xp.copyto(rows, 0, where=mine[:, None])


@op
class EmbeddingGrad(Op):
    """The gradient of a table of `rows`: dy (..., d), ids (...) -> (rows, d).

    Gradients of one row are added in the order of their positions, so the sum is deterministic.
    """

    rows: int
    rule = "... d, ... -> v d"
    linear = ((0,),)
    indexes = ((1, 2, 0),)

    def sizes(self) -> dict[str, int]:
        return {"v": self.rows}

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[1])
        return dtypes[:1]

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(inputs[0]) + prod(outputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        n, d = prod(inputs[1]), inputs[0][-1]
        size = {"float64": 8, "float32": 4}.get(dtype, 2)
        # Not the product of a block's rows and d, which could be larger for a smaller d.
        return 16 * n + 2 * size * min(n * d, _ROWS * d, max(d, _BLOCK))

    def kernel(self, shard: ShardView, out: Any, dy: Any, ids: Any) -> None:
        out.fill(0)
        if not out.size or not dy.size:
            return
        xp, n, d = shard.xp, ids.size, dy.shape[-1]
        keys = self._sorted_keys(shard, ids, len(out))
        step = min(n, _block_rows(d))
        lanes = shard.work[16 * n :][: 2 * step * d * dy.itemsize].view(dy.dtype)
        gathered, sums = lanes.reshape(2, step, d)
        rows = dy.reshape(n, d)
        for first in range(0, len(keys), step):
            block = keys[first : first + step]
            target = block >> 32
            if target[0] >= len(out):
                return  # the rows that other ranks hold were sorted to the end
            part = gathered[: len(block)]
            xp.take(rows, block & 0xFFFFFFFF, axis=0, out=part, mode="clip")
            self._add_rows(xp, out, target, part, sums)

    def _sorted_keys(self, shard: ShardView, ids: Any, held: int) -> Any:
        """(row << 32 | position) of every id, in order, `held` being the row of foreign ids."""
        xp, n = shard.xp, ids.size
        keys, scratch = shard.work[: 16 * n].view(xp.int64).reshape(2, n)
        xp.copyto(keys, ids.reshape(-1), casting="unsafe")
        xp.subtract(keys, shard.start(OUT, 0), out=keys)
        xp.minimum(keys.view(xp.uint64), held, out=keys.view(xp.uint64))
        xp.left_shift(keys, 32, out=keys)
        scratch.fill(1)
        scratch[:1] = 0
        xp.add.accumulate(scratch, out=scratch)
        xp.add(keys, scratch, out=keys)
        keys.sort()
        return keys

    @staticmethod
    def _add_rows(xp: Any, out: Any, target: Any, rows: Any, sums: Any) -> None:
        """Add sorted `rows` to out[target], each run of equal targets as one sum."""
        held = int(xp.searchsorted(target, len(out)))
        target, rows = target[:held], rows[:held]
        starts = xp.flatnonzero(xp.diff(target, prepend=-1))
        stops = xp.append(starts[1:], held)
        sums = sums[: len(starts)]
        xp.take(rows, starts, axis=0, out=sums, mode="clip")
        repeated = xp.flatnonzero(stops - starts > 1)
        for i in repeated.tolist():
            xp.add.reduce(rows[int(starts[i]) : int(stops[i])], axis=0, out=sums[i])
        # The first run may go on from the block before.
        first = int(target[0])
        xp.add(sums[0], out[first], out=sums[0])
        out[target[starts]] = sums


def _block_rows(width: int) -> int:
    return max(1, min(_ROWS, _BLOCK // max(width, 1)))


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """The rows of a table (v, d) that `ids` (...) name: (..., d).

    The gradient is as large as the table. Ids outside of the table are refused where they are
    read, if they are a field of the batch; else they give zeros.
    """
    return apply(Embedding(), table, ids)
