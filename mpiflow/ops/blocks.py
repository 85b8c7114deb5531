"""Work in blocks that stay in cache, with scratch from the declared workspace.

Scratch is float32, or float64 for float64 arrays. Narrower floats are widened block by block, so
that a kernel written for these blocks rounds once, at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from mpiflow.graph.op import ShardView
from mpiflow.graph.rule import Shape

BLOCK = 1 << 15
"""Elements of a block: a few of them fit in the second-level cache, and a call pays off."""


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def is_widened(out: Any) -> bool:
    """Whether blocks of `out` are copies, made as they are walked; else they are views."""
    return bool(out.dtype.name != _wide(out.dtype.name))


def flat_bytes(shape: Shape, dtype: str, *, scratch: int, operands: int) -> int:
    """The workspace of `flat_blocks`; `operands` counts the output and the inputs."""
    return _bytes(min(prod(shape), BLOCK), dtype, scratch, operands)


def flat_blocks(
    shard: ShardView, out: Any, arrays: tuple[Any, ...], *, scratch: int
) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """(output, inputs, scratch) for every block of arrays of one shape, all of one length."""
    if not out.size:
        return
    operands = [a.reshape(-1) for a in (out, *arrays)]
    yield from _walk(shard.work, operands, min(out.size, BLOCK), scratch)


def row_bytes(shape: Shape, dtype: str, *, scratch: int, columns: int, operands: int) -> int:
    """The workspace of `row_blocks`."""
    length = shape[-1] if shape else 1
    rows = min(prod(shape[:-1]), _rows(length))
    column = columns * rows * (8 if dtype == "float64" else 4)
    return _bytes(rows * length, dtype, scratch, operands) + column


def row_blocks(
    shard: ShardView, out: Any, arrays: tuple[Any, ...], *, scratch: int, columns: int
) -> Iterator[tuple[Any, list[Any], list[Any], list[Any]]]:
    """(output, inputs, scratch, columns) for every block of whole rows of the last dim.

    A column is scratch of one number a row, of shape (rows, 1).
    """
    if not out.size:
        return
    length = out.shape[-1]
    operands = [a.reshape(-1, length) for a in (out, *arrays)]
    rows = min(len(operands[0]), _rows(length))
    wide = _wide(out.dtype.name)
    size = columns * rows * (8 if wide == "float64" else 4)
    column = shard.work[:size].view(wide).reshape(columns, rows, 1)
    for y, xs, lanes in _walk(shard.work[size:], operands, rows, scratch):
        yield y, xs, lanes, [c[: len(y)] for c in column]


def _rows(length: int) -> int:
    return max(1, BLOCK // max(length, 1))


def _bytes(size: int, dtype: str, scratch: int, operands: int) -> int:
    wide = _wide(dtype)
    lanes = scratch + (operands if dtype != wide else 0)
    return lanes * size * (8 if wide == "float64" else 4)


def _walk(
    work: Any, operands: list[Any], step: int, scratch: int
) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Blocks of `step` entries of the first dim."""
    out = operands[0]
    wide = _wide(out.dtype.name)
    narrow = out.dtype.name != wide
    count = scratch + (len(operands) if narrow else 0)
    nbytes = _bytes(step * prod(out.shape[1:]), out.dtype.name, scratch, len(operands))
    lanes = work[:nbytes].view(wide).reshape(count, step, *out.shape[1:]) if count else ()
    for first in range(0, len(out), step):
        pieces = [a[first : first + step] for a in operands]
        here = [lane[: len(pieces[0])] for lane in lanes]
        if not narrow:
            yield pieces[0], pieces[1:], here
            continue
        y, xs = here[scratch], here[scratch + 1 :]
        for x, piece in zip(xs, pieces[1:], strict=True):
            x[...] = piece
        yield y, xs, here[:scratch]
        pieces[0][...] = y
