"""Dropout with a counter-based mask: it depends on (seed, step, node) and the logical element.

So it is the same under any layout, and the gradient draws it again instead of storing it.
"""

from __future__ import annotations

from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.graph import current
from mpiflow.graph.op import OUT, ShardView, op
from mpiflow.graph.philox import philox4x32
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.elementwise import Elementwise
from mpiflow.ops.random import random_key
from mpiflow.ops.step import graph_step

_LEVELS = 1 << 16
"""The mask compares 16 random bits with the rate, which is rounded to a multiple of 2^-16."""
_LANES = 8
"""16-bit words in the 128 bits of one counter."""
_COUNTERS = 1 << 10
"""Counters of a block."""


@op
class Dropout(Elementwise):
    """x (shape), step () -> x / (1 - rate), but zero at a share `rate` of the elements.

    `shape` is that of the logical tensor. Row r, column c of it, the last dim being the columns,
    takes 16 bits of the counter (r, c // 8).
    """

    precision = "follow"
    rate: float
    key: tuple[int, int]
    shape: tuple[int, ...]
    linear = ((0,),)
    inplace = ((0, 0),)

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        if tuple(shapes[0]) != self.shape or shapes[1]:
            raise GraphError(f"Dropout of shape {self.shape} and a scalar was given {shapes}")
        return super().infer(shapes)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes[:1])
        if dtypes[1] != "int64":
            raise GraphError(f"Dropout: the step is int64, not {dtypes[1]}")
        return dtypes[:1]

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return 20 * prod(outputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return min(prod(outputs[0]), _COUNTERS * _LANES)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return apply(Dropout(self.rate, self.key, self.shape), dys[0], inputs[1]), None

    def kernel(self, shard: ShardView, out: Any, x: Any, step: Any) -> None:
        if not out.size:
            return
        columns = out.shape[-1] if out.ndim else 1
        start = shard.start(OUT, out.ndim - 1) if out.ndim else 0
        width = min(columns, _COUNTERS * _LANES // 2)
        rows = max(1, min(out.size // columns, _COUNTERS // (width // _LANES + 2)))
        for row in range(0, out.size // columns, rows):
            for column in range(0, columns, width):
                block = (slice(row, row + rows), slice(column, column + width))
                y, piece = (a.reshape(-1, columns)[block] for a in (out, x))
                index = self._row_index(shard, out.shape, row, len(y))
                dropped = self._dropped(shard, index, start + column, y.shape, step)
                shard.xp.multiply(piece, self._scale, out=y)
                shard.xp.copyto(y, 0, where=dropped)

    @property
    def _threshold(self) -> int:
        return min(round(self.rate * _LEVELS), _LEVELS - 1)

    @property
    def _scale(self) -> float:
        return _LEVELS / (_LEVELS - self._threshold)

    def _dropped(self, shard: ShardView, rows: Any, start: int, shape: Shape, step: Any) -> Any:
        """A mask for logical rows and the columns that begin at `start`, in the workspace."""
        xp = shard.xp
        first, last = start // _LANES, (start + shape[1] - 1) // _LANES + 1
        groups = -(-(self.shape[-1] if self.shape else 1) // _LANES)
        index = rows[:, None] * groups + xp.arange(first, last)
        counter = xp.empty((index.size, 4), xp.uint32)
        flat = index.reshape(-1)
        counter[:, 0], counter[:, 1] = flat & 0xFFFFFFFF, flat >> 32
        counter[:, 2], counter[:, 3] = step & 0xFFFFFFFF, step >> 32
        bits = philox4x32(counter, self.key).view(xp.uint16).reshape(len(rows), -1)
        mask = shard.work[: prod(shape)].view(bool).reshape(shape)
        offset = start - first * _LANES
        return xp.less(bits[:, offset : offset + shape[1]], self._threshold, out=mask)

    def _row_index(self, shard: ShardView, local: Shape, first: int, count: int) -> Any:
        """The logical numbers of `count` local rows."""
        xp = shard.xp
        rest = xp.arange(first, first + count, dtype=xp.int64)
        index = xp.zeros(count, xp.int64)
        stride = 1
        for dim in reversed(range(len(local) - 1)):
            rest, position = xp.divmod(rest, local[dim])
            index += (position + shard.start(OUT, dim)) * stride
            stride *= self.shape[dim]
        return index


def dropout(x: Tensor, rate: float) -> Tensor:
    """x with a share `rate` of its elements zeroed and the others scaled up; itself in evaluation.

    The elements are others in every step, and the same under any layout.
    """
    if not 0 <= rate < 1:
        raise refusal(f"dropout: the rate is a share from 0 to below 1, not {rate!r}")
    graph = current()
    if not rate or not graph.training:
        return x
    key = random_key(graph.seed, graph.unique("dropout_mask"))
    return apply(Dropout(float(rate), key, x.shape), x, graph_step())
