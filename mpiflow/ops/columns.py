"""Convolution as products of matrices, a tile at a time so that little memory is needed.

A tile is a block of images with all their windows or, where one image is too large already, some
rows of windows of one image. What a kernel meets of x is copied into `columns`:

    x (n, g*c, *size) -> columns (g, c*kernel, row*image*windows[1:])
    y (g, o, row*image*windows[1:]) = w (g, o, c*kernel) @ columns

Where channels are many, it is less to copy only what one row of the kernel meets (Cho and Brand,
"MEC: memory-efficient convolution", 2017): the next row meets the same, some rows further on, and
takes no copy but another view. Then the products of all rows are summed:

    columns (g, c*kernel[1:], phase*row*image*windows[1:])
    y = the sum over rows k of w[k] (g, o, c*kernel[1:]) @ columns[:, :, from where row k begins]

A phase is what is the same row of x within a stride. Where an accelerator takes 16-bit x and w, the
result is float32, and so is what is added up; a tile is as large as if x were. Views are made once,
when a kernel is bound; a step only copies, multiplies and adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from mpiflow.graph.rule import Shape
from mpiflow.ops.phases import phases
from mpiflow.ops.tiles import Geometry, Tile, cut
from mpiflow.ops.window import offsets
from mpiflow.ops.work import Piece, carve, carved, in_turn

Kernel = Callable[[], Any]

_SUM = 1 << 20
"""Elements of a weight gradient that are summed at a time."""


def _inside(first: int, step: int, count: int, size: int) -> tuple[slice, slice]:
    """Of `count` places `step` apart: where those within `size` are, and which of them they are."""
    low = min(max(0, -(first // step)), count)
    high = min(max(low, (size - 1 - first) // step + 1), count)
    return slice(first + low * step, first + high * step, step), slice(low, high)


def _by_row(array: Any, groups: int) -> Any:
    """A view of (n, g*c, *size) as (g, c, row, n, *size[1:])."""
    split = array.reshape(len(array), groups, array.shape[1] // groups, *array.shape[2:])
    return split.transpose(1, 2, 3, 0, *range(4, split.ndim))


def _moves(at: Geometry, x: Any, first: int, columns: Any) -> Iterator[tuple[Any, Any]]:
    """Parts of the columns, and where in x they come from; x is seen by row, of all images.

    The rows of windows of these columns begin with `first`.
    """
    count = columns.shape[-len(at.windows) - 1]
    begin = first * at.stride[0] - at.padding[0][0]
    dims = list(zip(at.stride, at.padding, at.dilation, at.windows, at.size, strict=True))
    for offset in offsets(at.met):
        row, *others = (0, *offset) if at.by_rows else offset
        spans = [
            _inside(k * d - before, s, n, size)
            for k, (s, (before, _), d, n, size) in zip(others, dims[1:], strict=True)
        ]
        beside, inside = ([span[i] for span in spans] for i in (0, 1))
        start = begin + row * at.dilation[0]
        for number, phase in enumerate(at.phases):
            rows, filled = _inside(start + phase, at.stride[0], count, at.size[0])
            target = columns[(slice(None), slice(None), *offset, number, filled)]
            yield target[(..., *inside)], x[(slice(None), slice(None), rows, slice(None), *beside)]


class _Block:
    """The views of all tiles of as many images and the same rows of windows."""

    def __init__(self, at: Geometry, x: Any, y: Any, tile: Tile, work: Any) -> None:
        images, rows = (part.stop - part.start for part in (tile.images, tile.rows))
        (met, _), *others = at.pieces(images, rows, y.dtype)
        self.columns, whole, self.term = carve(work, (met, x.dtype), *others)
        self.moves: list[tuple[Any, Any]] = []
        self.padded = False
        self.rows: list[Any] = []
        if self.columns.size:
            self.moves = list(_moves(at, _by_row(x, at.groups), tile.rows.start, self.columns))
            self.padded = sum(target.size for target, _ in self.moves) < self.columns.size
            self.rows = _rows(at, self.columns, rows)
        else:
            self.flat_x = x.reshape(len(x), at.groups, at.channels, -1)
        self.product: Any = None
        if whole.size:
            self.matrix = whole
            self.product = whole.reshape(at.groups, at.outputs, rows, images, *at.windows[1:])
            self.y = _by_row(y, at.groups)[:, :, tile.rows]
        else:
            row = prod(at.windows[1:])
            flat = y.reshape(len(y), at.groups, at.outputs, -1)
            self.flat_y = flat[..., tile.rows.start * row : tile.rows.stop * row]

    def gather(self, xp: Any, images: slice) -> list[Any]:
        """What is met in each turn in a tile, (g, c*met, places)."""
        if not self.rows:
            return [self.flat_x[images.start]]
        for target, source in self.moves:
            xp.copyto(target, source[:, :, :, images])
        return self.rows

    def multiply(self, xp: Any, filters: list[Any], images: slice) -> None:
        """Write to y of a tile the sum of what the filters of each turn make of the columns."""
        target = self.flat_y[images.start] if self.product is None else self.matrix
        for k, (part, columns) in enumerate(zip(filters, self.gather(xp, images), strict=True)):
            xp.matmul(part, columns, out=self.term if k else target)
            if k:
                xp.add(target, self.term, out=target)
        if self.product is not None:
            xp.copyto(self.y[:, :, :, images], self.product)

    def taken(self, xp: Any, images: slice) -> Any:
        """What y has of a tile, (g, o, places); a copy if it has several images."""
        if self.product is None:
            return self.flat_y[images.start]
        xp.copyto(self.product, self.y[:, :, :, images])
        return self.matrix


def _rows(at: Geometry, columns: Any, rows: int) -> list[Any]:
    """The part of the columns that is met in each turn, as a matrix."""
    matrix = columns.reshape(at.groups, at.channels * prod(at.met), -1)
    run = matrix.shape[2] // (len(at.phases) * (rows + at.reach))
    begins = []
    for k in range(at.turns):
        further, phase = divmod(k * at.dilation[0], at.stride[0])
        begins.append(at.phases.index(phase) * (rows + at.reach) + further)
    return [matrix[..., begin * run : (begin + rows) * run] for begin in begins]


Steps = list[tuple[slice, _Block, bool]]
"""The images and the block of each tile, and whether its columns are to be cleared first."""


def _steps(at: Geometry, x: Any, y: Any, work: Any) -> Steps:
    blocks: dict[tuple[int, int, int], _Block] = {}
    steps: Steps = []
    last = None
    for tile in at.tiles(len(work), _summed_in(x.dtype)):
        key = tile.images.stop - tile.images.start, tile.rows.start, tile.rows.stop
        block = blocks.get(key) or blocks.setdefault(key, _Block(at, x, y, tile, work))
        steps.append((tile.images, block, block.padded and block is not last))
        last = block
    return steps


def _summed_in(dtype: Any) -> Any:
    """The dtype of sums of such products."""
    return dtype if dtype.itemsize > 2 else "float32"


def _weights(at: Geometry, dtype: Any) -> int:
    """The bytes of a copy of the weights."""
    return carved((at.weights, dtype))


def _suited(
    at: Geometry,
    beside: Callable[[Geometry, Any], int],
    dtype: Any,
    available: int | None = None,
) -> Geometry:
    """The same by rows, where that is worth its while and there is workspace for it.

    `beside` says how many bytes it takes beside a tile. The shard of a rank that is smaller than
    the largest may have less than it would take.
    """
    if at.kernel[0] == 1 or not at.worth_rows():
        return at
    rows = replace(at, by_rows=True)
    enough = available is None or beside(rows, dtype) + rows.least(dtype) <= available
    return rows if enough else at


def workspace(at: Geometry, dtype: Any) -> int:
    """What `convolve` uses best."""
    if at.pointwise:
        return 0
    at = _suited(at, _weights, dtype)
    return at.workspace(dtype) + (_weights(at, dtype) if at.by_rows else 0)


def convolve(xp: Any, work: Any, out: Any, x: Any, w: Any, at: Geometry) -> Kernel:
    """The convolution of x with w, as a call."""
    if at.pointwise:
        shape = (at.images, at.groups, -1, prod(at.size))
        return partial(xp.matmul, at.filters(w), x.reshape(shape), out=out.reshape(shape))
    at = _suited(at, _weights, out.dtype, len(work))
    if not at.by_rows:
        return _multiply(xp, work, out, x, [at.filters(w)], at)
    return _sorted(xp, work, out, x, at.split(w), at)


def _sorted(xp: Any, work: Any, y: Any, x: Any, split: Any, at: Geometry) -> Kernel:
    """The convolution with a copy of weights that are a view (g, o, c, *kernel)."""
    (weights,) = carve(work, (at.weights, x.dtype))
    filters = list(weights.reshape(at.turns, at.groups, at.outputs, -1))
    multiply = _multiply(xp, work[_weights(at, y.dtype) :], y, x, filters, at)
    return in_turn([partial(xp.copyto, weights, at.in_turns(split)), multiply])


def _multiply(xp: Any, work: Any, y: Any, x: Any, filters: list[Any], at: Geometry) -> Kernel:
    """The convolution with a matrix (g, o, c*met) for each turn."""
    steps = _steps(at, x, y, work)

    def run() -> None:
        for images, block, clear in steps:
            if clear:
                block.columns.fill(0)
            block.multiply(xp, filters, images)

    return run


def input_gradient(xp: Any, work: Any, dx: Any, dy: Any, w: Any, at: Geometry) -> Kernel:
    """The gradient of `convolve` for x, as a call."""
    if at.pointwise:
        shape = (at.images, at.groups, -1, prod(at.size))
        filters = at.filters(w).swapaxes(1, 2)
        return partial(xp.matmul, filters, dy.reshape(shape), out=dx.reshape(shape))
    split = at.split(w).swapaxes(1, 2)
    calls: list[Kernel] = []
    for phase in phases(at):
        part = dx[(..., *phase.places)]
        if phase.at is None:
            calls.append(partial(part.fill, 0))
            continue
        suited = _suited(phase.at, _weights, dx.dtype, len(work))
        calls.append(_sorted(xp, work, part, dy, split[(..., *phase.taps)], suited))
    return in_turn(calls)


def input_workspace(at: Geometry, dtype: Any) -> int:
    """What `input_gradient` uses best."""
    if at.pointwise:
        return 0
    parts = [phase.at for phase in phases(at) if phase.at is not None]
    suited = [_suited(part, _weights, dtype) for part in parts]
    return max((_weights(part, dtype) + part.workspace(dtype) for part in suited), default=0)


def weight_gradient(xp: Any, work: Any, dw: Any, x: Any, dy: Any, at: Geometry) -> Kernel:
    """The gradient of `convolve` for w, a sum over tiles, as a call."""
    at = _suited(at, _sums, dw.dtype, len(work))
    pieces = _summed(at, dw.dtype)
    sums, scratch = carve(work, *pieces)
    steps = _steps(at, x, dy, work[carved(*pieces) :])
    summed = list(sums) if at.by_rows else [at.filters(dw)]
    parts = list(cut(at.outputs, scratch.shape[1]))

    def run() -> None:
        first = True
        for images, block, clear in steps:
            if clear:
                block.columns.fill(0)
            taken = block.taken(xp, images)
            for target, columns in zip(summed, block.gather(xp, images), strict=True):
                turned = columns.swapaxes(1, 2)
                if first:
                    xp.matmul(taken, turned, out=target)
                    continue
                for part in parts:
                    added = scratch[:, : part.stop - part.start]
                    xp.matmul(taken[:, part], turned, out=added)
                    xp.add(target[:, part], added, out=target[:, part])
            first = False
        if at.by_rows:
            xp.copyto(at.in_turns(at.split(dw)), sums.reshape(at.weights))

    return run


def weight_workspace(at: Geometry, dtype: Any) -> int:
    """What `weight_gradient` uses best: a tile, sums, and rows of a sum to add."""
    at = _suited(at, _sums, dtype)
    return at.workspace(dtype) + _sums(at, dtype)


def _sums(at: Geometry, dtype: Any) -> int:
    return carved(*_summed(at, dtype))


def _summed(at: Geometry, dtype: Any) -> list[Piece]:
    """The sum of each turn, unless it is dw itself, and rows to add to one."""
    width = at.channels * prod(at.met)
    rows = max(1, min(at.outputs, _SUM // max(at.groups * width, 1)))
    sums: Shape = (at.turns, at.groups, at.outputs, width) if at.by_rows else (0,)
    return [(sums, dtype), ((at.groups, rows, width), dtype)]
