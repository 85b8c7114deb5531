"""Convolution where each channel is a group of its own: sums of shifted and scaled images.

There is no product of matrices to be had, so nothing is gained by columns. The padded images of a
channel lie one behind the other, so that a place in the window is one shift of all of them, and
every operation is one long run:

    total[p] = sum over places k in the window of w[k] * field[p + shift(k)]

That also computes windows that nobody asked for (those that a stride leaves out, and those that
reach over the edge of an image); they are left where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod
from operator import mul
from typing import Any

from mpiflow.graph.rule import Shape
from mpiflow.ops.tiles import Geometry
from mpiflow.ops.window import offsets
from mpiflow.ops.work import Piece, bound, carve, carved, dot_rows

_BLOCK = 1 << 17
"""Elements of a field, if it is not one image: calls pay off, and caches hold three."""
_STRIDE = 4
"""The largest product of strides: so many windows are computed for one that is wanted."""


@dataclass(frozen=True, slots=True)
class Depthwise(Geometry):
    """A convolution of one channel and one output a group, on local arrays."""

    def worth_rows(self) -> bool:
        """It has a way of its own."""
        return False

    @property
    def padded(self) -> Shape:
        """The size of an image with its padding."""
        return tuple(n + sum(pads) for n, pads in zip(self.size, self.padding, strict=True))

    @property
    def displacements(self) -> list[tuple[tuple[int, ...], int]]:
        """Each place in the window, and how far it lies behind the first."""
        steps = [prod(self.padded[dim + 1 :]) for dim in range(len(self.kernel))]
        steps = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        return [(offset, sum(map(mul, offset, steps))) for offset in offsets(self.kernel)]

    @property
    def block(self) -> tuple[int, int]:
        """(groups, images) of a field."""
        plane = max(prod(self.padded), 1)
        images = max(1, min(self.images, _BLOCK // plane))
        groups = max(1, min(self.groups, _BLOCK // (plane * max(self.images, 1))))
        return groups, images

    def pieces(self, images: int, rows: int, dtype: Any) -> list[Piece]:
        """Three fields for as many groups as there are rows, and a number for each."""
        field = (rows, images * prod(self.padded))
        return [(field, dtype)] * 3 + [((rows,), dtype)]

    def blocks(self, work: Any, dtype: Any) -> Iterator[tuple[slice, slice, list[Any]]]:
        """Spans of images and of groups, with the workspace for each."""
        count, images = self.block
        while count > 1 and carved(*self.pieces(images, count, dtype)) > len(work):
            count -= 1  # the plan has what the largest shard asks for
        for first in range(0, self.groups, count):
            groups = slice(first, min(first + count, self.groups))
            for begin in range(0, self.images, images):
                span = slice(begin, min(begin + images, self.images))
                size = span.stop - span.start, groups.stop - groups.start
                yield span, groups, carve(work, *self.pieces(*size, dtype))

    def inside(self, field: Any) -> Any:
        """The images in a field, without their padding: (image, group, *size)."""
        pairs = zip(self.padding, self.size, strict=True)
        return self._images(field)[(..., *(slice(before, before + n) for (before, _), n in pairs))]

    def starts(self, field: Any) -> Any:
        """Where the windows of the images in a field begin: (image, group, *windows)."""
        pairs = zip(self.windows, self.stride, strict=True)
        return self._images(field)[(..., *(slice(0, (n - 1) * s + 1, s) for n, s in pairs))]

    def _images(self, field: Any) -> Any:
        return field.reshape(len(field), -1, *self.padded).swapaxes(0, 1)


def depthwise(at: Geometry) -> Depthwise | None:
    """The convolution of many groups as one of single channels, if it is one that gains by it."""
    if at.channels != 1 or at.outputs != 1 or at.sampled or prod(at.stride) > _STRIDE:
        return None
    return Depthwise(*(getattr(at, field.name) for field in fields(at)))


def workspace(at: Depthwise, dtype: Any) -> int:
    """What each of the three functions needs."""
    groups, images = at.block
    return carved(*at.pieces(images, groups, dtype))


input_workspace = weight_workspace = workspace


@bound
def convolve(xp: Any, work: Any, out: Any, x: Any, w: Any, at: Depthwise) -> None:
    """The convolution of x with w."""
    shifts = at.displacements
    for images, groups, (field, total, term, _) in at.blocks(work, x.dtype):
        _place(xp, field, at.inside(field), x[images, groups])
        length = field.shape[1] - shifts[-1][1]
        target, added = total[:, :length], term[:, :length]
        for offset, shift in shifts:
            weight = w[(groups, slice(None), *offset)]
            source = field[:, shift : shift + length]
            xp.multiply(source, weight, out=added if shift else target)
            if shift:
                xp.add(target, added, out=target)
        xp.copyto(out[images, groups], at.starts(total))


@bound
def input_gradient(xp: Any, work: Any, dx: Any, dy: Any, w: Any, at: Depthwise) -> None:
    """The gradient of `convolve` for x: each dy goes to where its window is."""
    shifts = at.displacements
    for images, groups, (given, total, term, _) in at.blocks(work, dx.dtype):
        given.fill(0)
        xp.copyto(at.starts(given), dy[images, groups])
        total.fill(0)
        length = given.shape[1] - shifts[-1][1]
        for offset, shift in shifts:
            weight = w[(groups, slice(None), *offset)]
            xp.multiply(given[:, :length], weight, out=term[:, :length])
            target = total[:, shift : shift + length]
            xp.add(target, term[:, :length], out=target)
        xp.copyto(dx[images, groups], at.inside(total))


@bound
def weight_gradient(xp: Any, work: Any, dw: Any, x: Any, dy: Any, at: Depthwise) -> None:
    """The gradient of `convolve` for w: a product of dy with each shift of the field."""
    dw.fill(0)
    shifts = at.displacements
    for images, groups, (field, given, _, sums) in at.blocks(work, x.dtype):
        _place(xp, field, at.inside(field), x[images, groups])
        given.fill(0)
        xp.copyto(at.starts(given), dy[images, groups])
        length = field.shape[1] - shifts[-1][1]
        for offset, shift in shifts:
            dot_rows(xp, field[:, shift : shift + length], given[:, :length], sums)
            target = dw[(groups, 0, *offset)]
            xp.add(target, sums, out=target)


def _place(xp: Any, field: Any, inside: Any, images: Any) -> None:
    if inside.size != field.size:
        field.fill(0)
    xp.copyto(inside, images)
