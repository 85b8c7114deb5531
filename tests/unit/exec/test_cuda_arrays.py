"""What kernels call on a GPU means what it does on the CPU, and asks CuPy for what it has."""

import ast
from pathlib import Path

import numpy as np
import pytest
from gpu_stand_in import StandIn, device, host

import mpiflow.ops
from mpiflow.errors import PlanError
from mpiflow.exec.cuda_arrays import Arrays
from mpiflow.ops.conv import Conv, ConvInputGrad, ConvWeightGrad
from mpiflow.ops.matmul import Linear, MatMul, RowProduct
from mpiflow.testing.devices import run_with
from mpiflow.testing.kernels import whole

OPS = Path(mpiflow.ops.__file__).parent
xp = Arrays(StandIn())
draw = np.random.default_rng(0)


def asked_for():
    """The names that the sources of ops use of `xp`."""
    found = set()
    for file in sorted(OPS.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = getattr(owner, "id", getattr(owner, "attr", None))
                if name == "xp":
                    found.add(node.attr)
    return found


def test_everything_that_ops_ask_for_is_there():
    assert asked_for() > {"matmul", "copyto", "take", "add", "vecdot"}
    assert [name for name in sorted(asked_for()) if not hasattr(xp, name)] == []


def test_what_is_not_there_is_named():
    with pytest.raises(AttributeError, match=r"asks for xp\.fft, .* matmul"):
        _ = xp.fft


def test_copies_and_sums_under_a_mask():
    out, mask = xp.zeros(5), device(np.array([True, False, True, False, True]))
    xp.copyto(out, 2, where=mask)
    xp.add(out, out, out=out, where=mask)
    xp.multiply(out, 0.5, out=out, where=~mask)
    assert out.tolist() == [4, 0, 4, 0, 4]


def test_rows_are_taken_by_clipped_indices():
    table = device(draw.standard_normal((4, 3)))
    index = device(np.array([[0, 9], [-7, 3]]))
    out = xp.empty((2, 2, 3))
    xp.take(table, index, axis=0, out=out, mode="clip")
    np.testing.assert_array_equal(host(out), host(table)[[[0, 3], [0, 3]]])
    assert xp.take(table, device(np.array([-1, 11, 100])), mode="clip").tolist() == [
        *host(table)[[0, 3, 3], [0, 2, 2]]
    ]  # fmt: skip


def test_memory_of_the_host_is_refused():
    with pytest.raises(AssertionError, match="memory of the host"):
        xp.exp(xp.zeros(3), out=np.zeros(3))
    with pytest.raises(TypeError, match=r"numpy\.sort of an array of the device"):
        np.sort(xp.zeros(3))


def test_other_ways_of_taking_are_refused():
    with pytest.raises(NotImplementedError, match="it clips"):
        xp.take(np.zeros(3), np.array([0]), mode="wrap")


def test_a_maximum_of_nothing_is_its_initial_value():
    out = xp.zeros(2)
    xp.maximum.reduce(xp.zeros((2, 0)), axis=(1,), out=out, initial=-np.inf)
    assert out.tolist() == [-np.inf, -np.inf]
    xp.maximum.reduce(device(np.array([[1.0, 7.0], [3.0, 2.0]])), axis=1, out=out, initial=5)
    assert out.tolist() == [7, 5]


@pytest.mark.parametrize("letters", ["ng,ngc->gc", "ngc,gc->ng", "...i,...i->..."])
def test_the_einsums_of_ops(letters):
    shapes = {"n": 5, "g": 3, "c": 4, "i": 6}
    x, y = (
        draw.standard_normal([shapes[letter] for letter in part.replace("...", "ng")])
        for part in letters.partition("->")[0].split(",")
    )
    expected = np.einsum(letters, x, y)
    out = xp.empty(expected.shape)
    xp.einsum(letters, device(x), device(y), out=out)
    np.testing.assert_allclose(host(out), expected)


def test_other_einsums_are_refused():
    with pytest.raises(NotImplementedError, match="use matmul"):
        xp.einsum("ij,jk->ik", np.eye(2), np.eye(2), out=np.eye(2))


def transposed(array):
    return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def every_other(array):
    wide = np.zeros((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide[..., : array.shape[-1]]


PRODUCTS = [
    ((5, 3), (3, 4)), ((1, 3), (3, 4)), ((5, 3), (3, 1)), ((5, 1), (1, 4)), ((1, 1), (1, 1)),
    ((2, 5, 3), (2, 3, 4)), ((2, 5, 3), (3, 4)), ((5, 3), (2, 3, 4)), ((2, 1, 5, 3), (1, 7, 3, 4)),
    ((2, 7, 5, 3), (2, 7, 3, 4)), ((0, 3), (3, 4)), ((5, 0), (0, 4)), ((3,), (3, 4)),
    ((5, 3), (3,)), ((2, 5, 3), (3,)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
@pytest.mark.parametrize("left", [np.array, transposed, every_other])
@pytest.mark.parametrize("right", [np.array, transposed, every_other])
@pytest.mark.parametrize("result", [np.array, transposed, every_other])
def test_products_are_numpys_however_the_arrays_lie(shapes, left, right, result):
    a, b = (draw.standard_normal(shape) for shape in shapes)
    a = left(a) if a.ndim > 1 else a
    b = right(b) if b.ndim > 1 else b
    expected = a @ b
    out = np.full_like(expected, np.nan)
    out = result(out) if out.ndim > 1 else out
    xp.matmul(a, b, out)
    np.testing.assert_allclose(out, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", [MatMul(transpose_b=True), Linear(), RowProduct()], ids=str)
def test_products_of_16_bits_go_to_cublas_as_they_are_and_are_summed_in_float32(op, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    shapes = {"MatMul": ((7, 300), (5, 300)), "Linear": ((2, 3, 300), (300, 5))}
    a, b = (
        draw.standard_normal(shape).astype(dtype)
        for shape in shapes.get(op.name, ((300, 5), (300, 3)))
    )
    driver = StandIn()
    copies = []
    given = Arrays(driver)
    given.copyto = lambda *args, **more: copies.append(args)
    (found,) = run_with(op, (a, b), given, device, host)
    (expected,) = whole(op, (a, b))
    np.testing.assert_array_equal(found, expected)
    assert [call.split()[0] for call in driver.calls] == ["product"]
    assert copies == []


_SAME = ((1, 1), (1, 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (Conv((2, 2), _SAME, (1, 1)), ((3, 40, 9, 7), (8, 40, 3, 3))),
        (ConvInputGrad((9, 7), (2, 2), _SAME, (1, 1)), ((3, 8, 5, 4), (8, 40, 3, 3))),
        (ConvWeightGrad((3, 3), (2, 2), _SAME, (1, 1)), ((3, 40, 9, 7), (3, 8, 5, 4))),
        (Conv((1, 1), ((0, 0), (0, 0)), (1, 1)), ((3, 40, 9, 7), (8, 40, 1, 1))),
    ],
    ids=str,
)
def test_convolutions_of_16_bits_are_products_of_them_that_are_added_in_float32(op, shapes, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    arrays = tuple(draw.standard_normal(shape).astype(dtype) for shape in shapes)
    driver, taken, widened = StandIn(), [], []
    given = Arrays(driver)
    multiply, copy = driver.multiply, given.copyto

    def multiplied(product, out, left, right):
        taken.append((left.dtype.name, right.dtype.name, out.dtype.name))
        multiply(product, out, left, right)

    def copied(out, source, *more, **named):
        if out.dtype.itemsize > source.dtype.itemsize:
            widened.append(out.shape)
        copy(out, source, *more, **named)

    driver.multiply, given.copyto = multiplied, copied
    (found,) = run_with(op, arrays, given, device, host)
    (expected,) = whole(op, arrays)
    np.testing.assert_array_equal(found, expected)
    assert {*taken} == {(dtype, dtype, "float32")}
    assert widened == []


def test_heads_side_by_side_are_multiplied_without_a_copy():
    tokens = draw.standard_normal((2, 6, 3, 4))  # rows, tokens, heads, columns
    q, k = tokens.transpose(0, 2, 1, 3), tokens.transpose(0, 2, 3, 1)
    out = np.empty((2, 3, 6, 6))
    xp.matmul(q, k, out)
    np.testing.assert_allclose(out, q @ k)


def test_a_product_of_broken_up_arrays_is_refused():
    with pytest.raises(PlanError, match="one dim of each must be contiguous"):
        xp.matmul(np.zeros((6, 6))[::2, ::2], np.zeros((3, 3)), np.zeros((3, 3)))
