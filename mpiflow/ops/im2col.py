"""Convolution as a matrix product over columns, a tile at a time so that little memory is needed.

A tile is a block of images with all their windows or, where one image is too large already, some
rows of windows of one image. Its part of x is copied with the padding into `field`, the windows of
that into `cols`:

    x (n, g*c, *size) -> field (g, c, image, *extent) -> cols (g, c*kernel, image*windows)
    product (g, o, image*windows) = w (g, o, c*kernel) @ cols

Where a row of windows is short, the images lie behind the windows, so that NumPy copies long runs
also where an image is 7 x 7. Views are made once, when a kernel is bound; a step only copies and
multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

from mpiflow.ops.tiles import Geometry, Tile, cut
from mpiflow.ops.window import offsets
from mpiflow.ops.work import carve, carved, in_turn

Kernel = Callable[[], Any]

_SUM = 1 << 20
"""Elements of a weight gradient that are summed at a time."""


def _overlap(at: Geometry, rows: slice) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """What of x lies in the field of these rows of windows, and where in the field that is."""
    inside, place = [], []
    origin = [-before for before, _ in at.padding]
    origin[0] += rows.start * at.stride[0]
    for first, n, length in zip(origin, at.size, at.extent(rows.stop - rows.start), strict=True):
        start, stop = max(first, 0), max(min(first + length, n), 0)
        inside.append(slice(start, max(start, stop)))
        place.append(slice(start - first, max(start, stop) - first))
    return tuple(inside), tuple(place)


def _shifts(at: Geometry, field: Any, cols: Any) -> Iterator[tuple[Any, Any]]:
    """For each place in the window, the views of field and cols that belong to it, by image."""
    counts = cols.shape[-len(at.windows) :]
    for offset in offsets(at.kernel):
        part = tuple(
            slice(i * d, i * d + (n - 1) * s + 1, s)
            for i, d, n, s in zip(offset, at.dilation, counts, at.stride, strict=True)
        )
        yield field[(..., *part)], cols[(slice(None), slice(None), slice(None), *offset)]


class _Block:
    """The views of all tiles of as many images and the same rows of windows.

    x (n, g*c, *size) and y (n, g*o, *windows) are seen by image: (n, g, c or o, ...).
    """

    def __init__(self, at: Geometry, x: Any, y: Any, tile: Tile, work: Any) -> None:
        images, rows = (part.stop - part.start for part in (tile.images, tile.rows))
        field, cols, product = carve(work, *at.pieces(images, rows, x.dtype))
        inside, place = _overlap(at, tile.rows)
        self.field, self.padded = field, False
        self.x = x.reshape(len(x), at.groups, at.channels, *at.size)[(..., *inside)]
        self.place: Any = None
        self.moves: list[tuple[Any, Any]] = []
        self.columns = cols.reshape(at.groups, at.channels * prod(at.kernel), -1)
        if not cols.size:
            self.columns = None
            self.flat_x = x.reshape(len(x), at.groups, at.channels, -1)
        elif at.sampled:
            self.x = self.x[(..., *(slice(None, None, step) for step in at.stride))]
            self.place = at.by_image(
                cols.reshape(*cols.shape[:2], *cols.shape[2 + len(at.kernel) :])
            )
        else:
            self.place = at.by_image(field)[(..., *place)]
            self.padded = self.place.size < field.size
            self.moves = list(_shifts(at, at.by_image(field), at.by_image(cols)))
        row = prod(at.windows[1:])
        self.y = y.reshape(len(y), at.groups, at.outputs, *at.windows)[:, :, :, tile.rows]
        flat = y.reshape(len(y), at.groups, at.outputs, -1)
        self.flat_y = flat[..., tile.rows.start * row : tile.rows.stop * row]
        self.product = at.by_image(product) if product.size else None
        self.matrix = product.reshape(at.groups, at.outputs, -1)

    def gather(self, xp: Any, images: slice) -> Any:
        """The columns of a tile, (g, c*kernel, places)."""
        if self.place is None:
            return self.flat_x[images.start]
        xp.copyto(self.place, self.x[images])
        for source, target in self.moves:
            xp.copyto(target, source)
        return self.columns

    def multiply(self, xp: Any, filters: Any, columns: Any, images: slice) -> None:
        """Write the filters' products with the columns to y."""
        if self.product is None:
            xp.matmul(filters, columns, out=self.flat_y[images.start])
        else:
            xp.matmul(filters, columns, out=self.matrix)
            xp.copyto(self.y[images], self.product)

    def taken(self, xp: Any, images: slice) -> Any:
        """What y has of a tile, (g, o, places); a copy if it has several images."""
        if self.product is None:
            return self.flat_y[images.start]
        xp.copyto(self.product, self.y[images])
        return self.matrix

    def add(self, xp: Any, images: slice) -> None:
        """Add the columns to the elements of x that they came from."""
        target = self.x[images]
        if self.moves:
            self.field.fill(0)
        for place, added in self.moves:
            xp.add(place, added, out=place)
        xp.add(target, self.place, out=target)  # tiles of rows overlap


