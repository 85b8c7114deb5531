"""Convolution and pooling against PyTorch: values and gradients in float64."""

import numpy as np
import pytest

from mpiflow import ops
from mpiflow.graph.grad import gradients

torch = pytest.importorskip("torch")
from compare import check  # noqa: E402  (it needs PyTorch)

functional = torch.nn.functional


def draw_conv(seed):
    """Random arrays and settings of a convolution over 1 to 3 dims."""
    draw = np.random.default_rng(seed)
    dims = 1 + seed % 3
    groups = int(draw.choice([1, 1, 2, 3]))
    channels, outputs = (groups * int(draw.integers(1, 4)) for _ in range(2))
    kernel, stride, dilation, padding = (
        tuple(map(int, draw.integers(low, high, dims)))
        for low, high in ((1, 4), (1, 4), (1, 3), (0, 3))
    )
    size = tuple(
        (k - 1) * d + 1 + int(draw.integers(0, 5)) for k, d in zip(kernel, dilation, strict=True)
    )
    x = draw.standard_normal((int(draw.integers(1, 4)), channels, *size))
    w = draw.standard_normal((outputs, channels // groups, *kernel))
    return x, w, dict(stride=stride, padding=padding, dilation=dilation, groups=groups)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("seed", range(24))
def test_conv_and_its_gradients(seed, by_rows, monkeypatch):
    monkeypatch.setattr("mpiflow.ops.tiles.Geometry.worth_rows", lambda at: by_rows)
    x, w, settings = draw_conv(seed)
    theirs = getattr(functional, f"conv{x.ndim - 2}d")
    check(lambda x, w: ops.conv(x, w, **settings), lambda x, w: theirs(x, w, **settings), (x, w))


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("limit", [1, 3_000, 20_000])
def test_conv_does_not_depend_on_its_tiles(limit, by_rows, monkeypatch):
    # 1: one row of windows at a time; 3,000: some rows; 20,000: several images.
    monkeypatch.setattr("mpiflow.ops.tiles._LIMIT", limit)
    monkeypatch.setattr("mpiflow.ops.columns._SUM", 40)
    monkeypatch.setattr("mpiflow.ops.tiles.Geometry.worth_rows", lambda at: by_rows)
    for seed in range(0, 24, 4):
        x, w, settings = draw_conv(seed)
        x = np.concatenate([x, -x, x + 1])
        theirs = getattr(functional, f"conv{x.ndim - 2}d")
        check(
            lambda x, w, settings=settings: ops.conv(x, w, **settings),
            lambda x, w, settings=settings, theirs=theirs: theirs(x, w, **settings),
            (x, w),
        )


@pytest.mark.parametrize(("size", "kernel", "pads"), [
    ((7, 6), (3, 3), (1, 1, 1, 1)), ((5, 8), (2, 4), (1, 2, 0, 1)),
])  # fmt: skip
def test_same_padding_puts_the_odd_element_behind(size, kernel, pads):
    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((2, 3, *size)), draw.standard_normal((4, 3, *kernel))
    check(
        lambda x, w: ops.conv(x, w, padding="same"),
        lambda x, w: functional.conv2d(functional.pad(x, pads), w),
        (x, w),
    )


def test_a_convolution_can_be_differentiated_twice():
    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((2, 2, 5, 4)), draw.standard_normal((3, 2, 3, 2))

    def slope(x, w):
        y = ops.conv(x, w, stride=2, padding=1)
        return gradients(x.graph, ops.reduce_sum(ops.square(y)), [x])[0]

    def torch_slope(x, w):
        y = functional.conv2d(x, w, stride=2, padding=1)
        return torch.autograd.grad((y * y).sum(), x, create_graph=True)[0]

    check(slope, torch_slope, (x, w))


@pytest.mark.parametrize("shape", [(3, 16, 17, 19), (2, 16, 30, 31)])
def test_float32_is_close(shape):
    draw = np.random.default_rng(1)
    x = draw.standard_normal(shape).astype("float32")
    w = draw.standard_normal((8, 16, 3, 3)).astype("float32")
    check(
        lambda x, w: ops.conv(x, w, padding=1),
        lambda x, w: functional.conv2d(x, w, padding=1),
        (x, w),
        tolerance=2e-3,
    )


POOLS = [  # shape, window, stride, padding
    ((3, 2, 11), 3, 2, 1),
    ((2, 3, 8, 7), 2, None, 0),
    ((2, 3, 9, 10), (3, 3), (2, 2), (1, 1)),
    ((2, 2, 7, 9), (3, 2), (1, 3), (1, 0)),
    ((2, 2, 5, 6, 7), (2, 3, 3), (2, 1, 2), (1, 1, 0)),
]


@pytest.mark.parametrize(("shape", "window", "stride", "padding"), POOLS)
@pytest.mark.parametrize("values", ["distinct", "tied"])
def test_max_pool_and_its_gradient(shape, window, stride, padding, values):
    draw = np.random.default_rng(2)
    x = draw.standard_normal(shape) if values == "distinct" else draw.integers(-2, 1, shape) * 1.0
    theirs = getattr(functional, f"max_pool{len(shape) - 2}d")
    check(
        lambda x: ops.max_pool(x, window, stride=stride, padding=padding),
        lambda x: theirs(x, window, stride, padding),
        (x,),
    )


@pytest.mark.parametrize(("shape", "window", "stride", "padding"), POOLS)
def test_mean_pool_and_its_gradient(shape, window, stride, padding):
    theirs = getattr(functional, f"avg_pool{len(shape) - 2}d")
    check(
        lambda x: ops.mean_pool(x, window, stride=stride, padding=padding),
        lambda x: theirs(x, window, stride, padding, count_include_pad=False),
        (np.random.default_rng(3).standard_normal(shape),),
    )


def test_global_pools():
    x = np.random.default_rng(4).standard_normal((3, 4, 5, 6))
    check(ops.global_mean_pool, lambda x: x.mean((2, 3)), (x,))
    check(ops.global_max_pool, lambda x: x.amax((2, 3)), (x,))


def test_max_pool_by_blocks_gives_the_same_gradient(monkeypatch):
    monkeypatch.setattr("mpiflow.ops.pool._BLOCK", 100)
    x = np.random.default_rng(5).integers(0, 3, (5, 3, 7, 6)) * 1.0
    check(
        lambda x: ops.max_pool(x, 3, stride=2, padding=1),
        lambda x: functional.max_pool2d(x, 3, 2, 1),
        (x,),
    )
