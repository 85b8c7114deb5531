"""Norms whose statistics lie within a row: LayerNorm, RMSNorm, GroupNorm.

Arrays are seen as (n, groups, c, places): each (row, group) has its own mean and variance, each
(group, c) its own scale and shift. Kernels work on blocks that a core's cache holds, so an
activation is read from memory once and written once. Variances are of the centred values.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.window import letters
from mpiflow.ops.work import Piece, carve, carved

_BLOCK = 1 << 15
"""Elements that are worked on at a time."""


class RowNorm(Op):
    """Base of norms (x, scale[, shift] -> y) and of their gradients (dy, x, scale -> dx, ...)."""

    epsilon: float
    centred = True
    """Whether the mean is subtracted; then there is a shift too."""

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes)

    def seen(self, x: Shape) -> Shape:
        """(n, groups, c, places) of a local x."""
        return prod(x[:-1]), 1, x[-1], 1

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return 8 * prod(outputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved(*self.pieces(*_block(self.seen(outputs[0])), outputs[0], dtype))

    def pieces(self, rows: int, groups: int, x: Shape, dtype: Any) -> list[Piece]:
        """What a block of (rows, groups) needs: two blocks, three numbers a row, one a channel."""
        channels, places = self.seen(x)[2:]
        block, numbers = (rows, groups, channels, places), (rows, groups, 1, 1)
        shapes = (block, block, numbers, numbers, numbers, (groups, channels))
        return [(shape, dtype) for shape in shapes]

    def blocks(self, shard: ShardView, x: Any) -> Iterator[tuple[slice, slice, list[Any]]]:
        """Spans of rows and of groups, with the workspace for each."""
        n, groups = self.seen(x.shape)[:2]
        rows, width = _block(self.seen(x.shape))
        for first in range(0, n, rows):
            for group in range(0, groups, width):
                span = slice(first, min(first + rows, n)), slice(group, min(group + width, groups))
                height, across = (part.stop - part.start for part in span)
                yield *span, carve(shard.work, *self.pieces(height, across, x.shape, x.dtype))

    def normalise(self, xp: Any, y: Any, x: Any, square: Any, mean: Any, inverse: Any) -> None:
        """y = (x - mean) / deviation of a block; also gives mean and 1 / deviation."""
        count = max(x.shape[2] * x.shape[3], 1)
        if self.centred:
            _sum_rows(xp, x, mean)
            xp.multiply(mean, 1.0 / count, out=mean)
            x = xp.subtract(x, mean, out=y)
        xp.multiply(x, x, out=square)
        _sum_rows(xp, square, inverse)
        xp.multiply(inverse, 1.0 / count, out=inverse)
        xp.add(inverse, self.epsilon, out=inverse)
        xp.sqrt(inverse, out=inverse)
        xp.reciprocal(inverse, out=inverse)
        xp.multiply(x, inverse, out=y)


class Forward(RowNorm):
    """The kernel of norms."""

    inplace = ((0, 0),)

    def kernel(self, shard: ShardView, out: Any, x: Any, scale: Any, shift: Any = None) -> None:
        if not out.size:
            return
        xp, seen = shard.xp, self.seen(x.shape)
        y, x4, scales = out.reshape(seen), x.reshape(seen), scale.reshape(*seen[1:3], 1)
        for rows, groups, (square, _, mean, inverse, _, _) in self.blocks(shard, x):
            part = y[rows, groups]
            self.normalise(xp, part, x4[rows, groups], square, mean, inverse)
            xp.multiply(part, scales[groups], out=part)
            if shift is not None:
                xp.add(part, shift.reshape(scales.shape)[groups], out=part)


class Backward(RowNorm):
    """The kernel of gradients: dx, that of scale and, if centred, that of shift."""

    linear = ((0,),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return super().dtypes(dtypes) * (3 if self.centred else 2)

    def kernel(self, shard: ShardView, out: Any, dy: Any, x: Any, scale: Any) -> None:
        xp, seen = shard.xp, self.seen(x.shape)
        for total in out[1:]:
            total.fill(0)
        if not x.size:
            return
        totals = [total.reshape(seen[1:3]) for total in out[1:]]
        dx, dy, x4 = (a.reshape(seen) for a in (out[0], dy, x))
        scales = scale.reshape(*seen[1:3], 1)
        for rows, groups, work in self.blocks(shard, x):
            part = rows, groups
            sums = [total[groups] for total in totals]
            self._block(xp, dx[part], sums, dy[part], x4[part], scales[groups], work)

    def _block(
        self, xp: Any, dx: Any, totals: list[Any], dy: Any, x: Any, scale: Any, work: list[Any]
    ) -> None:
        y, product, mean, inverse, along, channel = work
        self.normalise(xp, y, x, product, mean, inverse)
        xp.multiply(dy, y, out=product)
        for total, terms in zip(totals, (product, dy), strict=False):
            xp.add.reduce(terms, axis=(0, 3), dtype=terms.dtype, out=channel)
            xp.add(total, channel, out=total)
        # dx = (g - mean(g) - y mean(g y)) / deviation, where g = dy scale.
        share = 1.0 / (x.shape[2] * x.shape[3])
        xp.multiply(dy, scale, out=dx)
        xp.multiply(dx, y, out=product)
        _sum_rows(xp, product, along)
        xp.multiply(along, share, out=along)
        xp.multiply(y, along, out=y)
        if self.centred:
            _sum_rows(xp, dx, along)
            xp.multiply(along, share, out=along)
            xp.subtract(dx, along, out=dx)
        xp.subtract(dx, y, out=dx)
        xp.multiply(dx, inverse, out=dx)


@op
class LayerNorm(Forward):
    """Rows x (..., c) with mean 0 and variance 1, times scale (c,) plus shift (c,)."""

    epsilon: float
    rule = "... c, c, c -> ... c"
    whole = "c"

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, scale, _ = inputs
        return x.graph.add(LayerNormGrad(self.epsilon), dys[0], x, scale)


@op
class LayerNormGrad(Backward):
    """The gradients of x, scale and shift."""

    epsilon: float
    rule = "... c, ... c, c -> ... c, c, c"
    whole = "c"


@op
class RmsNorm(Forward):
    """Rows x (..., c) over the root of their mean square, times scale (c,)."""

    epsilon: float
    rule = "... c, c -> ... c"
    whole = "c"
    centred = False

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, scale = inputs
        return x.graph.add(RmsNormGrad(self.epsilon), dys[0], x, scale)


@op
class RmsNormGrad(Backward):
    """The gradients of x and scale."""

    epsilon: float
    rule = "... c, ... c, c -> ... c, c"
    whole = "c"
    centred = False


class Grouped(RowNorm):
    """Base of group norm: the channels of x (n, g * width, *size) in groups of `width`."""

    width: int

    def sizes(self) -> dict[str, int]:
        return {"c": self.width}

    def seen(self, x: Shape) -> Shape:
        return x[0], x[1] // self.width, self.width, prod(x[2:])

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x[0] in "cs")

    def full(self, shapes: tuple[Shape, ...]) -> tuple[tuple[str, ...], ...]:
        """The dims of x."""
        return ("n",), ("g", "c"), *letters("s", len(shapes[0]) - 2)


@op
class GroupNorm(Grouped, Forward):
    """Each group of channels with mean 0 and variance 1, times scale plus shift (both (c,))."""

    width: int
    epsilon: float

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = self.full(shapes)
        return Rule((full, (full[1],), (full[1],)), (full,))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, scale, _ = inputs
        return x.graph.add(GroupNormGrad(self.width, self.epsilon), dys[0], x, scale)


@op
class GroupNormGrad(Grouped, Backward):
    """The gradients of x, scale and shift."""

    width: int
    epsilon: float

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = self.full(shapes)
        return Rule((full, full, (full[1],)), (full, (full[1],), (full[1],)))


def _block(seen: Shape) -> tuple[int, int]:
    """(rows, groups) of a block: all groups of several rows, or some of one row."""
    n, groups, channels, places = seen
    group = max(channels * places, 1)
    if groups * group > _BLOCK:
        return 1, max(1, min(groups, _BLOCK // group))
    return max(1, min(n, _BLOCK // max(groups * group, 1))), groups


def _sum_rows(xp: Any, x: Any, out: Any) -> None:
    """The sum of each (row, group)."""
    xp.add.reduce(x, axis=(2, 3), dtype=x.dtype, out=out, keepdims=True)


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """Each row of x (..., c) normalised to mean 0 and variance 1, times scale plus shift."""
    return apply(LayerNorm(epsilon), x, scale, shift)


def rms_norm(x: Tensor, scale: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Each row of x (..., c) over the root of its mean square, times scale."""
    return apply(RmsNorm(epsilon), x, scale)


def group_norm(
    x: Tensor, scale: Tensor, shift: Tensor, *, groups: int, epsilon: float = 1e-5
) -> Tensor:
    """The channels of x (n, c, *size) normalised in `groups` groups, times scale plus shift."""
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise refusal(f"group_norm: {groups} groups do not divide the channels of {x}")
    return apply(GroupNorm(x.shape[1] // groups, epsilon), x, scale, shift)