Steps = list[tuple[slice, _Block, bool]]
"""The images and the block of each tile, and whether the block's field is to be cleared first."""


def _steps(at: Geometry, x: Any, y: Any, work: Any) -> Steps:
    blocks: dict[tuple[int, int, int], _Block] = {}
    steps: Steps = []
    last = None
    for tile in at.tiles(len(work), x.dtype):
        key = tile.images.stop - tile.images.start, tile.rows.start, tile.rows.stop
        block = blocks.get(key) or blocks.setdefault(key, _Block(at, x, y, tile, work))
        steps.append((tile.images, block, block.padded and block is not last))
        last = block
    return steps


def workspace(at: Geometry, dtype: Any) -> int:
    """What `convolve` uses best."""
    return 0 if at.pointwise else at.workspace(dtype)


def convolve(xp: Any, work: Any, out: Any, x: Any, w: Any, at: Geometry) -> Kernel:
    """The convolution of x with w, as a call."""
    filters = at.filters(w)
    if at.pointwise:
        shape = (at.images, at.groups, -1, prod(at.size))
        return partial(xp.matmul, filters, x.reshape(shape), out=out.reshape(shape))
    steps = _steps(at, x, out, work)

    def run() -> None:
        for images, block, clear in steps:
            if clear:
                block.field.fill(0)
            block.multiply(xp, filters, block.gather(xp, images), images)

    return run


def input_gradient(xp: Any, work: Any, dx: Any, dy: Any, w: Any, at: Geometry) -> Kernel:
    """The gradient of `convolve` for x, as a call."""
    turned = at.turned
    piece = (turned.weights if turned else (0,), dx.dtype)
    if turned is None or len(work) < carved(piece) + turned.least(dx.dtype):
        return _add_columns(xp, work, dx, dy, w, at)
    (weights,) = carve(work, piece)
    back = (slice(None, None, -1),) * len(at.kernel)
    source = w.reshape(at.weights).swapaxes(1, 2)[(..., *back)]
    gathered = convolve(xp, work[carved(piece) :], dx, dy, weights, turned)
    return in_turn([partial(xp.copyto, weights, source), gathered])


def input_workspace(at: Geometry, dtype: Any) -> int:
    """What `input_gradient` uses best."""
    if at.pointwise:
        return 0
    turned = at.turned
    if turned is None:
        return at.workspace(dtype)
    return carved((turned.weights, dtype)) + turned.workspace(dtype)


def _add_columns(xp: Any, work: Any, dx: Any, dy: Any, w: Any, at: Geometry) -> Kernel:
    """The gradient for x by columns that are added to where they came from."""
    filters = at.filters(w).swapaxes(1, 2)
    if at.pointwise:
        shape = (at.images, at.groups, -1, prod(at.size))
        return partial(xp.matmul, filters, dy.reshape(shape), out=dx.reshape(shape))
    steps = _steps(at, dx, dy, work)

    def run() -> None:
        dx.fill(0)
        for images, block, _ in steps:
            xp.matmul(filters, block.taken(xp, images), out=block.columns)
            block.add(xp, images)

    return run


def weight_gradient(xp: Any, work: Any, dw: Any, x: Any, dy: Any, at: Geometry) -> Kernel:
    """The gradient of `convolve` for w, a sum over tiles, as a call."""
    summed = at.filters(dw)
    rows = _summed_rows(at)
    piece = ((at.groups, rows, summed.shape[2]), x.dtype)
    (scratch,) = carve(work, piece)
    steps = _steps(at, x, dy, work[carved(piece) :])
    parts = [(part, summed[:, part], scratch[:, : part.stop - part.start])
             for part in cut(at.outputs, rows)]  # fmt: skip

    def run() -> None:
        first = True
        for images, block, clear in steps:
            if clear:
                block.field.fill(0)
            columns = block.gather(xp, images).swapaxes(1, 2)
            taken = block.taken(xp, images)
            if first:
                xp.matmul(taken, columns, out=summed)
                first = False
                continue
            for part, target, added in parts:
                xp.matmul(taken[:, part], columns, out=added)
                xp.add(target, added, out=target)

    return run


def weight_workspace(at: Geometry, dtype: Any) -> int:
    """What `weight_gradient` needs: a tile, and rows of the gradient to sum."""
    rows = (at.groups, _summed_rows(at), at.channels * prod(at.kernel))
    return at.workspace(dtype) + carved((rows, dtype))


def _summed_rows(at: Geometry) -> int:
    row = at.groups * at.channels * prod(at.kernel)
    return max(1, min(at.outputs, _SUM // max(row, 1)))
