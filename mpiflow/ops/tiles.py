"""Tiles of a convolution: which images and windows are worked on at a time, in how much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

from mpiflow.graph.rule import Shape
from mpiflow.ops.window import Padding
from mpiflow.ops.work import Piece, carved

_LIMIT = 4 << 20
"""Bytes of workspace that a tile may fill, if it is not one row of windows."""
_CACHE = 1 << 20
"""Bytes that a tile of several images may fill, or as many as the weights that it is read with."""
_LONG_ROW = 12
"""So many windows in a row are copied fast."""
_TURN = 1 << 20
"""Elements of the largest weight that is copied, turned round, for the gradient of x."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Images and rows of windows, as spans."""

    images: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class Geometry:
    """A convolution on local arrays; channels and outputs are those of one group."""

    images: int
    groups: int
    channels: int
    outputs: int
    size: Shape
    kernel: Shape
    windows: Shape
    stride: Shape
    padding: Padding
    dilation: Shape

    @property
    def sampled(self) -> bool:
        """Whether a window is one element of x."""
        return prod(self.kernel) == 1 and not any(map(any, self.padding))

    @property
    def pointwise(self) -> bool:
        """Whether x itself is the columns."""
        return self.sampled and prod(self.stride) == 1

    def extent(self, rows: int) -> Shape:
        """The part of the padded x that `rows` rows of windows cover."""
        counts = (rows, *self.windows[1:])
        steps = zip(counts, self.stride, self.kernel, self.dilation, strict=True)
        return tuple((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in steps)

    @property
    def images_behind(self) -> bool:
        """Whether images lie behind the windows in a tile, not before them."""
        return self.windows[-1] < _LONG_ROW

    def pieces(self, images: int, rows: int, dtype: Any) -> list[Piece]:
        """The arrays for a tile: field, cols and product, empty where arrays serve as they are."""
        head = (self.groups, self.channels)
        extent, places = self.extent(rows), (rows, *self.windows[1:])
        if self.images_behind:
            extent, places = (*extent, images), (*places, images)
        else:
            extent, places = (images, *extent), (images, *places)
        field = (0,) if self.sampled else (*head, *extent)
        cols = (0,) if self.pointwise and images == 1 else (*head, *self.kernel, *places)
        product = (0,) if images == 1 else (self.groups, self.outputs, *places)
        return [(field, dtype), (cols, dtype), (product, dtype)]

    def by_image(self, array: Any) -> Any:
        """A view of a field, cols or product whose first dim is the images."""
        behind = self.images_behind
        axis = array.ndim - 1 - (0 if behind else len(self.windows))
        return array.transpose(axis, *(i for i in range(array.ndim) if i != axis))

    def least(self, dtype: Any) -> int:
        """The workspace for one row of windows of one image."""
        return carved(*self.pieces(1, 1, dtype))

    def workspace(self, dtype: Any) -> int:
        """Enough for the whole, but not more than the limits or one row of windows."""
        most = carved(*self.pieces(max(self.images, 1), self.windows[0], dtype))
        one = carved(*self.pieces(1, self.windows[0], dtype))
        cached = max(one, _CACHE, carved((self.weights, dtype)))
        return max(self.least(dtype), min(most, cached, _LIMIT))

    @property
    def turned(self) -> Self | None:
        """The convolution of dy with turned weights that gives dx, where it is worth its while.

        It gathers where the other way adds, but copies the weights, and needs a stride of 1.
        """
        reach = [(k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True)]
        pads = [
            (n - before, n - behind)
            for n, (before, behind) in zip(reach, self.padding, strict=True)
        ]
        if self.sampled or prod(self.stride) > 1 or min(map(min, pads)) < 0:
            return None
        if prod(self.weights) > _TURN:
            return None
        return replace(
            self, channels=self.outputs, outputs=self.channels, size=self.windows,
            windows=self.size, padding=tuple(pads),
        )  # fmt: skip

    @property
    def weights(self) -> Shape:
        """The shape of the weights by group: (g, o, c, *kernel)."""
        return self.groups, self.outputs, self.channels, *self.kernel

    def filters(self, w: Any) -> Any:
        """Weights as one matrix (o, c*kernel) a group."""
        return w.reshape(self.groups, self.outputs, self.channels * prod(self.kernel))

    def tiles(self, available: int, dtype: Any) -> Iterator[Tile]:
        """Tiles of about equal size, the largest that fit."""

        def fits(images: int, rows: int) -> bool:
            return carved(*self.pieces(images, rows, dtype)) <= available

        if fits(1, self.windows[0]):
            images = _largest(self.images, lambda n: fits(n, self.windows[0]))
            for part in cut(self.images, images):
                yield Tile(part, slice(0, self.windows[0]))
            return
        rows = _largest(self.windows[0], lambda n: fits(1, n))
        for image in range(self.images):
            for part in cut(self.windows[0], rows):
                yield Tile(slice(image, image + 1), part)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, at least 1, by bisection."""
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def cut(size: int, most: int) -> Iterator[slice]:
    """Spans of about equal length, none longer than `most`."""
    count = -(-size // most)
    for i in range(count):
        yield slice(size * i // count, size * (i + 1) // count)
