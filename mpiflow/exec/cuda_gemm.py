"""Matrix products on a GPU: what cuBLAS is asked for, worked out from shapes and strides alone.

cuBLAS takes matrices in column order: what it calls C is our C transposed, so that it is asked for
C' = B' A'. No operand is ever copied: a transposed view is taken as it lies, and a batch that is
not one stride apart is taken in several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from mpiflow.errors import PlanError

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix as it lies: (rows, columns) with `leading` elements from row to row.

    `turned`: from column to column instead. `step` is from one matrix of the batch to the next.
    """

    turned: bool
    leading: int
    step: int


@dataclass(frozen=True, slots=True)
class Product:
    """`count` products (m, k) by (k, n) in one call, and a call for each of `starts`.

    A start says at which element of the left, of the right and of the result the call begins.
    `exchanged`: the result is written transposed, so that left and right have changed places.
    """

    m: int
    n: int
    k: int
    left: Operand
    right: Operand
    out: Operand
    count: int
    starts: tuple[tuple[int, int, int], ...]
    exchanged: bool


@lru_cache(maxsize=4096)
def plan_product(shapes: tuple[Dims, Dims, Dims], strides: tuple[Dims, Dims, Dims]) -> Product:
    """How to multiply left by right into the result, as `numpy.matmul` would.

    Strides are in elements. PlanError where an operand lies in a way that cuBLAS cannot take.
    """
    (a, b, out), (sa, sb, so) = shapes, strides
    if len(b) == 1:
        b, sb, out, so = (*b, 1), (*sb, 0), (*out, 1), (*so, 0)
    if len(a) == 1:
        a, sa = (1, *a), (0, *sa)
        out, so = (*out[:-1], 1, out[-1]), (*so[:-1], 0, so[-1])
    (m, k), n = a[-2:], b[-1]
    lies = [_lie(shape[-2:], stride[-2:]) for shape, stride in ((a, sa), (b, sb), (out, so))]
    if None in lies:
        raise PlanError(
            f"a product of arrays {a} and {b} into {out}, with strides of {sa}, {sb} and {so}"
            " elements, is none that cuBLAS takes without a copy; one dim of each must be"
            " contiguous: copy the array in the model"
        )
    batch = out[:-2]
    steps = [
        _batch_strides(batch, shape[:-2], stride[:-2])
        for shape, stride in ((a, sa), (b, sb), (out, so))
    ]
    count, inner, starts = _calls(batch, steps)
    left, right, result = (
        Operand(turned, leading, step)
        for (turned, leading), step in zip((lie for lie in lies if lie), inner, strict=True)
    )
    if not result.turned:
        return Product(m, n, k, left, right, result, count, starts, exchanged=False)
    return Product(
        n, m, k, _turned(right), _turned(left), _turned(result), count,
        tuple((second, first, last) for first, second, last in starts), exchanged=True,
    )  # fmt: skip


def _turned(operand: Operand) -> Operand:
    return Operand(not operand.turned, operand.leading, operand.step)


def _lie(shape: Dims, strides: Dims) -> tuple[bool, int] | None:
    """Whether a matrix lies column by column, and how far apart; None if in neither order."""
    (rows, columns), (down, along) = shape, strides
    if (along == 1 or columns <= 1) and (down >= columns or rows <= 1):
        return False, max(down if rows > 1 else columns, columns, 1)
    if (down == 1 or rows <= 1) and (along >= rows or columns <= 1):
        return True, max(along if columns > 1 else rows, rows, 1)
    return None


def _batch_strides(batch: Dims, shape: Dims, strides: Dims) -> Dims:
    """The strides of an operand along the dims of the batch: 0 where it is the same for all."""
    missing = len(batch) - len(shape)
    own = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return (0,) * missing + own


def _calls(
    batch: Dims, strides: Sequence[Dims]
) -> tuple[int, Dims, tuple[tuple[int, int, int], ...]]:
    """How many products a call does, the steps between them, and where each call begins."""
    dims: list[tuple[int, Dims]] = []
    for size, steps in zip(batch, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if dims and all(
            outer == size * step for outer, step in zip(dims[-1][1], steps, strict=True)
        ):
            dims[-1] = dims[-1][0] * size, steps
        else:
            dims.append((size, steps))
    if not dims:
        return prod(batch), (0, 0, 0), ((0, 0, 0),)
    together = max(range(len(dims)), key=lambda i: dims[i][0])
    count, inner = dims.pop(together)
    starts = []
    for place in product(*(range(size) for size, _ in dims)):
        first, second, last = (
            sum(i * steps[operand] for i, (_, steps) in zip(place, dims, strict=True))
            for operand in range(3)
        )
        starts.append((first, second, last))
    return count, inner, tuple(starts)
