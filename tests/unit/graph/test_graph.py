import sys

import numpy as np
import pytest
from op_harness import evaluate

from mpiflow import nn, ops
from mpiflow.errors import GraphError
from mpiflow.graph.check import check
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, building, current
from mpiflow.ops import Fill


def line(offset=0):
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


@pytest.fixture
def graph():
    with building(Graph("test", training=False)) as made:
        yield made


def test_a_name_stands_for_one_variable(graph):
    graph.variable("w", (3,), init=Fill((3,), 0.0))
    first = line(-1)
    with pytest.raises(GraphError, match="variable 'w' exists already") as caught:
        graph.variable("w", (3,), init=Fill((3,), 0.0))
    assert f"made at {first}" in str(caught.value)
    assert line(-2) in str(caught.value)


def test_variables_inputs_and_nodes_share_no_name(graph):
    x = graph.input("x", (3,), "float32")
    graph.variable("relu", (3,), init=Fill((3,), 0.0))
    assert ops.relu(x).name == "relu.1"
    y = ops.exp(x)
    with pytest.raises(GraphError, match="'exp'"):
        graph.variable(y.name, (3,), init=Fill((3,), 0.0))


def test_a_variable_of_no_elements_is_refused(graph):
    with pytest.raises(GraphError, match=r"variable 'w' has an empty shape \(3, 0\)"):
        graph.variable("w", (3, 0), init=Fill((3, 0), 0.0))


def test_an_input_is_declared_once(graph):
    graph.input("x", (3,), "float32")
    with pytest.raises(GraphError, match="input 'x' is declared twice"):
        graph.input("x", (3,), "float32")


def test_a_variable_is_assigned_once_a_value_of_its_shape_and_dtype(graph):
    w = graph.variable("w", (3,), init=Fill((3,), 0.0))
    graph.assign(w, w * 2.0)
    with pytest.raises(GraphError, match="variable w is assigned twice") as caught:
        graph.assign(w, w * 3.0)
    assert line(-1) in str(caught.value)
    v = graph.variable("v", (3,), init=Fill((3,), 0.0))
    with pytest.raises(GraphError, match=r"variable v: float32\[3\], value .*: float32\[\]"):
        graph.assign(v, ops.reduce_sum(w))
    with pytest.raises(GraphError, match=r"scale.* is no variable of this trace"):
        graph.assign(w * 2.0, w)


def test_a_tensor_of_another_trace_is_refused(graph):
    foreign = Graph("other").input("x", (3,), "float32")
    x = graph.input("x", (3,), "float32")
    with pytest.raises(GraphError, match=r"Add: batch/x belongs to another trace \(other\)"):
        x + foreign


def test_a_tensor_cannot_decide_an_if(graph):
    x = graph.input("x", (3,), "float32")
    y = ops.reduce_sum(x)
    with pytest.raises(GraphError, match="cannot decide an `if`") as caught:
        bool(y)
    assert line(-3) in str(caught.value)


def test_ops_need_a_graph_that_is_being_built():
    with pytest.raises(GraphError, match="inside a model function"):
        current()


def test_nodes_carry_the_users_line_and_unique_names(graph):
    x = graph.input("x", (3,), "float32")
    a, b = ops.relu(x), ops.relu(x)
    where = line(-1)
    assert (a.name, b.name) == ("relu", "relu.1")
    assert a.node.where == b.node.where == where
    with graph.scope("block"):
        assert ops.relu(x).name == "block/relu"


def test_only_what_outputs_and_assignments_need_is_live(graph):
    x = graph.input("x", (3,), "float32")
    w = graph.variable("w", (), init=Fill(()))
    ops.exp(x)
    graph.outputs["y"] = ops.reduce_sum(x)
    graph.assign(w, w + 1.0)
    assert [node.op.name for node in graph.live()] == ["ReduceSum", "Shift"]


def test_outputs_are_floating_point_scalars(graph):
    x = graph.input("x", (3,), "float32")
    graph.outputs["y"] = ops.relu(x)
    with pytest.raises(GraphError, match=r"output 'y' has shape \(3,\); outputs are scalars"):
        check(graph)
    graph.outputs["y"] = ops.reduce_sum(ops.cast(x, "int64"))
    with pytest.raises(GraphError, match="output 'y' is int64; outputs are floating-point"):
        check(graph)


def test_training_needs_a_loss():
    graph = Graph("train")
    graph.outputs["error"] = ops.reduce_sum(graph.input("x", (3,), "float32"))
    with pytest.raises(GraphError, match="gives error; training needs an output named 'loss'"):
        check(graph)


def test_a_node_before_its_input_is_found(graph):
    x = graph.input("x", (3,), "float32")
    graph.outputs["y"] = ops.reduce_sum(ops.exp(x))
    graph.nodes.reverse()
    with pytest.raises(GraphError, match="reduce_sum reads exp before it is made"):
        check(graph)


def test_a_variable_that_nobody_reads_is_remarked(graph):
    graph.variable("w", (3,), init=Fill((3,)))
    graph.outputs["y"] = ops.reduce_sum(graph.input("x", (3,), "float32"))
    (remark,) = check(graph)
    assert remark.startswith("variable w is never read")


