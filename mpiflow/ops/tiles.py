"""Tiles of a convolution: which images and windows are worked on at a time, in how much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from mpiflow.graph.rule import Shape
from mpiflow.ops.window import Padding
from mpiflow.ops.work import Piece, carved

_LIMIT = 4 << 20
"""Bytes of workspace that a tile may fill, if it is not one row of windows."""
_CACHE = 1 << 19
"""Bytes that a tile of several images may fill, or as many as the weights that it is read with."""
_LONG = 32
"""So many windows along the only dim are better left side by side than put behind one another."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Images and rows of windows, as spans."""

    images: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class Geometry:
    """A convolution on local arrays; channels and outputs are those of one group.

    `apart`: elements of y are not side by side. `by_rows`: the rows of a kernel take turns, so that
    columns have what one of them meets; otherwise they have all that the kernel meets.
    """

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
    apart: bool = False
    by_rows: bool = False

    @property
    def sampled(self) -> bool:
        """Whether a window is one element of x."""
        return prod(self.kernel) == 1 and not any(map(any, self.padding))

    @property
    def pointwise(self) -> bool:
        """Whether x itself is the columns."""
        return self.sampled and prod(self.stride) == 1 and not self.apart

    @property
    def turns(self) -> int:
        """How many products are summed for a window."""
        return self.kernel[0] if self.by_rows else 1

    @property
    def met(self) -> Shape:
        """The part of a kernel that takes its turn."""
        return self.kernel[1:] if self.by_rows else self.kernel

    @property
    def phases(self) -> list[int]:
        """The rows of the kernel begin in as many different rows of x, counted within a stride."""
        return sorted({i * self.dilation[0] % self.stride[0] for i in range(self.turns)})

    @property
    def together(self) -> int:
        """The images that a tile may have; with one dim their elements come to lie side by side."""
        return 1 if len(self.windows) == 1 and self.windows[0] > _LONG else max(self.images, 1)

    @property
    def reach(self) -> int:
        """The rows of a phase beyond those of the windows."""
        return (self.turns - 1) * self.dilation[0] // self.stride[0]

    def pieces(self, images: int, rows: int, dtype: Any) -> list[Piece]:
        """The arrays for a tile: columns, product and term; empty where one serves as it is."""
        places = images * prod(self.windows[1:])
        columns: Shape = (self.groups, self.channels, *self.met, len(self.phases),
                          rows + self.reach, images, *self.windows[1:])  # fmt: skip
        matrix: Shape = (self.groups, self.outputs, rows * places)
        if self.pointwise and images == 1:
            columns = (0,)
        whole = matrix if images > 1 or self.apart else (0,)
        return [(columns, dtype), (whole, dtype), (matrix if self.turns > 1 else (0,), dtype)]

    def least(self, dtype: Any) -> int:
        """The workspace for one row of windows of one image."""
        return carved(*self.pieces(1, 1, dtype))

    def workspace(self, dtype: Any) -> int:
        """Enough for the whole, but not more than the limits or one row of windows."""
        most = carved(*self.pieces(self.together, self.windows[0], dtype))
        one = carved(*self.pieces(1, self.windows[0], dtype))
        cached = max(one, _CACHE, carved((self.weights, dtype)))
        return max(self.least(dtype), min(most, cached, _LIMIT))

    @property
    def weights(self) -> Shape:
        """The shape of the weights by turn and group: (turn, g, o, c, *met)."""
        return self.turns, self.groups, self.outputs, self.channels, *self.met

    def split(self, w: Any) -> Any:
        """A view of weights (g*o, c, *kernel) as (g, o, c, *kernel)."""
        return w.reshape(self.groups, self.outputs, self.channels, *self.kernel)

    def in_turns(self, split: Any) -> Any:
        """A view of weights (g, o, c, *kernel) as `weights` says."""
        if not self.by_rows:
            return split[None]
        return split.transpose(3, 0, 1, 2, *range(4, split.ndim))

    def worth_rows(self) -> bool:
        """Whether turns save more columns than it costs to sort the weights and add the products.

        These count twice, as what is saved copies fast.
        """
        places, turns = self.images * prod(self.windows), self.kernel[0]
        saved = self.channels * prod(self.kernel) * (turns - 1) // turns
        added = self.outputs * (turns - 1)
        return saved * places > 2 * (added * places + prod(self.weights))

    def filters(self, w: Any) -> Any:
        """Weights as one matrix (o, c*kernel) a group."""
        return w.reshape(self.groups, self.outputs, self.channels * prod(self.kernel))

    def tiles(self, available: int, dtype: Any) -> Iterator[Tile]:
        """Tiles of about equal size, the largest that fit."""

        def fits(images: int, rows: int) -> bool:
            return carved(*self.pieces(images, rows, dtype)) <= available

        if fits(1, self.windows[0]):
            images = _largest(self.together, lambda n: fits(n, self.windows[0]))
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
