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


def normal(x):
    """The normal distribution at x, and its density there, to about 1e-16 of each."""
    tail = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    return tail, np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def logistic(x):
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    y, slope = logistic(2 * inner), math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return x * y, y + 2 * x * y * logistic(-2 * inner) * slope


def exact(name, x):
    """A function and its derivative in double precision."""
    if name == "Gelu":
        tail, density = normal(x)
        return x * tail, tail + x * density
    if name == "GeluTanh":
        return gelu_tanh(x)
    y = logistic(x)
    if name == "Silu":
        return x * y, y + x * y * logistic(-x)
    return y, y * logistic(-x)


@pytest.mark.parametrize("name", ["Gelu", "GeluTanh", "Silu", "Sigmoid"])
def test_single_precision_is_as_exact_in_the_tail_as_its_input(name):
    """An error of some last digits of the result, and of what the last digit of x makes of it."""
    x = np.concatenate([np.linspace(-30, 30, 6001), np.logspace(-44, 4, 500)]).astype(np.float32)
    wide = x.astype(float)
    with np.errstate(over="ignore", under="ignore"):
        y, slope = exact(name, wide)
        (found,) = whole(build_op(name, {}), [x])
        back = [np.ones_like(x), found if name == "Sigmoid" else x]
        (gradient,) = whole(build_op(f"{name}Grad", {}), back)
    last = 2.0**-23 * (np.abs(y) + np.abs(wide * slope))
    assert (np.abs(found - y) <= 3 * last + 1e-36).all()
    np.testing.assert_allclose(gradient, slope, rtol=0, atol=4e-7)


def test_gelu_has_its_limits():
    ends = np.array([-np.inf, -3e38, -1e10, 1e10, 3e38, np.inf], np.float32)
    with np.errstate(over="ignore"):
        for dtype in (np.float32, float):
            x = ends.astype(dtype)
            (y,) = whole(build_op("Gelu", {}), [x])
            np.testing.assert_array_equal(y, np.maximum(x, 0))
        for name in ("GeluGrad", "GeluTanhGrad", "SiluGrad"):
            (slope,) = whole(build_op(name, {}), [np.ones_like(ends), ends])
            np.testing.assert_allclose(slope, [0, 0, 0, 1, 1, 1], atol=1e-34)


@pytest.mark.parametrize("name", ["Gelu", "GeluTanh", "Silu", "Sigmoid", "Softplus", "Relu"])
def test_what_is_no_number_stays_none(name):
    x = np.array([np.nan, 1], np.float32)
    (y,) = whole(build_op(name, {}), [x])
    (slope,) = whole(build_op(f"{name}Grad", {}), [np.ones_like(x), x])
    assert np.isnan(y).tolist() == [True, False]
    assert np.isnan(slope).tolist() == [name != "Relu", False]


def test_sigmoid_keeps_its_digits_in_the_tails():
    x = np.array([-700.0, -100.0, -40.0, 0.0, 40.0, 800.0])
    (y,) = whole(build_op("Sigmoid", {}), [x])
    np.testing.assert_allclose(y, [1 / (1 + math.exp(-v)) if v > -709 else 0 for v in x], 1e-14)
