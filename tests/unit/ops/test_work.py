"""What kernels share to work in their workspace."""

import numpy as np
import pytest

from mpiflow.ops.work import clamp, clear_rows


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (4, 0), (0, 2)])
def test_the_rows_that_are_marked_become_zero_and_no_others(dtype, shape):
    rows = np.arange(1, 1 + shape[0] * shape[1]).reshape(shape).astype(dtype)
    which = np.arange(shape[0]) % 2 == 0
    expected = np.where(which[:, None], 0, rows)
    clear_rows(np, rows, which)
    np.testing.assert_array_equal(rows, expected)


def test_rows_apart_in_memory_are_cleared_alone():
    table = np.ones((4, 6), np.float32)
    clear_rows(np, table[:, :4], np.array([False, True, False, True]))
    assert table.sum(1).tolist() == [6, 2, 6, 2]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("low", "high"), [(0, np.inf), (-np.inf, 0), (0, 1.5)])
def test_what_is_clamped_is_what_maximum_and_minimum_give(dtype, low, high):
    x = np.array([-np.inf, -2, -0.0, 0, 0.5, 2, np.inf, np.nan], dtype)
    out = np.full_like(x, 7)
    clamp(np, x, low, high, out)
    np.testing.assert_array_equal(out, np.minimum(np.maximum(x, low), high))
    clamp(np, x, low, high, x)
    np.testing.assert_array_equal(x, out)
