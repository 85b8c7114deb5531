"""Dropout with a counter-based mask: it depends on (seed, step, node) and the logical element.

So it is the same under any layout, and the gradient draws it again instead of storing it.
"""

from __future__ import annotations

from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.graph import current
from mpiflow.graph.op import OUT, ShardView, op
from mpiflow.graph.philox import scramble
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.elementwise import Elementwise
from mpiflow.ops.random import random_key
from mpiflow.ops.step import graph_step
from mpiflow.ops.work import Piece, carve, carved

_LEVELS = 1 << 16
"""The mask compares 16 random bits with the rate, which is rounded to a multiple of 2^-16."""
_LANES = 8
"""16-bit words in the 128 bits of one counter."""
_COUNTERS = 1 << 13
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
        return carved(*_pieces(*_block(outputs[0])))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return apply(Dropout(self.rate, self.key, self.shape), dys[0], inputs[1]), None

    def kernel(self, shard: ShardView, out: Any, x: Any, step: Any) -> None:
        if not out.size:
            return
        columns = out.shape[-1] if out.ndim else 1
        start = shard.start(OUT, out.ndim - 1) if out.ndim else 0
        rows, width, _ = _block(out.shape)
        work = carve(shard.work, *_pieces(*_block(out.shape)))
        y, x = out.reshape(-1, columns), x.reshape(-1, columns)
        for row in range(0, len(y), rows):
            for column in range(0, columns, width):
                block = slice(row, row + rows), slice(column, column + width)
                shape = y[block].shape
                mask = self._dropped(shard, out.shape, row, start + column, shape, step, work)
                shard.xp.multiply(x[block], self._scale, out=y[block])
                shard.xp.copyto(y[block], 0, where=mask)

    @property
    def _threshold(self) -> int:
        return min(round(self.rate * _LEVELS), _LEVELS - 1)

    @property
    def _scale(self) -> float:
        return _LEVELS / (_LEVELS - self._threshold)

    def _dropped(
        self, shard: ShardView, local: Shape, row: int, column: int, shape: Shape, step: Any,
        work: list[Any],
    ) -> Any:  # fmt: skip
        """A mask for the rows from the local `row` on, and the logical columns from `column` on."""
        xp, (words, products, steps, mask) = shard.xp, work
        first, last = column // _LANES, (column + shape[1] - 1) // _LANES + 1
        count = shape[0] * (last - first)
        words, products = words[: 4 * count].reshape(4, -1), products[: 2 * count].reshape(2, -1)
        index = words[0].view(xp.int64).reshape(shape[0], -1)
        rows = self._row_index(shard, local, row, products.view(xp.int64)[:, : shape[0]], words[1])
        groups = -(-(self.shape[-1] if self.shape else 1) // _LANES)
        _count_from(xp, first, steps[: last - first])
        xp.add(xp.multiply(rows[:, None], groups, out=index), steps[: last - first], out=index)
        xp.right_shift(words[0], xp.uint64(32), out=words[1])
        xp.bitwise_and(words[0], xp.uint64(0xFFFFFFFF), out=words[0])
        words[2:] = xp.stack((step & 0xFFFFFFFF, step >> 32)).astype(xp.uint64)[:, None]
        scramble(xp, words, products, self.key)
        bits = products.reshape(-1).view(xp.uint32).reshape(-1, 4)
        xp.copyto(bits, words.T, casting="unsafe")
        bits = bits.reshape(-1).view(xp.uint16).reshape(shape[0], -1)
        offset = column - first * _LANES
        dropped = mask[: prod(shape)].reshape(shape)
        return xp.less(bits[:, offset : offset + shape[1]], self._threshold, out=dropped)

    def _row_index(
        self, shard: ShardView, local: Shape, first: int, scratch: Any, more: Any
    ) -> Any:
        """The logical numbers of local rows from `first` on."""
        xp, (rest, index) = shard.xp, scratch
        position = more.view(xp.int64)[: len(rest)]
        _count_from(xp, first, rest)
        index.fill(0)
        stride = 1
        for dim in reversed(range(len(local) - 1)):
            xp.divmod(rest, local[dim], out=(rest, position))
            xp.add(position, shard.start(OUT, dim), out=position)
            xp.multiply(position, stride, out=position)
            xp.add(index, position, out=index)
            stride *= self.shape[dim]
        return index


def _block(shape: Shape) -> tuple[int, int, int]:
    """(rows, columns, counters) of a block of local elements, the last dim being the columns."""
    columns = shape[-1] if shape else 1
    width = max(1, min(columns, _COUNTERS * _LANES // 2))
    each = width // _LANES + 2  # counters begin at multiples of the lanes
    total = prod(shape) // max(columns, 1)
    return max(1, min(total, _COUNTERS // each)), width, min(max(total, 1) * each, _COUNTERS)


def _pieces(rows: int, width: int, counters: int) -> list[Piece]:
    """Words, products, numbers of counters in a row, and a mask."""
    return [
        ((4 * counters,), "uint64"), ((2 * counters,), "uint64"), ((width // _LANES + 2,), "int64"),
        ((counters * _LANES,), bool),
    ]  # fmt: skip


def _count_from(xp: Any, first: int, out: Any) -> None:
    out.fill(1)
    out[:1].fill(first)
    xp.add.accumulate(out, out=out)


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
