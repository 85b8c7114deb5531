"""Runs a kernel with another array module than NumPy, to compare what it gives with NumPy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiflow.exec.bind import Shard
from mpiflow.graph.op import Op
from mpiflow.testing.kernels import Array, dtypes_of, poisoned, shapes_of, whole_starts, workspace


def run_with(
    op: Op,
    arrays: Sequence[Array],
    xp: Any,
    put: Callable[[Array], Any] = np.copy,
    get: Callable[[Any], Array] = np.asarray,
) -> list[Array]:
    """The outputs of the kernel on one rank, as `testing.kernels.whole` gives them.

    The kernel has the workspace of an accelerator. `put` and `get` bring arrays to the memory that
    `xp` works in, and back. Outputs hold NaN, or a value that nobody computes, before the kernel
    writes them.
    """
    shapes = op.infer(shapes_of(arrays))
    dtypes = op.dtypes(dtypes_of(arrays))
    work, _ = workspace(op, shapes_of(arrays), shapes, dtypes[0], on_device=True)
    held = [put(array) for array in arrays]
    outs = [put(poisoned(shape, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    shard = Shard(xp, put(work), whole_starts(arrays, shapes), True)
    call = op.bind(shard, outs[0] if len(outs) == 1 else tuple(outs), *held)
    with np.errstate(all="ignore"):
        call()
    return [get(out) for out in outs]


def deviation(actual: Array, expected: Array) -> float:
    """The norm of the difference over that of what is expected; inf where one has nan alone."""
    a, b = (np.asarray(x, np.float64) for x in (actual, expected))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return np.inf
    difference = np.where(a == b, 0.0, a - b)
    scale = np.linalg.norm(np.nan_to_num(b, posinf=0, neginf=0)) or 1.0
    return float(np.linalg.norm(np.nan_to_num(difference)) / scale)
