"""What convolutions, pools and norms of channels refuse, and how they may be split."""

import numpy as np
import pytest
from op_harness import call, sharded, whole

from mpiflow import ops
from mpiflow.errors import GraphError
from mpiflow.graph.graph import Graph, building
from mpiflow.ops.batchnorm import BatchNormGrad, BatchNormSlopes, BatchSums
from mpiflow.ops.conv import Conv, ConvInputGrad, ConvWeightGrad
from mpiflow.ops.norm import GroupNorm, GroupNormGrad
from mpiflow.ops.window import pad_windows


def given(*shapes):
    graph = Graph("test")
    return graph, [graph.input(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]


REFUSED = [
    (lambda x, w: ops.conv(x, w, groups=2), r"2 groups do not divide 3 channels and 5 outputs"),
    (lambda x, w: ops.conv(x, w, dilation=4), r"a kernel of \(3, 3\) with dilation \(4, 4\)"),
    (lambda x, w: ops.conv(x, w, stride=0), r"stride takes a whole number >= 1"),
    (lambda x, w: ops.conv(x, w, stride=(1, 2, 3)), r"or 2 of them, not \(1, 2, 3\)"),
    (
        lambda x, w: ops.conv(x, w, padding="valid"),
        "padding is numbers or .same., not .valid.",
    ),
    (lambda x, w: ops.conv(x, w, padding=((1, 1),)), r"padding takes 2 pairs"),
    (lambda x, w: ops.conv(x, ops.reshape(w, (15, 3, 3))), r"conv takes x \(n, c, \*size\)"),
    (lambda x, w: ops.conv(x, ops.reshape(w, (3, 5, 3, 3))), r"dim is 5 and should be 3"),
    (lambda x, w: ops.max_pool(x, 2, padding=2), r"leaves windows of \(2, 2\) empty"),
    (lambda x, w: ops.mean_pool(x, 9), r"MeanPool: a kernel of \(9, 9\)"),
    (lambda x, w: ops.batch_norm(x, w, w, group=3), r"groups of 3 rows do not divide the batch"),
    (lambda x, w: ops.group_norm(x, w, w, groups=2), r"2 groups do not divide the channels"),
    (lambda x, w: ops.conv(ops.cast(x, "int32"), ops.cast(w, "int32")), r"takes floating-point"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_what_cannot_be_is_refused_with_the_line_of_the_user(build, message):
    graph, tensors = given((4, 3, 6, 5), (5, 3, 3, 3))
    with building(graph), pytest.raises(GraphError, match=rf"(?s){message}.*test_windows.py:\d+"):
        build(*tensors)


def test_same_padding_gives_one_window_a_stride():
    assert pad_windows("same", (7, 8), (3, 4), (1, 1), (1, 1)) == ((1, 1), (1, 2))
    assert pad_windows("same", (7, 8), (3, 3), (2, 2), (1, 1)) == ((1, 1), (0, 1))
    assert pad_windows("same", (9,), (1,), (3,), (1,)) == ((0, 0),)
    assert pad_windows(((0, 2), (1, 1)), (9, 9), (3, 3), (1, 1), (1, 1)) == ((0, 2), (1, 1))


def texts(op, *shapes):
    return {str(s) for s in op.signatures(shapes, ("float32",) * len(shapes))}


def test_a_convolution_may_be_split_by_rows_and_channels():
    plain = Conv((1, 1), ((0, 0), (0, 0)), (1, 1))
    assert texts(plain, (4, 6, 5, 5), (8, 6, 3, 3)) == {
        "B, B -> B", "S(0), B -> S(0)", "B, S(0) -> S(1)", "S(1), S(1) -> P", "P, B -> P",
        "B, P -> P",
    }  # fmt: skip
    grouped = Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 2)
    assert texts(grouped, (4, 6, 5, 5), (8, 3, 3, 3)) == {
        "B, B -> B", "S(0), B -> S(0)", "S(1,unit=3), S(0,unit=4) -> S(1,unit=4)", "P, B -> P",
        "B, P -> P",
    }  # fmt: skip


def test_sums_of_a_batch_norm_are_partial_unless_whole_groups_or_channels_are_split():
    found = texts(BatchSums(2, 6), (6, 3, 4))
    assert found == {"B -> B", "S(0) -> P", "S(0,unit=2) -> S(0)", "S(1) -> S(1)", "S(2) -> P"}


LIMITS = {
    "tiles._LIMIT": 5_000,
    "depthwise._BLOCK": 400,
    "norm._BLOCK": 50,
    "batchnorm._BLOCK": 1280,
}
SETTINGS = ((1, 1), ((1, 1), (1, 1)), (1, 1))


def drawn(*shapes):
    return [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(shapes)]


X, Y, W, SINGLE = (3, 7, 6, 5), (3, 4, 6, 5), (4, 7, 3, 3), (7, 1, 3, 3)
TIGHT = [
    (Conv(*SETTINGS), (X, W)),
    (ConvInputGrad((6, 5), *SETTINGS), (Y, W)),
    (ConvWeightGrad((3, 3), *SETTINGS), (X, Y)),
    (Conv(*SETTINGS, 7), (X, SINGLE)),
    (ConvInputGrad((6, 5), *SETTINGS, 7), (X, SINGLE)),
    (ConvWeightGrad((3, 3), *SETTINGS, 7), (X, X)),
    (GroupNorm(1, 0.1), ((9, 3, 7), (3,), (3,))),
    (GroupNormGrad(1, 0.1), ((9, 3, 7), (9, 3, 7), (3,))),
    (BatchSums(20, 40), ((40, 19, 10),)),
    (BatchSums(2, 4), ((4, 4, 641),)),
    (BatchNormSlopes(1, 641, 0.1), ((1, 4, 641), (1, 4, 641), (1, 4, 2))),
    (BatchNormSlopes(20, 200, 0.1), ((40, 19, 10), (40, 19, 10), (2, 19, 2))),
    (BatchNormGrad(20, 200, 0.1), ((40, 19, 10), (40, 19, 10), (2, 19, 2), (2, 19, 2), (19,))),
]


@pytest.mark.parametrize(("op", "shapes"), TIGHT)
def test_a_kernel_makes_do_with_the_workspace_of_a_larger_shard(op, shapes, monkeypatch):
    # A smaller shard would like more than the limit gives: the plan has what the largest asks for.
    for name, limit in LIMITS.items():
        monkeypatch.setattr(f"mpiflow.ops.{name}", limit)
    arrays = drawn(*shapes)
    expected = whole(op, arrays)
    outputs = tuple(a.shape for a in expected)
    most = op.workspace(shapes, outputs, "float64")
    for signature in op.signatures(shapes, ("float64",) * len(shapes)):
        monkeypatch.setattr(type(op), "workspace", lambda *_, most=most: most)
        layouts = [(s,) for s in signature.inputs], [(s,) for s in signature.outputs]
        joined = sharded(op, arrays, *layouts, (2,))
        for a, b in zip(joined, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=str(signature))


def test_a_maximum_of_a_window_in_padding_ignores_it():
    op = ops.pool.MaxPool((3,), (2,), ((1, 1),))
    x = np.full((1, 1, 5), -7.0)
    (y,) = call(op, [x], [(1, 1, 3)], ["float64"])
    assert (y == -7.0).all()


@pytest.mark.parametrize(("window", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (17, 3, 5)])
def test_the_gradient_of_a_maximum_goes_to_the_first_of_equals_and_of_a_window_with_nan(
    window, stride, padding
):
    settings = ((window,) * 2, (stride,) * 2, ((padding,) * 2,) * 2)
    x = np.random.default_rng(1).integers(0, 3, (2, 3, 20, 18)).astype("float64")
    x[0, 1, 4, 7] = np.nan
    (y,) = whole(ops.pool.MaxPool(*settings), [x])
    dy = np.random.default_rng(2).standard_normal(y.shape)
    expected = np.zeros_like(x)
    for n, c, i, j in np.ndindex(y.shape):
        row, column = (max(k * stride - padding, 0) for k in (i, j))
        rows, columns = (slice(k, b * stride - padding + window)
                         for k, b in ((row, i), (column, j)))  # fmt: skip
        block = x[n, c, rows, columns]
        first = np.flatnonzero(~(block < y[n, c, i, j]))[0]
        place = np.unravel_index(first, block.shape)
        expected[n, c, row + place[0], column + place[1]] += dy[n, c, i, j]
    (actual,) = whole(ops.pool.MaxPoolGrad(*settings), [dy, x, y])
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
