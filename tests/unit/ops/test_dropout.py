"""Dropout: which elements it drops, and that nothing but seed, step and node decides it."""

import numpy as np
import pytest
from op_harness import call, evaluate, sharded, whole

from mpiflow import nn, ops
from mpiflow.errors import GraphError
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, building
from mpiflow.graph.sbp import B, S
from mpiflow.ops.dropout import Dropout

KEY = (1, 2)


def drop(shape, rate=0.25, *, step=0, key=KEY, dtype="float64"):
    return whole(Dropout(rate, key, shape), [np.ones(shape, dtype), np.array(step)])[0]


def test_kept_elements_are_scaled_so_that_the_mean_stays():
    y = drop((500, 400), 0.25)
    assert set(np.unique(y)) == {0, 1 / 0.75}
    assert y.mean() == pytest.approx(1, abs=0.005)
    # Neighbours along both dims are independent.
    kept = y > 0
    for a, b in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        assert (a & b).mean() == pytest.approx(0.75**2, abs=0.005)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 0.99999])
def test_the_share_of_dropped_elements_is_the_rate(rate):
    assert (drop((1000, 200), rate) == 0).mean() == pytest.approx(rate, abs=0.003)


def test_steps_and_nodes_drop_other_elements():
    others = [{}, {"step": 1}, {"key": (1, 3)}, {"step": 1 << 32}]
    masks = [drop((100, 100), 0.5, **other) > 0 for other in others]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert (a == b).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("layout", [(S(0), S(1)), (S(2), B), (S(1), S(1)), (B, S(2))], ids=str)
def test_the_mask_does_not_depend_on_the_layout(layout):
    shape = (5, 6, 301)  # rows of several counters, begun in the middle by a shard
    op, x = Dropout(0.4, KEY, shape), np.ones(shape)
    (joined,) = sharded(op, [x, np.array(7)], [layout, (B, B)], [layout], (2, 3))
    np.testing.assert_array_equal(joined, drop(shape, 0.4, step=7))


def test_long_rows_are_done_in_pieces():
    long, short = drop((2, 20_001)), drop((2, 20_001), dtype="float32")
    np.testing.assert_array_equal(long > 0, short > 0)
    assert (long[:, :4096] != long[:, 4096:8192]).any()


def test_infinities_are_dropped_too():
    shape = (50, 50)
    (y,) = call(Dropout(0.5, KEY, shape), [np.full(shape, np.inf), np.array(0)], [shape],
                ["float64"])  # fmt: skip
    assert set(np.unique(y)) == {0, np.inf}


def traced(training, function):
    graph = Graph("test", training=training, seed=3)
    with building(graph):
        x = graph.input("x", (40, 30), "float64")
        return graph, x, function(x)


def test_the_gradient_has_the_mask_of_the_step():
    graph, x, y = traced(True, lambda x: ops.dropout(x, 0.3))
    with building(graph):
        (dx,) = gradients(graph, ops.reduce_sum(ops.square(y)), [x])
    step = graph.variables["step"].tensor
    feeds = {x: np.ones((40, 30)), step: np.array(5)}
    value, gradient = evaluate(graph, [y, dx], feeds)
    np.testing.assert_allclose(gradient, 2 * value * (value > 0) / 0.7, rtol=1e-4)
    assert 0 < (value == 0).mean() < 1


def test_evaluation_drops_nothing_and_has_no_step():
    graph, x, y = traced(False, nn.Dropout(0.3))
    assert y is x
    assert not graph.variables


def test_each_call_of_a_layer_has_a_mask_of_its_own():
    layer = nn.Dropout(0.5)
    graph, x, both = traced(True, lambda x: ops.stack([layer(x), layer(x)]))
    step = graph.variables["step"].tensor
    (y,) = evaluate(graph, [both], {x: np.ones((40, 30)), step: np.array(0)})
    assert (y[0] != y[1]).any()


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(GraphError, match="share from 0 to below 1"):
        traced(True, lambda x: ops.dropout(x, rate))
