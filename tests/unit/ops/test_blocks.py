"""Kernels that work in blocks: many blocks, narrow floats, and accuracy in the tails."""

import math

import numpy as np
import pytest
from op_harness import whole
from transformer_examples import f, g

from mpiflow.graph.op import build_op
from mpiflow.ops.blocks import BLOCK

FUNCTIONS = ("Gelu", "GeluTanh", "Sigmoid", "Silu", "Softplus")
ROWWISE = ("LogSoftmax", "Normalise", "Softmax")


@pytest.mark.parametrize("name", FUNCTIONS + ROWWISE)
@pytest.mark.parametrize("shape", [(3 * BLOCK // 128 + 5, 128), (3, BLOCK + 7)], ids=str)
def test_every_block_is_done(name, shape):
    x, op = f(*shape), build_op(name, {})
    (y,) = whole(op, [x])
    for row in (0, len(x) // 2, len(x) - 1):
        np.testing.assert_allclose(whole(op, [x[row : row + 1]])[0], y[row : row + 1], rtol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS + ROWWISE)
@pytest.mark.parametrize("shape", [(5, 4), (3, BLOCK + 7)], ids=str)
def test_float16_is_rounded_once_at_the_end(name, shape):
    x, dy = f(*shape).astype(np.float16), g(*shape).astype(np.float16)
    for op, arrays in ((build_op(name, {}), [x]), (build_op(f"{name}Grad", {}), [dy, x])):
        (narrow,) = whole(op, arrays)
        (wide,) = whole(op, [a.astype(np.float32) for a in arrays])
        assert narrow.dtype == np.float16
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(narrow, wide.astype(np.float16))


def test_gelu_is_exact_to_the_last_digits():
    x = np.concatenate([np.linspace(-12, 12, 4001), [-1e5, 1e5, -40.5, 0.0, np.inf]])
    (y,) = whole(build_op("Gelu", {}), [x])
    expected = [v * 0.5 * math.erfc(-v / math.sqrt(2)) if v < 1e9 else np.inf for v in x]
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-14)
    (narrow,) = whole(build_op("Gelu", {}), [x.astype(np.float32)])
    np.testing.assert_allclose(narrow, expected, rtol=3e-7, atol=1e-6)


def test_sigmoid_keeps_its_digits_in_the_tails():
    x = np.array([-700.0, -100.0, -40.0, 0.0, 40.0, 800.0])
    (y,) = whole(build_op("Sigmoid", {}), [x])
    np.testing.assert_allclose(y, [1 / (1 + math.exp(-v)) if v > -709 else 0 for v in x], 1e-14)
