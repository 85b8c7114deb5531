"""Norms against PyTorch: values, gradients, running statistics."""

import numpy as np
import pytest
from op_harness import evaluate

from mpiflow import nn, ops
from mpiflow.graph.graph import Graph, building

torch = pytest.importorskip("torch")
from compare import check, ours  # noqa: E402  (it needs PyTorch)

functional = torch.nn.functional
SHAPES = [(6, 3, 4, 5), (5, 2, 9, 11), (8, 5), (4, 2, 7), (2, 3, 2, 3, 4)]


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def affine(channels):
    return draw(channels, seed=1) + 1, draw(channels, seed=2)


def torch_batch_norm(x, scale, shift, epsilon=1e-5):
    return functional.batch_norm(x, None, None, scale, shift, training=True, eps=epsilon)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [1 << 15, 13])
def test_batch_norm(shape, block, monkeypatch):
    monkeypatch.setattr("mpiflow.ops.batchnorm._BLOCK", block)
    arrays = draw(*shape), *affine(shape[1])
    check(lambda *a: ops.batch_norm(*a)[0], torch_batch_norm, arrays, tolerance=1e-9)


def test_batch_norm_of_groups_of_rows_is_that_of_each_group():
    def theirs(x, scale, shift):
        return torch.cat([torch_batch_norm(part, scale, shift) for part in x.split(3)])

    arrays = draw(12, 4, 3, 2), *affine(4)
    check(lambda *a: ops.batch_norm(*a, group=3)[0], theirs, arrays, tolerance=1e-9)


@pytest.mark.parametrize("shape", [(16, 8, 9, 9), (400, 8)])
def test_batch_norm_in_float32_stands_a_mean_of_1000(shape):
    x = (draw(*shape) + 1000).astype("float32")
    scale, shift = (a.astype("float32") for a in affine(8))
    (y, dx, *_), dy = ours(lambda *a: ops.batch_norm(*a)[0], (x, scale, shift))
    leaves = [torch.tensor(a.astype("float64"), requires_grad=True) for a in (x, scale, shift)]
    expected = torch_batch_norm(*leaves)
    expected.backward(torch.tensor(dy.astype("float64")))
    # x itself is rounded to 3e-5.
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=0, atol=2e-4)
    np.testing.assert_allclose(dx, leaves[0].grad.numpy(), rtol=0, atol=2e-4)


def trained_layer(x, layer, training=True):
    """(output, {variable: its next value}) of one call on x, from the initial variables."""
    graph = Graph("test", training=training)
    with building(graph):
        tensor = graph.input("x", x.shape, x.dtype.name)
        y = layer(tensor)
    feeds = {tensor: x}
    for number, v in enumerate(graph.variables.values()):
        if v.trainable:
            feeds[v.tensor] = draw(*v.tensor.shape, seed=number)
        else:
            feeds[v.tensor] = abs(draw(*v.tensor.shape, seed=number)) + 0.1
    values = evaluate(graph, [y, *graph.assigns.values()], feeds)
    by_name = {v.name: feeds[v.tensor] for v in graph.variables.values()}
    return values[0], by_name, dict(zip(graph.assigns, values[1:], strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_layer_moves_running_statistics_and_evaluates_by_them(training):
    x = draw(7, 3, 4)
    y, before, after = trained_layer(x, nn.BatchNorm(name="bn", momentum=0.3), training)
    layer = torch.nn.BatchNorm1d(3, momentum=0.3, dtype=torch.float64).train(training)
    pairs = [
        (layer.weight.data, "scale"),
        (layer.bias.data, "shift"),
        (layer.running_mean, "running_mean"),
        (layer.running_var, "running_variance"),
    ]
    for target, name in pairs:
        target.copy_(torch.tensor(before[f"bn.{name}"]))
    np.testing.assert_allclose(y, layer(torch.tensor(x)).detach().numpy(), rtol=1e-9, atol=1e-9)
    if not training:
        assert after == {}
        return
    for target, name in pairs[2:]:
        np.testing.assert_allclose(after[f"bn.{name}"], target.numpy(), rtol=1e-9)


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 40), (7,), (300, 200)])
def test_layer_norm_and_rms_norm(shape):
    x, (scale, shift) = draw(*shape) + 3, affine(shape[-1])
    check(
        ops.layer_norm,
        lambda x, a, b: functional.layer_norm(x, shape[-1:], a, b),
        (x, scale, shift),
        tolerance=1e-9,
    )
    check(
        ops.rms_norm,
        lambda x, a: functional.rms_norm(x, shape[-1:], a, 1e-6),
        (x, scale),
        tolerance=1e-9,
    )


@pytest.mark.parametrize(("shape", "groups"), [
    ((3, 6, 4, 5), 3), ((2, 4, 7), 1), ((5, 4), 2), ((2, 8, 90, 70), 8), ((2, 3, 200, 200), 1),
])  # fmt: skip
def test_group_norm(shape, groups):
    check(
        lambda *a: ops.group_norm(*a, groups=groups),
        lambda x, a, b: functional.group_norm(x, groups, a, b),
        (draw(*shape), *affine(shape[1])),
        tolerance=1e-8,
    )
