"""Batch norm over groups of `rows` rows of the logical batch, whatever ranks hold them.

Four passes over activations, none of which needs another rank; what travels is small:

    x -> sums              the sum and the sum of squares of each channel in each group, partial
    x, sums -> y           normalised, scaled and shifted
    dy, x, sums -> slopes  sums of dy and of dy times the normalised x, partial
    dy, x, sums, slopes -> dx

Sums are float64 and of values shifted to near their mean, so that a mean of 1000 with a deviation
of 1 is no harder for float32 than one of 0. Kernels go by blocks that a core's cache holds; sums
over places are products with ones, and of products, at the speed of BLAS.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape, Signature
from mpiflow.graph.sbp import B, S, Sbp
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.window import letters
from mpiflow.ops.work import Piece, carve, carved, dot_rows

_BLOCK = 1 << 17
"""Elements that are worked on at a time: a cache holds them, and calls cost little beside them."""
_LONG = 64
"""Places from which on a call for each row and channel costs little beside them."""
_CHANNELS = 1 << 10
"""Channels whose running moments are updated at a time."""
SUMS = "float64"

Block = tuple[int, int, int]
"""Rows, channels and places."""
_Dims = tuple[tuple[str, ...], ...]
_PAIRS: _Dims = (("g",), ("c",), ("two",))
_CHANNEL: _Dims = (("c",),)


class Batched(Op):
    """Base: x is (n, c, *size), sums and slopes are (groups, c, 2), `rows` is rows a group."""

    rows: int
    count: int
    epsilon: float

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes[:1])

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset({"g", "two"})

    def signatures(
        self, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]
    ) -> tuple[Signature, ...]:
        """Those of the rule, and a split into whole groups, of which nobody needs another's."""
        found = super().signatures(shapes, dtypes)
        return (*found, self._by_groups(self.pattern(shapes)))

    def _by_groups(self, rule: Rule) -> Signature:
        def sbp(dims: _Dims) -> Sbp:
            return S(0, self.rows) if dims[0] == ("n",) else S(0) if dims == _PAIRS else B

        return Signature(tuple(map(sbp, rule.inputs)), tuple(map(sbp, rule.outputs)))

    def full(self, shapes: tuple[Shape, ...]) -> _Dims:
        """The dims of x."""
        return ("n",), ("c",), *letters("s", len(shapes[0]) - 2)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return 5 * prod(inputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved(*self.pieces(_block(_seen(inputs[0]), _BLOCK), dtype))

    def pieces(self, block: Block, dtype: Any) -> list[Piece]:
        """What the kernel needs for a block."""
        return _pieces(block, dtype)

    def blocks(self, shard: ShardView, x: Any) -> Iterator[tuple[slice, slice, slice]]:
        """Spans of rows, channels and places of x (n, c, places), as the workspace allows."""
        limit, block = _BLOCK, _block(x.shape, _BLOCK)
        # The plan has what the largest shard asks for; of fewer channels or places a block may have
        # so many more rows that it is larger.
        while (needed := carved(*self.pieces(block, x.dtype))) and needed > len(shard.work):
            limit = limit * 7 // 8
            block = _block(x.shape, limit)
        return _blocks(x.shape, block)

    def moments(self, xp: Any, sums: Any) -> tuple[Any, Any]:
        """The mean and 1 / deviation of each channel, from sums (c, 2)."""
        mean, variance = moments(xp, sums, self.count)
        return mean, 1.0 / xp.sqrt(variance + self.epsilon)

    def groups_of(self, shard: ShardView, n: int, sums: int | str) -> Iterator[tuple[int, slice]]:
        """Each group of which this rank holds rows: its place in operand `sums`, and the rows."""
        start, held = shard.start(0, 0), shard.start(sums, 0)
        for group in range(start // self.rows, -(-(start + n) // self.rows) if n else 0):
            first, last = group * self.rows - start, (group + 1) * self.rows - start
            yield group - held, slice(max(first, 0), min(last, n))


@op
class BatchSums(Batched):
    """x -> (groups, c, 2): the sum and the sum of squares of each channel, in float64."""

    rows: int
    batch: int

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return Rule((self.full(shapes),), (_PAIRS,))

    def sizes(self) -> dict[str, int]:
        return {"g": self.batch // self.rows, "two": 2}

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return (SUMS,)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        out.fill(0)
        if not x.size:
            return
        x3 = x.reshape(_seen(x.shape))
        for group, rows in self.groups_of(shard, len(x), OUT):
            self._sum(shard, out[group], x3[rows])

    def _sum(self, shard: ShardView, out: Any, x: Any) -> None:
        """Add up d = x - shift, where shift is the mean of the first block of the channel."""
        xp, shift = shard.xp, None
        for part in self.blocks(shard, x):
            block = x[part]
            mean, term, d, *work = carve(shard.work, *_pieces(block.shape, x.dtype))
            if not part[0].start and not part[2].start:
                _sum_channels(xp, block, mean, *work)
                xp.multiply(mean, 1.0 / (block.shape[0] * block.shape[2]), out=mean)
                shift = mean.astype(SUMS)
            xp.subtract(block, mean[:, None], out=d)
            _sum_channels(xp, d, term, *work)
            count = block.shape[0] * block.shape[2]
            first = term.astype(SUMS)
            _sum_products(xp, d, d, term, *work)
            out[part[1], 0] += first + count * shift
            out[part[1], 1] += term + (2 * first + count * shift) * shift


@op
class BatchNorm(Batched):
    """x, the sums of x, scale (c,), shift (c,) -> (x - mean) / deviation * scale + shift.

    Its gradient for x counts the way through the sums as well, so there is none for the sums.
    `count` is the number of elements of a channel in a group.
    """

    rows: int
    count: int
    epsilon: float
    inplace = ((0, 0),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = self.full(shapes)
        return Rule((full, _PAIRS, _CHANNEL, _CHANNEL), (full,))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, sums, scale, _ = inputs
        slopes = apply(BatchNormSlopes(self.rows, self.count, self.epsilon), dys[0], x, sums)
        grad = BatchNormGrad(self.rows, self.count, self.epsilon)
        dx = apply(grad, dys[0], x, sums, slopes, scale)
        return dx, None, *x.graph.add(SlopeTotals(x.dtype), slopes)

    def pieces(self, block: Block, dtype: Any) -> list[Piece]:
        return []

    def kernel(self, shard: ShardView, out: Any, x: Any, sums: Any, scale: Any, shift: Any) -> None:
        if not x.size:
            return
        xp = shard.xp
        y3, x3 = (a.reshape(_seen(x.shape)) for a in (out, x))
        for group, rows in self.groups_of(shard, len(x), 1):
            mean, inverse = self.moments(xp, sums[group])
            mean, factor = mean.astype(x.dtype), (inverse * scale).astype(x.dtype)
            for part in self.blocks(shard, x3[rows]):
                y, channels = y3[rows][part], part[1]
                xp.subtract(x3[rows][part], mean[channels, None], out=y)
                xp.multiply(y, factor[channels, None], out=y)
                xp.add(y, shift[channels, None], out=y)


@op
class BatchNormSlopes(Batched):
    """dy, x, sums -> (groups, c, 2): sums of dy and of dy times the normalised x, in float64."""

    rows: int
    count: int
    epsilon: float
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = self.full(shapes)
        return Rule((full, full, _PAIRS), (_PAIRS,))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return (SUMS,)

    def kernel(self, shard: ShardView, out: Any, dy: Any, x: Any, sums: Any) -> None:
        out.fill(0)
        if not x.size:
            return
        xp = shard.xp
        dy3, x3 = (a.reshape(_seen(x.shape)) for a in (dy, x))
        for group, rows in self.groups_of(shard, len(x), 2):
            exact, inverse = self.moments(xp, sums[group])
            mean, total = exact.astype(x.dtype), out[group]
            for part in self.blocks(shard, x3[rows]):
                block, slope = x3[rows][part], dy3[rows][part]
                _, term, d, *work = carve(shard.work, *_pieces(block.shape, x.dtype))
                _sum_channels(xp, slope, term, *work)
                total[part[1], 0] += term
                xp.subtract(block, mean[part[1], None], out=d)
                _sum_products(xp, d, slope, term, *work)
                total[part[1], 1] += term
            total[:, 1] *= inverse


@op
class BatchNormGrad(Batched):
    """dy, x, sums, slopes, scale -> dx, with the way of x through the sums."""

    rows: int
    count: int
    epsilon: float

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = self.full(shapes)
        return Rule((full, full, _PAIRS, _PAIRS, _CHANNEL), (full,))

    def pieces(self, block: Block, dtype: Any) -> list[Piece]:
        return [(block, dtype)]

    def kernel(
        self, shard: ShardView, out: Any, dy: Any, x: Any, sums: Any, slopes: Any, scale: Any
    ) -> None:
        if not x.size:
            return
        xp = shard.xp
        dx3, dy3, x3 = (a.reshape(_seen(x.shape)) for a in (out, dy, x))
        for group, rows in self.groups_of(shard, len(x), 2):
            exact, inverse = self.moments(xp, sums[group])
            factor = inverse * scale
            level = factor * slopes[group, :, 0] / self.count
            tilt = factor * inverse * slopes[group, :, 1] / self.count
            mean, factor, level, tilt = (a.astype(x.dtype) for a in (exact, factor, level, tilt))
            for part in self.blocks(shard, x3[rows]):
                block, channels, dx = x3[rows][part], part[1], dx3[rows][part]
                (d,) = carve(shard.work, *self.pieces(block.shape, x.dtype))
                xp.subtract(block, mean[channels, None], out=d)
                xp.multiply(d, tilt[channels, None], out=d)
                xp.add(d, level[channels, None], out=d)
                xp.multiply(dy3[rows][part], factor[channels, None], out=dx)
                xp.subtract(dx, d, out=dx)


@op
class SlopeTotals(Op):
    """slopes (groups, c, 2) -> the gradients of scale and of shift, (c,) each."""

    dtype: str
    rule = "g c two -> c, c"
    whole = "two"
    linear = ((0,),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return self.dtype, self.dtype

    def kernel(self, shard: ShardView, out: Any, slopes: Any) -> None:
        for total, which in zip(out, (1, 0), strict=True):
            shard.xp.add.reduce(slopes[:, :, which], axis=0, dtype=total.dtype, out=total)


@op
class RunningMoments(Op):
    """Running mean and variance (c,), sums -> both moved by `momentum` towards the batch's.

    The batch's are means over the groups; its variance is the unbiased one.
    """

    count: int
    momentum: float
    rule = "c, c, g c two -> c, c"
    whole = "g two"
    inplace = ((0, 0), (1, 1))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return dtypes[:2]

    def kernel(self, shard: ShardView, out: Any, mean: Any, variance: Any, sums: Any) -> None:
        for first in range(0, len(mean), _CHANNELS):
            part = slice(first, first + _CHANNELS)
            targets = [target[part] for target in out]
            self._move(shard.xp, targets, (mean[part], variance[part]), sums[:, part])

    def _move(self, xp: Any, targets: list[Any], olds: tuple[Any, Any], sums: Any) -> None:
        unbias = self.count / max(self.count - 1, 1)
        for target, old in zip(targets, olds, strict=True):
            xp.multiply(old, 1.0 - self.momentum, out=target)
        for pairs in sums:
            new = moments(xp, pairs, self.count)
            for target, value, factor in zip(targets, new, (1.0, unbias), strict=True):
                target += (value * (self.momentum * factor / len(sums))).astype(target.dtype)


def moments(xp: Any, sums: Any, count: int) -> tuple[Any, Any]:
    """The mean and variance of each channel, from sums (c, 2)."""
    mean = sums[:, 0] / count
    return mean, xp.maximum(sums[:, 1] / count - mean * mean, 0.0)


def _seen(x: Shape) -> Shape:
    """(n, c, places)."""
    return x[0], x[1], prod(x[2:])


def _block(seen: Shape, limit: int) -> Block:
    """The shape of a block: all places and channels of several rows, if they are few."""
    n, channels, places = (max(size, 1) for size in seen)
    wide = min(places, limit)
    deep = min(channels, max(1, limit // wide))
    return min(n, max(1, limit // (wide * deep))), deep, wide


def _blocks(seen: Shape, block: Block) -> Iterator[tuple[slice, slice, slice]]:
    """Spans of rows, channels and places; all blocks of a channel follow one another."""
    n, channels, places = seen
    rows, deep, wide = block
    for channel in range(0, channels, deep):
        for row in range(0, n, rows):
            for place in range(0, places, wide):
                yield (
                    slice(row, min(row + rows, n)),
                    slice(channel, min(channel + deep, channels)),
                    slice(place, min(place + wide, places)),
                )


def _pieces(block: Block, dtype: Any) -> list[Piece]:
    """Two numbers a channel, at the same place for all blocks of a channel, and one block.

    Then ones, and what a sum over one of two dims leaves.
    """
    rows, channels, places = block
    left = channels * (places if places < _LONG else rows)
    shapes: list[Shape] = [(channels,), (channels,), block, (max(rows, places),), (left,)]
    return [(shape, dtype) for shape in shapes]


def _sum_channels(xp: Any, block: Any, out: Any, ones: Any, each: Any) -> None:
    """The sums of a block (rows, channels, places) over rows and places, the longer dim first."""
    rows, channels, places = block.shape
    ones.fill(1)
    if places < _LONG:
        each = each[: channels * places]
        xp.matmul(ones[:rows], block.reshape(rows, -1), each)
        each = each.reshape(channels, places)
        xp.add.reduce(each, axis=1, dtype=each.dtype, out=out)
    else:
        each = each[: rows * channels]
        xp.matmul(_by_row(block), ones[:places], each)
        _sum_rows(xp, block, each, out)


def _sum_products(xp: Any, a: Any, b: Any, out: Any, ones: Any, each: Any) -> None:
    """The same of the products of two blocks, of which the first is scratch afterwards."""
    if a.shape[2] < _LONG:
        xp.multiply(a, b, out=a)
        _sum_channels(xp, a, out, ones, each)
    else:
        each = each[: a.shape[0] * a.shape[1]]
        dot_rows(xp, _by_row(a), _by_row(b), each)
        _sum_rows(xp, a, each, out)


def _by_row(block: Any) -> Any:
    """(rows * channels, places): a view, as several rows are whole, and follow one another."""
    return block[0] if len(block) == 1 else block.reshape(-1, block.shape[2])


def _sum_rows(xp: Any, block: Any, each: Any, out: Any) -> None:
    xp.add.reduce(each.reshape(block.shape[:2]), axis=0, dtype=out.dtype, out=out)


def batch_norm(
    x: Tensor, scale: Tensor, shift: Tensor, *, group: int | None = None, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """(y, sums): x (n, c, *size), each channel normalised over `group` rows of the logical batch.

    Times scale plus shift, both (c,). The default group is a micro-batch. `sums` is what
    `running_moments` takes.
    """
    rows = x.shape[0] // x.graph.micro_batches if group is None else group
    if x.ndim < 2 or rows < 1 or x.shape[0] % rows:
        raise refusal(f"batch_norm: groups of {rows} rows do not divide the batch of {x}")
    sums = apply(BatchSums(rows, x.shape[0]), x)
    count = rows * prod(x.shape[2:])
    return apply(BatchNorm(rows, count, epsilon), x, sums, scale, shift), sums


def running_moments(
    mean: Tensor, variance: Tensor, x: Tensor, sums: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Running mean and variance after a batch x: (1 - momentum) times old, momentum times new."""
    count = prod((x.shape[0], *x.shape[2:])) // sums.shape[0]
    moved = x.graph.add(RunningMoments(count, momentum), mean, variance, sums)
    return moved[0], moved[1]
