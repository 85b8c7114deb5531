"""Convolution as a matrix product over columns, a tile at a time so that little memory is needed.

A tile is a block of images with all their windows or, where one image is too large already, some
rows of windows of one image. Its part of x is copied with the padding into `field`, the windows of
that into `cols`:

    x (n, g*c, *size) -> field (g, c, *extent, image) -> cols (g, c*kernel, windows*image)
    product (g, o, windows*image) = w (g, o, c*kernel) @ cols

The images come last, so that NumPy copies long runs also where an image is 7 x 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

from mpiflow.graph.rule import Shape
from mpiflow.ops.window import Padding, offsets
from mpiflow.ops.work import Piece, carve, carved

_LIMIT = 4 << 20
"""Bytes of workspace that a tile may fill, if it is not one row of windows."""
_TURN = 1 << 20
"""Elements of the largest weight that is copied, turned round, for the gradient of x."""
_SUM = 1 << 20
"""Elements of a weight gradient that are summed at a time."""


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

    def pieces(self, images: int, rows: int, dtype: Any) -> list[Piece]:
        """The arrays for a tile: field, cols and product, empty where arrays serve as they are."""
        head = (self.groups, self.channels)
        places = (rows, *self.windows[1:], images)
        field = (0,) if self.sampled else (*head, *self.extent(rows), images)
        cols = (0,) if self.pointwise and images == 1 else (*head, *self.kernel, *places)
        product = (0,) if images == 1 else (self.groups, self.outputs, *places)
        return [(field, dtype), (cols, dtype), (product, dtype)]

    def least(self, dtype: Any) -> int:
        """The workspace for one row of windows of one image."""
        return carved(*self.pieces(1, 1, dtype))

    def workspace(self, dtype: Any) -> int:
        """Enough for the whole, but not more than the limit or one row of windows."""
        most = carved(*self.pieces(max(self.images, 1), self.windows[0], dtype))
        return max(self.least(dtype), min(most, _LIMIT))

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

    def tiles(self, available: int, dtype: Any) -> Iterator[Tile]:
        """Tiles of about equal size, the largest that fit."""

        def fits(images: int, rows: int) -> bool:
            return carved(*self.pieces(images, rows, dtype)) <= available

        if fits(1, self.windows[0]):
            images = _largest(self.images, lambda n: fits(n, self.windows[0]))
            for part in _cut(self.images, images):
                yield Tile(part, slice(0, self.windows[0]))
            return
        rows = _largest(self.windows[0], lambda n: fits(1, n))
        for image in range(self.images):
            for part in _cut(self.windows[0], rows):
                yield Tile(slice(image, image + 1), part)

    def arrays(self, tile: Tile, work: Any, dtype: Any) -> list[Any]:
        """Field, cols and product in the workspace."""
        images, rows = (part.stop - part.start for part in (tile.images, tile.rows))
        return carve(work, *self.pieces(images, rows, dtype))

    def covered(self, x: Any, field: Any, tile: Tile) -> tuple[Any, Any]:
        """The elements of x that lie in the field, as views of both with equal shapes."""
        extent = self.extent(tile.rows.stop - tile.rows.start)
        images = x[tile.images]
        images = images.reshape(len(images), self.groups, self.channels, *self.size)
        inside, place = [], []
        origin = [-before for before, _ in self.padding]
        origin[0] += tile.rows.start * self.stride[0]
        for first, n, length in zip(origin, self.size, extent, strict=True):
            start, stop = max(first, 0), max(min(first + length, n), 0)
            inside.append(slice(start, max(start, stop)))
            place.append(slice(start - first, max(start, stop) - first))
        moved = images.transpose(*range(1, images.ndim), 0)
        part = moved[(..., *inside, slice(None))]
        return part, part if self.sampled else field[(..., *place, slice(None))]

    def shifts(self, field: Any, cols: Any) -> Iterator[tuple[Any, Any]]:
        """For each place in the window, the views of field and cols that belong to it."""
        counts = cols.shape[-1 - len(self.kernel) : -1]
        for offset in offsets(self.kernel):
            part = tuple(
                slice(i * d, i * d + (n - 1) * s + 1, s)
                for i, d, n, s in zip(offset, self.dilation, counts, self.stride, strict=True)
            )
            yield field[(..., *part, slice(None))], cols[(slice(None), slice(None), *offset)]

    def gather(self, xp: Any, x: Any, tile: Tile, field: Any, cols: Any) -> Any:
        """Fill the columns of a tile; as matrices (g, c*kernel, places)."""
        if not cols.size:
            return x[tile.images].reshape(self.groups, self.channels, -1)
        source, target = self.covered(x, field, tile)
        if self.sampled:
            field = source
        else:
            if target.shape != field.shape:
                field.fill(0)
            xp.copyto(target, source)
        for source, target in self.shifts(field, cols):
            xp.copyto(target, source)
        return self.matrix(cols)

    def matrix(self, cols: Any) -> Any:
        """Columns as one matrix a group."""
        return cols.reshape(self.groups, self.channels * prod(self.kernel), -1)

    def filters(self, w: Any) -> Any:
        """Weights as one matrix (o, c*kernel) a group."""
        return w.reshape(self.groups, self.outputs, self.channels * prod(self.kernel))

    def places(self, y: Any, tile: Tile) -> Any:
        """The tile's part of y (n, g*o, *windows) as (g, o, *windows, image)."""
        images = y[tile.images]
        images = images.reshape(len(images), self.groups, self.outputs, *self.windows)
        return images[:, :, :, tile.rows].transpose(*range(1, images.ndim), 0)

    def flat(self, y: Any, tile: Tile) -> Any:
        """The tile's part of y, a tile of one image, as matrices (g, o, places)."""
        row = prod(self.windows[1:])
        places = y[tile.images.start].reshape(self.groups, self.outputs, -1)
        return places[:, :, tile.rows.start * row : tile.rows.stop * row]