def test_a_layer_called_twice_uses_the_same_variables(graph):
    x = graph.input("x", (5, 4), "float32")
    layer = nn.Dense(4, name="fc")
    layer(layer(x))
    nn.Dense(4)(x)
    nn.Dense(4)(x)
    assert list(graph.variables) == [
        "fc.weight", "fc.bias", "dense.weight", "dense.bias", "dense.1.weight", "dense.1.bias"
    ]  # fmt: skip


def values(graph, tensors, **feeds):
    return evaluate(graph, tensors, {graph.inputs[n]: np.asarray(v) for n, v in feeds.items()})


def test_operators_mean_what_they_mean_in_numpy(graph):
    a, b = np.array([[1.5, -2.0], [0.5, 4.0]]), np.array([[2.0, 1.0], [-1.0, 0.25]])
    x, y = graph.input("x", a.shape, "float64"), graph.input("y", b.shape, "float64")
    cases = [
        (x + y, a + b), (x - y, a - b), (x * y, a * b), (x / y, a / b), (x @ y, a @ b),
        (1 - x, 1 - a), (x - 1, a - 1), (2 * x, 2 * a), (x * 2, a * 2), (1 + x, 1 + a),
        (x / 2, a / 2), (3 / x, 3 / a), (-x, -a), (np.float64(2) * x, 2 * a),
    ]  # fmt: skip
    found = values(graph, [tensor for tensor, _ in cases], x=a, y=b)
    for actual, (_, expected) in zip(found, cases, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_operators_on_integers_stay_integers(graph):
    a = np.array([3, -7, 2**40])
    x = graph.input("x", a.shape, "int64")
    for tensor, expected in [(-x, -a), (1 - x, 1 - a), (x * 3, a * 3), (x + 2, a + 2)]:
        assert tensor.dtype == "int64"
        np.testing.assert_array_equal(values(graph, [tensor], x=a)[0], expected)


def gradient_of(graph, loss, *tensors):
    with building(graph):
        return gradients(graph, loss, list(tensors))


def test_a_subexpression_used_twice_is_differentiated_once_and_added(graph):
    a = np.array([0.5, -1.0, 2.0])
    x = graph.input("x", (3,), "float64")
    y = ops.exp(x)
    loss = ops.reduce_sum(y * y + y)
    (dx,) = gradient_of(graph, loss, x)
    np.testing.assert_allclose(values(graph, [dx], x=a)[0], 2 * np.exp(2 * a) + np.exp(a))
    assert [n.op.name for n in graph.nodes].count("Exp") == 1


def test_several_consumers_add_their_gradients(graph):
    a = np.array([0.5, -1.0, 2.0])
    x = graph.input("x", (3,), "float64")
    loss = ops.reduce_sum(x) + ops.reduce_sum(x * x) + ops.reduce_sum(ops.tanh(x))
    (dx,) = gradient_of(graph, loss, x)
    expected = 1 + 2 * a + 1 - np.tanh(a) ** 2
    np.testing.assert_allclose(values(graph, [dx], x=a)[0], expected)


def test_no_gradient_flows_where_it_is_stopped_or_not_needed(graph):
    a = np.array([0.5, -1.0, 2.0])
    x = graph.input("x", (3,), "float64")
    z = graph.input("z", (3,), "float64")
    unused = ops.exp(z)
    loss = ops.reduce_sum(x * ops.stop_gradient(x))
    dx, dz, du = gradient_of(graph, loss, x, z, unused)
    assert (dz, du) == (None, None)
    np.testing.assert_array_equal(values(graph, [dx], x=a, z=a)[0], a)


def test_an_op_without_a_gradient_is_named_with_its_line(graph):
    x = graph.input("x", (3,), "float64")
    loss = ops.reduce_max(x * x)
    message = r"ReduceMax has no gradient.*mf\.stop_gradient\(x\).*\n  .*test_graph\.py:\d+$"
    with pytest.raises(GraphError, match=message):
        gradient_of(graph, loss, x)


def test_an_unused_output_counts_as_zero(graph):
    w, g, m = (graph.input(n, (3,), "float64") for n in "wgm")
    update = ops.update.SgdUpdate(momentum=0.9)
    first, _ = graph.add(update, w, g, ops.fill((), 0.1, "float64"), m)
    with pytest.raises(GraphError, match="SgdUpdate has no gradient"):
        gradient_of(graph, ops.reduce_sum(first), w)  # it got as far as asking the op


def test_the_gradient_of_the_loss_itself_is_one(graph):
    x = graph.input("x", (), "float64")
    (dx,) = gradient_of(graph, x, x)
    assert values(graph, [dx], x=3.0)[0] == 1


def test_only_a_scalar_is_differentiated(graph):
    x = graph.input("x", (3,), "float64")
    with pytest.raises(GraphError, match="the loss must be a floating-point scalar"):
        gradient_of(graph, x, x)


def test_cross_entropy_is_that_of_the_softmax_even_for_large_logits(graph):
    logits = np.array([[1000.0, 0.0, -5.0], [0.1, 0.2, 0.3]])
    x = graph.input("x", (2, 3), "float64")
    label = graph.input("label", (2,), "int64")
    loss = ops.reduce_sum(ops.cross_entropy(x, label))
    (dx,) = gradient_of(graph, loss, x)
    found, gradient = values(graph, [loss, dx], x=logits, label=[1, 2])
    share = np.exp(logits - logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    assert found == pytest.approx(1000 - np.log(share[1, 2]))
    np.testing.assert_allclose(gradient, share - np.eye(3)[[1, 2]], atol=1e-12)
