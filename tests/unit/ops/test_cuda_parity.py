"""Every op's kernel, with what it calls on a GPU: within CuPy's means, and with NumPy's results."""

import numpy as np
import pytest
from gpu_stand_in import StandIn, device, host
from op_examples import EXAMPLES

import mpiflow.ops  # noqa: F401  (registers the ops)
from mpiflow.exec.cuda_arrays import Arrays
from mpiflow.testing.devices import deviation, run_with
from mpiflow.testing.kernels import whole

xp = Arrays(StandIn())


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_kernels_keep_to_what_a_gpu_has(name):
    for op, arrays in EXAMPLES[name]:
        narrow = any(array.dtype == np.float32 for array in arrays)
        given = run_with(op, arrays, xp, lambda array: device(array.copy()), host)
        for actual, expected in zip(given, whole(op, arrays), strict=True):
            assert actual.dtype == expected.dtype
            assert deviation(actual, expected) < (1e-6 if narrow else 1e-12)