def workspace(at: Geometry, dtype: Any) -> int:
    """What `convolve` uses best."""
    return 0 if at.pointwise else at.workspace(dtype)


def convolve(xp: Any, work: Any, out: Any, x: Any, w: Any, at: Geometry) -> None:
    """The convolution of x with w."""
    filters = at.filters(w)
    if at.pointwise:
        shape = (at.images, at.groups, -1, prod(at.size))
        xp.matmul(filters, x.reshape(shape), out=out.reshape(shape))
        return
    for tile in at.tiles(len(work), x.dtype):
        field, cols, product = at.arrays(tile, work, x.dtype)
        columns = at.gather(xp, x, tile, field, cols)
        if not product.size:
            xp.matmul(filters, columns, out=at.flat(out, tile))
        else:
            xp.matmul(filters, columns, out=product.reshape(at.groups, at.outputs, -1))
            xp.copyto(at.places(out, tile), product)


def input_gradient(xp: Any, work: Any, dx: Any, dy: Any, w: Any, at: Geometry) -> None:
    """The gradient of `convolve` for x."""
    turned = at.turned
    piece = (turned.weights if turned else (0,), dx.dtype)
    if turned and len(work) >= carved(piece) + turned.least(dx.dtype):
        (weights,) = carve(work, piece)
        back = (slice(None, None, -1),) * len(at.kernel)
        xp.copyto(weights, w.reshape(at.weights).swapaxes(1, 2)[(..., *back)])
        convolve(xp, work[carved(piece) :], dx, dy, weights, turned)
    else:
        _add_columns(xp, work, dx, dy, w, at)


def input_workspace(at: Geometry, dtype: Any) -> int:
    """What `input_gradient` uses best."""
    if at.pointwise:
        return 0
    turned = at.turned
    if turned is None:
        return at.workspace(dtype)
    return carved((turned.weights, dtype)) + turned.workspace(dtype)


def _add_columns(xp: Any, work: Any, dx: Any, dy: Any, w: Any, at: Geometry) -> None:
    """The gradient for x by columns that are added to where they came from."""
    filters = at.filters(w).swapaxes(1, 2)
    if at.pointwise:
        shape = (at.images, at.groups, -1, prod(at.size))
        xp.matmul(filters, dy.reshape(shape), out=dx.reshape(shape))
        return
    dx.fill(0)
    for tile in at.tiles(len(work), dx.dtype):
        field, cols, product = at.arrays(tile, work, dx.dtype)
        xp.matmul(filters, _matrices(xp, dy, tile, product, at), out=at.matrix(cols))
        target, source = at.covered(dx, field, tile)
        if at.sampled:
            field = target
        else:
            field.fill(0)
        for place, added in at.shifts(field, cols):
            xp.add(place, added, out=place)
        if not at.sampled:
            xp.add(target, source, out=target)  # tiles of rows overlap


def weight_gradient(xp: Any, work: Any, dw: Any, x: Any, dy: Any, at: Geometry) -> None:
    """The gradient of `convolve` for w: a sum over tiles."""
    summed = at.filters(dw)
    rows = _summed_rows(at)
    piece = ((at.groups, rows, summed.shape[2]), x.dtype)
    (scratch,), work = carve(work, piece), work[carved(piece) :]
    for number, tile in enumerate(at.tiles(len(work), x.dtype)):
        field, cols, product = at.arrays(tile, work, x.dtype)
        columns = at.gather(xp, x, tile, field, cols).swapaxes(1, 2)
        dys = _matrices(xp, dy, tile, product, at)
        if not number:
            xp.matmul(dys, columns, out=summed)
            continue
        for part in _cut(at.outputs, rows):
            target = summed[:, part]
            added = scratch[:, : target.shape[1]]
            xp.matmul(dys[:, part], columns, out=added)
            xp.add(target, added, out=target)


def weight_workspace(at: Geometry, dtype: Any) -> int:
    """What `weight_gradient` needs: a tile, and rows of the gradient to sum."""
    rows = (at.groups, _summed_rows(at), at.channels * prod(at.kernel))
    return at.workspace(dtype) + carved((rows, dtype))


def _summed_rows(at: Geometry) -> int:
    row = at.groups * at.channels * prod(at.kernel)
    return max(1, min(at.outputs, _SUM // max(row, 1)))


def _matrices(xp: Any, dy: Any, tile: Tile, product: Any, at: Geometry) -> Any:
    """The tile's part of dy as matrices (g, o, places), copied if it has several images."""
    if not product.size:
        return at.flat(dy, tile)
    xp.copyto(product, at.places(dy, tile))
    return product.reshape(at.groups, at.outputs, -1)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, at least 1, by bisection."""
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _cut(size: int, most: int) -> Iterator[slice]:
    """Spans of about equal length, none longer than `most`."""
    count = -(-size // most)
    for i in range(count):
        yield slice(size * i // count, size * (i + 1) // count)
