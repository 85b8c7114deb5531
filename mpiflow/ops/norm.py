"""Norms whose statistics lie within a row: LayerNorm, RMSNorm, GroupNorm.

Arrays are seen as (n, groups, c, places): each (row, group) has its own mean and variance, each
(group, c) its own scale and shift. Kernels work on blocks that a core's cache holds, so an
activation is read from memory once and written once. Variances are of the centred values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.window import letters
from mpiflow.ops.work import Piece, carve, carved, dot_rows, in_turn

_BLOCK = 1 << 16
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

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        self.bind(shard, out, *arrays)()

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved(*self.pieces(*_block(self.seen(outputs[0])), outputs[0], dtype))

    def pieces(self, rows: int, groups: int, x: Shape, dtype: Any) -> list[Piece]:
        """What a block of (rows, groups) needs.

        Two blocks; ones; two numbers a row and four; one a channel, for all rows and for each.
        """
        channels, places = self.seen(x)[2:]
        count, length = rows * groups, channels * places
        each = (2, rows, groups, channels) if places > 1 else (0,)
        shapes: list[Shape] = [(count, length), (count, length), (max(length, rows),)]
        shapes += [(4, count), (groups * channels,), each]
        return [(shape, dtype) for shape in shapes]

    def blocks(self, shard: ShardView, x: Any) -> Iterator[tuple[slice, slice, list[Any]]]:
        """Spans of rows and of groups, with the workspace for each."""
        n, groups = self.seen(x.shape)[:2]
        rows, width = _block(self.seen(x.shape))
        while rows > 1 and carved(*self.pieces(rows, width, x.shape, x.dtype)) > len(shard.work):
            rows -= 1  # the plan has what the largest shard asks for
        size, work = (0, 0), []
        for first in range(0, n, rows):
            for group in range(0, groups, width):
                span = slice(first, min(first + rows, n)), slice(group, min(group + width, groups))
                height, across = (part.stop - part.start for part in span)
                if (height, across) != size:
                    size = height, across
                    work = carve(shard.work, *self.pieces(*size, x.shape, x.dtype))
                yield *span, work

    def centre(self, xp: Any, y: Any, x: Any, ones: Any, mean: Any, inverse: Any) -> Any:
        """x - mean of (rows, elements), in y, or x if nothing is subtracted.

        Also gives mean and 1 / deviation. Products with ones are sums at the speed of BLAS.
        """
        count = x.shape[1]
        ones.fill(1)
        if self.centred:
            xp.matmul(x, ones[:count], mean)
            xp.multiply(mean, 1.0 / count, mean)
            x = xp.subtract(x, mean[:, None], y)
        dot_rows(xp, x, x, inverse)
        xp.multiply(inverse, 1.0 / count, inverse)
        xp.add(inverse, self.epsilon, inverse)
        xp.sqrt(inverse, inverse)
        xp.reciprocal(inverse, inverse)
        return x


class Forward(RowNorm):
    """The kernel of norms."""

    inplace = ((0, 0),)

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        x, *factors = arrays
        if not out.size:
            return in_turn([])
        seen = self.seen(x.shape)
        y4, x4 = out.reshape(seen), x.reshape(seen)
        scales, *shifts = (a.reshape(*seen[1:3], 1) for a in factors)
        calls = []
        for rows, groups, (_, _, ones, (mean, inverse, _, _), _, _) in self.blocks(shard, x):
            y = y4[rows, groups]
            flat = (-1, seen[2] * seen[3])
            views = y, y.reshape(flat), x4[rows, groups].reshape(flat), ones, mean, inverse
            shift = shifts[0][groups] if shifts else None
            calls.append(partial(self._block, shard.xp, *views, scales[groups], shift))
        return in_turn(calls)

    def _block(
        self, xp: Any, y4: Any, y: Any, x: Any, ones: Any, mean: Any, inverse: Any, scale: Any,
        shift: Any,
    ) -> None:  # fmt: skip
        z = self.centre(xp, y, x, ones, mean, inverse)
        xp.multiply(z, inverse[:, None], y)
        xp.multiply(y4, scale, y4)
        if shift is not None:
            xp.add(y4, shift, y4)


class Backward(RowNorm):
    """The kernel of gradients: dx, that of scale and, if centred, that of shift."""

    linear = ((0,),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return super().dtypes(dtypes) * (3 if self.centred else 2)

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        dy, x, scale = arrays
        seen = self.seen(x.shape)
        calls: list[Callable[[], Any]] = [partial(total.fill, 0) for total in out[1:]]
        if not x.size:
            return in_turn(calls)
        totals = [total.reshape(seen[1:3]) for total in out[1:]]
        dx, dy, x4 = (a.reshape(seen) for a in (out[0], dy, x))
        scales = scale.reshape(seen[1:3])
        for rows, groups, work in self.blocks(shard, x):
            part = rows, groups
            sums = [total[groups] for total in totals]
            views = dx[part], sums, dy[part], x4[part], scales[groups], work
            calls.append(partial(self._block, shard.xp, *views))
        return in_turn(calls)

    def _block(
        self, xp: Any, dx: Any, totals: list[Any], dy: Any, x: Any, scale: Any, work: list[Any]
    ) -> None:
        y, product, ones, (mean, inverse, along, across), channel, each = work
        flat, count = y.shape, 1.0 / y.shape[1]
        z = self.centre(xp, y, x.reshape(flat), ones, mean, inverse)
        xp.multiply(dy.reshape(flat), z, product)
        # What each row gives to each channel: of dy z, and of dy.
        slopes, shifts = product.reshape(dy.shape), dy
        if dy.shape[3] > 1:
            slopes, shifts = (
                xp.matmul(a, ones[: dy.shape[3]], b)
                for a, b in zip((slopes, dy), each, strict=True)
            )
        slopes, shifts = (a.reshape(dy.shape[:3]) for a in (slopes, shifts))
        weights = inverse.reshape(dy.shape[:2]), ones[: len(dy)]
        # dx = (g - mean(g) - z mean(g z) / deviation^2) / deviation, where g = dy scale.
        for total, rows, sums, weight in zip(
            totals, (slopes, shifts), (along, across), weights, strict=False
        ):
            _add_channels(xp, total, rows, weight, channel)
            _sum_channels(xp, rows, scale, sums)
            xp.multiply(sums, count, sums)
        xp.multiply(along, inverse, along)
        xp.multiply(along, inverse, along)
        xp.multiply(dy, scale[:, :, None], dx)
        dx = dx.reshape(flat)
        xp.multiply(z, along[:, None], y)
        xp.subtract(dx, y, dx)
        if self.centred:
            xp.subtract(dx, across[:, None], dx)
        xp.multiply(dx, inverse[:, None], dx)


def _add_channels(xp: Any, total: Any, rows: Any, weight: Any, channel: Any) -> None:
    """Add the rows (n, groups, c), by their weights (n[, groups]), to the total (groups, c)."""
    if rows.shape[1] == 1:
        xp.matmul(weight.reshape(-1), rows[:, 0], channel)
    elif weight.ndim == 1:
        xp.matmul(weight, rows.reshape(len(rows), -1), channel)
    else:
        xp.einsum("ng,ngc->gc", weight, rows, out=channel.reshape(total.shape))
    xp.add(total, channel.reshape(total.shape), total)


def _sum_channels(xp: Any, rows: Any, scale: Any, out: Any) -> None:
    """The rows (n, groups, c) times the scale (groups, c), summed over c: out (n * groups,)."""
    if rows.shape[1] == 1:
        xp.matmul(rows[:, 0], scale[0], out)
    else:
        xp.einsum("ngc,gc->ng", rows, scale, out=out.reshape(rows.shape[:2]))


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
