"""Pooling over windows of the spatial dims of x (n, c, *size).

Padding never counts: a maximum ignores it, a mean divides by the number of elements of x that are
in the window (PyTorch's `count_include_pad=False`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import mul
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.index import argmax, pick
from mpiflow.ops.reduction import mean
from mpiflow.ops.shape import reshape
from mpiflow.ops.window import (
    Padding,
    PaddingLike,
    Windowed,
    clipped,
    count_windows,
    letters,
    offsets,
    pad_windows,
    per_dim,
)
from mpiflow.ops.work import Piece, carve, carved

Parts = list[tuple[Any, Any]]
"""For each place in the window, where x has it and which windows do."""

_BLOCK = 1 << 16
"""Elements of x that are worked on at a time, about what a core's cache holds."""


class Pooling(Windowed):
    """Base of pooling ops and their gradients: batch and channels may be split."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes)

    def windows(self, shapes: tuple[Shape, ...]) -> Shape:
        for (before, behind), k in zip(self.padding, self.window, strict=True):
            if max(before, behind) >= k:
                raise GraphError(
                    f"{self.name}: padding {self.padding} leaves windows of {self.window} empty"
                )
        ones = (1,) * len(self.window)
        size = shapes[0][2:]
        return count_windows(self.name, size, self.window, self.stride, self.padding, ones)

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x[0] in "st")

    def operands(
        self, shapes: tuple[Shape, ...]
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
        """The dims of x and y."""
        dims = len(self.window)
        if any(len(shape) != dims + 2 for shape in shapes):
            raise GraphError(
                f"{self.name} over {dims} spatial dims takes {dims + 2} dims,"
                f" not {' and '.join(map(str, shapes))}"
            )
        head = (("n",), ("c",))
        return (*head, *letters("s", dims)), (*head, *letters("t", dims))

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return min(map(prod, (*inputs, *outputs))) * prod(self.window)

    def parts(self, size: Shape, windows: Shape) -> Parts:
        """For each place in the window, where x has it and which windows do."""
        return [
            clipped(offset, size, windows, self.stride, self.padding)
            for offset in offsets(self.window)
        ]

    def shares(self, xp: Any, size: Shape, windows: Shape, dtype: Any) -> list[Any]:
        """One over the elements of x in each window, as a factor for each dim that is padded."""
        factors = []
        for dim, (n, t, k, s, pads) in enumerate(
            zip(size, windows, self.window, self.stride, self.padding, strict=True)
        ):
            if any(pads):
                first = xp.arange(t) * s - pads[0]
                count = xp.minimum(first + k, n) - xp.maximum(first, 0)
                share = (1.0 / count).astype(dtype)
                factors.append(share.reshape(-1, *(1,) * (len(size) - dim - 1)))
            else:
                factors.append(1.0 / k)
        return factors


@op
class MaxPool(Pooling):
    """The maximum of every window."""

    precision = "follow"
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        x, y = self.operands(shapes)
        return Rule((x,), (y,))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        op = MaxPoolGrad(self.window, self.stride, self.padding)
        return (apply(op, dys[0], inputs[0], outputs[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        out.fill(-shard.xp.inf)
        for place, windows in self.parts(x.shape[2:], out.shape[2:]):
            shard.xp.maximum(out[windows], x[place], out=out[windows])


@op
class MaxPoolGrad(Pooling):
    """dy, x and y of `MaxPool` -> dx: each dy goes to the first maximum of its window."""

    precision = "follow"
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        x, y = self.operands(shapes)
        return Rule((y, x, y), (x,))

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        return (shapes[1],)

    @property
    def disjoint(self) -> bool:
        """Whether no element of x lies in two windows."""
        return all(s >= k for s, k in zip(self.stride, self.window, strict=True))

    def pieces(self, planes: int, windows: Shape) -> list[Piece]:
        """Masks of the windows or, where these overlap, also places in the window and in x."""
        shape = (planes, *windows)
        if self.disjoint:
            return [(shape, bool), (shape, bool)]
        code = "uint8" if prod(self.window) < 256 else "int32"
        return [(shape, bool), *[(shape, code)] * 2, *[(shape, "int64")] * 3]

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved(*self.pieces(_planes(inputs[1], _BLOCK), inputs[0][2:]))

    def kernel(self, shard: ShardView, out: Any, dy: Any, x: Any, y: Any) -> None:
        xp, size, windows = shard.xp, x.shape[2:], y.shape[2:]
        covered = tuple(t * k for t, k in zip(windows, self.window, strict=True))
        if self.stride != self.window or size != covered:
            out.fill(0)
        if not dy.size:
            return
        step, parts = _planes(x.shape, _BLOCK), self.parts(size, windows)
        flat = [a.reshape(-1, *a.shape[2:]) for a in (out, dy, x, y)]
        pieces = carve(shard.work, *self.pieces(min(step, len(flat[0])), windows))
        if not self.disjoint:
            _number(xp, pieces[-1], size, self.stride, self.padding)
        for first in range(0, len(flat[0]), step):
            block = [a[first : first + step] for a in flat]
            scratch = [a[: len(block[0])] for a in pieces]
            (self._give if self.disjoint else self._add)(xp, parts, *block, *scratch)

    def _give(
        self, xp: Any, parts: Parts, dx: Any, dy: Any, x: Any, y: Any, match: Any, left: Any
    ) -> None:
        """Write dy where x is the first maximum of its window, and zero at its other places."""
        left.fill(True)
        for place, windows in parts:
            _maxima(xp, x[place], y[windows], match, windows)
            xp.logical_and(match, left, out=match)
            xp.logical_xor(left, match, out=left)
            xp.multiply(dy[windows], match[windows], out=dx[place])

    def _add(
        self, xp: Any, parts: Parts, dx: Any, dy: Any, x: Any, y: Any, match: Any, number: Any,
        highest: Any, index: Any, where: Any, base: Any,
    ) -> None:  # fmt: skip
        """Add dy where x is the first maximum of its window.

        The places of a window are numbered from the last, so that the highest number is the first.
        """
        highest.fill(0)
        for count, (place, windows) in zip(range(len(parts), 0, -1), parts, strict=True):
            _maxima(xp, x[place], y[windows], match, windows)
            xp.multiply(match.view("uint8"), count, out=number, dtype=number.dtype)
            xp.maximum(highest, number, out=highest)
        steps = _steps(x.shape[1:])
        from_end = [sum(map(mul, place, steps)) for place in reversed(offsets(self.window))]
        xp.copyto(index, highest)
        xp.take(xp.asarray([0, *from_end]), index, out=where, mode="clip")
        xp.add(where, base, out=where)
        xp.add.at(dx.reshape(-1), where.reshape(-1), dy.reshape(-1))


def _maxima(xp: Any, x: Any, y: Any, match: Any, windows: Any) -> None:
    """Where x is y, the maximum of its window, in these windows; all of one that has a NaN.

    Long runs are fastest, so that whole masks are worked on.
    """
    match.fill(True)
    xp.less(x, y, out=match[windows])
    xp.logical_not(match, out=match)


def _steps(size: Shape) -> list[int]:
    """How far apart elements are that are neighbours along each dim."""
    return [prod(size[dim + 1 :]) for dim in range(len(size))]


def _number(xp: Any, base: Any, size: Shape, stride: Shape, padding: Padding) -> None:
    """The positions at which the windows of several planes begin, in all of their elements."""
    windows = base.shape[1:]
    base[...] = (xp.arange(len(base)) * prod(size)).reshape(-1, *[1] * len(size))
    for dim, (step, s, (before, _)) in enumerate(zip(_steps(size), stride, padding, strict=True)):
        begins = (xp.arange(windows[dim]) * s - before) * step
        xp.add(base, begins.reshape(-1, *[1] * (len(size) - dim - 1)), out=base)


@op
class MeanPool(Pooling):
    """The mean of every window, over those of its elements that lie in x."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        x, y = self.operands(shapes)
        return Rule((x,), (y,))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        op = MeanPoolGrad(inputs[0].shape[2:], self.window, self.stride, self.padding)
        return (apply(op, dys[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        out.fill(0)
        for place, windows in self.parts(x.shape[2:], out.shape[2:]):
            shard.xp.add(out[windows], x[place], out=out[windows])
        for factor in self.shares(shard.xp, x.shape[2:], out.shape[2:], x.dtype):
            shard.xp.multiply(out, factor, out=out)


@op
class MeanPoolGrad(Pooling):
    """dy of `MeanPool` -> dx (n, c, *size): every element gets its shares of the windows."""

    size: tuple[int, ...]
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        x, y = self.operands(shapes)
        return Rule((y,), (x,))

    def sizes(self) -> dict[str, int]:
        return {f"s{i}": n for i, n in enumerate(self.size)}

    def windows(self, shapes: tuple[Shape, ...]) -> Shape:
        return shapes[0][2:]

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved(((_planes(outputs[0], _BLOCK), *inputs[0][2:]), dtype))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(MeanPool(self.window, self.stride, self.padding), dys[0]),)

    def kernel(self, shard: ShardView, out: Any, dy: Any) -> None:
        out.fill(0)
        if not dy.size:
            return
        xp = shard.xp
        factors = self.shares(xp, out.shape[2:], dy.shape[2:], dy.dtype)
        parts = self.parts(out.shape[2:], dy.shape[2:])
        dx, dy = (a.reshape(-1, *a.shape[2:]) for a in (out, dy))
        step = _planes(out.shape, _BLOCK)
        for first in range(0, len(dx), step):
            target, source = dx[first : first + step], dy[first : first + step]
            (share,) = carve(shard.work, (source.shape, dy.dtype))
            for factor in factors:
                source = xp.multiply(source, factor, out=share)
            for place, windows in parts:
                xp.add(target[place], share[windows], out=target[place])


def _planes(x: Shape, elements: int) -> int:
    """How many of the (n * c) planes of x hold about so many elements; at least one."""
    return max(1, min(prod(x[:2]), elements // max(prod(x[2:]), 1)))


Numbers = int | Sequence[int]


def _settings(
    x: Tensor, what: str, window: Numbers, stride: Numbers | None, padding: PaddingLike
) -> tuple[Shape, Shape, Padding]:
    dims = x.ndim - 2
    if dims < 1:
        raise refusal(f"{what} takes x (n, c, *size), not {x}")
    windows = per_dim(window, dims, f"{what}: window")
    strides = windows if stride is None else per_dim(stride, dims, f"{what}: stride")
    return windows, strides, pad_windows(padding, x.shape[2:], windows, strides, (1,) * dims)


def max_pool(
    x: Tensor, window: Numbers, *, stride: Numbers | None = None, padding: PaddingLike = 0
) -> Tensor:
    """The maximum of windows of x (n, c, *size); their stride is their size by default."""
    return apply(MaxPool(*_settings(x, "max_pool", window, stride, padding)), x)


def mean_pool(
    x: Tensor, window: Numbers, *, stride: Numbers | None = None, padding: PaddingLike = 0
) -> Tensor:
    """The mean of windows of x (n, c, *size), of what lies in x; see `max_pool`."""
    return apply(MeanPool(*_settings(x, "mean_pool", window, stride, padding)), x)


def global_mean_pool(x: Tensor) -> Tensor:
    """The mean of every channel: x (n, c, *size) -> (n, c)."""
    return mean(x, tuple(range(2, x.ndim)))


def global_max_pool(x: Tensor) -> Tensor:
    """The maximum of every channel: x (n, c, *size) -> (n, c)."""
    places = reshape(x, (*x.shape[:2], prod(x.shape[2:])))
    return pick(places, argmax(places))
