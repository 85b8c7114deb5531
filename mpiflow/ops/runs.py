"""Sums over runs of equal numbers: what many lookups of one row give becomes one row.

Ids are sorted together with their positions; then the rows of each run are added in the order of
their positions, so that a sum does not depend on timing, and not on how the ids came to be here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from mpiflow.graph.rule import Shape
from mpiflow.ops.work import Piece, carve, carved

_BLOCK = 1 << 18
"""Elements of rows that are summed at a time."""
BLOCK_ROWS = 1 << 11
"""The most rows of a block."""
_SHORT = 8
"""Runs of up to so many rows are added together, the first of each, then the second."""
Lane = Any
"""Scratch for the rows of a block."""


def block_rows(width: int) -> int:
    """How many rows of this width are worked on at a time."""
    return max(1, min(BLOCK_ROWS, _BLOCK // max(width, 1)))


def block_size(count: int, width: int) -> int:
    """Elements that hold a block of `count` rows; less for fewer rows and for narrower ones."""
    # Not the product of a block's rows and width, which could be larger for a smaller width.
    return min(count * width, BLOCK_ROWS * width, max(width, _BLOCK))


def run_bytes(values: Shape, dtype: str, lanes: int) -> int:
    """The workspace of `runs` for values (n, d), with so many blocks of rows."""
    return carved(*_pieces(prod(values[:-1]), values[-1], dtype, lanes))


def _pieces(count: int, width: int, dtype: Any, lanes: int) -> tuple[Piece, ...]:
    keys = ((count,), "int64")
    return keys, keys, *(((block_size(count, width),), dtype) for _ in range(lanes))


def runs(
    xp: Any, work: Any, values: Any, ids: Any, start: int, held: int, lanes: int
) -> Iterator[tuple[Any, Any, list[Lane]]]:
    """Blocks of (row - start, where its value is), sorted, of the ids that lie in `held` rows.

    With each block come `lanes` of scratch for its rows. `values` are (n, d), `ids` are (n,).
    """
    width = values.shape[1]
    keys, scratch, shift, blocks = sorted_keys(xp, work, values, ids, start, held, lanes)
    found = int(xp.searchsorted(keys, held << shift))  # the ids of other ranks are at the end
    step = block_rows(width)
    for first in range(0, found, step):
        block = keys[first : min(first + step, found)]
        rows = [lane[: len(block) * width].reshape(len(block), width) for lane in blocks]
        target = xp.right_shift(block, shift, out=scratch[: len(block)])
        yield target, xp.bitwise_and(block, (1 << shift) - 1, out=block), rows


def sorted_keys(
    xp: Any, work: Any, values: Any, ids: Any, start: int, held: int, lanes: int
) -> tuple[Any, Any, int, list[Any]]:
    """What `_sort` gives: keys, as many numbers of scratch, the shift; and the blocks behind."""
    count, width = values.shape
    keys, scratch, *blocks = carve(work, *_pieces(count, width, values.dtype, lanes))
    return keys, scratch, _sort(xp, keys, scratch, ids, start, held), blocks


def add_rows(xp: Any, work: Any, out: Any, values: Any, ids: Any, start: int) -> None:
    """Add the values (n, d) of each id, in order, to its row of `out` (rows from `start` on), zero.

    Ids of other rows count for nothing. The workspace is that of `run_bytes` with three lanes.
    """
    held = len(out)
    if hasattr(xp, "sum_sorted"):  # a GPU, which must not be asked how many there are
        keys, place, shift, _ = sorted_keys(xp, work, values, ids, start, held, lanes=3)
        xp.right_shift(keys, shift, out=place)
        xp.sum_sorted(out, values, keys, place, shift, held)
        return
    for target, place, (sums, *lanes) in runs(xp, work, values, ids, start, held, lanes=3):
        starts = sum_runs(xp, target, values, place, sums, lanes)
        # The first run may go on from the block before.
        xp.add(sums[0], out[int(target[0])], out=sums[0])
        out[target[starts]] = sums[: len(starts)]


def _sort(xp: Any, keys: Any, scratch: Any, ids: Any, start: int, held: int) -> int:
    """Fill `keys` with (row - start) << shift | position, sorted, and give the shift.

    Ids of rows that are not held count as the row `held`.
    """
    shift = max(len(keys) - 1, 0).bit_length()
    xp.copyto(keys, ids, casting="unsafe")
    xp.subtract(keys, start, out=keys)
    # One unsigned comparison finds those below 0 and those from `held` on.
    xp.minimum(keys.view(xp.uint64), held, out=keys.view(xp.uint64))
    xp.left_shift(keys, shift, out=keys)
    scratch.fill(1)
    scratch[:1] = 0
    xp.add.accumulate(scratch, out=scratch)
    xp.add(keys, scratch, out=keys)
    keys.sort()
    return shift


def sum_runs(xp: Any, target: Any, values: Any, place: Any, sums: Any, lanes: list[Lane]) -> Any:
    """Write the sum of each run of equal targets to `sums`; gives the first position of each.

    `place` says where the value of each target is.
    """
    starts = xp.flatnonzero(xp.diff(target, prepend=-1))
    lengths = xp.diff(starts, append=len(target))
    xp.take(values, place[starts], axis=0, out=sums[: len(starts)], mode="clip")
    short = xp.flatnonzero(lengths <= _SHORT)
    for i in range(1, _SHORT):
        short = short[lengths[short] > i]
        if not len(short):
            break
        a, b = (lane[: len(short)] for lane in lanes)
        xp.take(sums, short, axis=0, out=a, mode="clip")
        xp.take(values, place[starts[short] + i], axis=0, out=b, mode="clip")
        sums[short] = xp.add(a, b, out=a)
    long = xp.flatnonzero(lengths > _SHORT).tolist()
    if long:
        begin, end = int(starts[long[0]]), int(starts[long[-1]] + lengths[long[-1]])
        rows = xp.take(values, place[begin:end], axis=0, out=lanes[0][: end - begin], mode="clip")
        for run in long:
            first = int(starts[run]) - begin
            xp.add.reduce(rows[first : first + int(lengths[run])], axis=0, out=sums[run])
    return starts


def sum_run(xp: Any, values: Any, place: Any, out: Any, lane: Lane) -> None:
    """Write the sum of the values at these places."""
    rows = xp.take(values, place, axis=0, out=lane[: len(place)], mode="clip")
    xp.add.reduce(rows, axis=0, out=out)
