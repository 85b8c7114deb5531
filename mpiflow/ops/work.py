"""Arrays in the workspace of a kernel, which arrives as flat bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mpiflow.graph.rule import Shape

_LINE = 64
Piece = tuple[Shape, Any]
"""The shape and dtype of an array."""


def carve(work: Any, *pieces: Piece) -> list[Any]:
    """Arrays side by side in `work`, each at a multiple of 64 bytes from its start."""
    arrays, first = [], 0
    for shape, dtype in pieces:
        nbytes = _nbytes((shape, dtype))
        arrays.append(work[first : first + nbytes].view(dtype).reshape(shape))
        first += -(-nbytes // _LINE) * _LINE
    return arrays


def carved(*pieces: Piece) -> int:
    """The bytes that `carve` needs."""
    return sum(-(-_nbytes(piece) // _LINE) * _LINE for piece in pieces)


def dot_rows(xp: Any, x: Any, y: Any, out: Any) -> None:
    """The sum of x times y along the last dim, without an array of products."""
    if hasattr(xp, "vecdot"):  # since NumPy 2.0
        xp.vecdot(x, y, out=out)
    else:
        xp.einsum("...i,...i->...", x, y, out=out)


def clear_rows(xp: Any, rows: Any, which: Any) -> None:
    """Zero the rows of a matrix (n, d) that `which` (n,) marks; a row lies side by side.

    NumPy looks at a mask once for each element, so there a whole row is one element.
    """
    if xp is np and rows.size:
        whole = np.dtype((np.void, rows.shape[1] * rows.itemsize))
        np.copyto(rows.view(whole)[:, 0], np.zeros((), whole), where=which)
    else:
        xp.copyto(rows, 0, where=which[:, None])


def clamp(xp: Any, x: Any, low: float, high: float, out: Any) -> None:
    """Write x, but at least `low` and at most `high`; nan stays nan. `out` may be `x`.

    NumPy's maximum and minimum of an array and a number take one element at a time, and two to
    four times as long as its clip.
    """
    if xp is np:
        np.clip(x, low, high, out=out)
        return
    if low > -np.inf:
        x = xp.maximum(x, low, out=out)
    if high < np.inf:
        xp.minimum(x, high, out=out)


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """One call that makes all of these."""

    def run() -> None:
        for call in calls:
            call()

    return run


def bound(kernel: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """For a kernel that has nothing to prepare: given its operands, the call that runs it."""
    return partial(partial, kernel)


def _nbytes(piece: Piece) -> int:
    shape, dtype = piece
    # While a plan is made dtypes are names, and bfloat16 is none of NumPy's.
    return prod(shape) * (2 if str(dtype) == "bfloat16" else np.dtype(dtype).itemsize)
