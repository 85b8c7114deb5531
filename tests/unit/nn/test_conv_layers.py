import numpy as np
import pytest
from op_harness import whole

import mpiflow as mf
from mpiflow import nn
from mpiflow.errors import GraphError
from mpiflow.graph.graph import Graph, building


def traced(layers, shape, training=True):
    graph = Graph("test", training=training)
    with building(graph):
        x = graph.input("x", shape, "float32")
        for layer in layers:
            x = layer(x)
    return graph, x


def test_layers_name_their_variables_by_position_or_as_told():
    layers = [nn.Conv(4, 3), nn.BatchNorm(), nn.Conv(4, 3, bias=False), nn.BatchNorm(name="last")]
    graph, _ = traced(layers, (2, 3, 9, 9))
    assert {v.name: v.tensor.shape for v in graph.variables.values()} == {
        "conv.weight": (4, 3, 3, 3), "conv.bias": (4,),
        "batch_norm.scale": (4,), "batch_norm.shift": (4,),
        "batch_norm.running_mean": (4,), "batch_norm.running_variance": (4,),
        "conv.1.weight": (4, 4, 3, 3),
        "last.scale": (4,), "last.shift": (4,),
        "last.running_mean": (4,), "last.running_variance": (4,),
    }  # fmt: skip
    frozen = {v.name for v in graph.variables.values() if not v.trainable}
    assert frozen == {name for name in graph.variables if "running" in name} == set(graph.assigns)


def test_an_evaluation_has_the_variables_of_training_and_assigns_none():
    layers = [nn.Conv(4, 3), nn.BatchNorm(), nn.GroupNorm(2)]
    training, _ = traced(layers, (2, 3, 9, 9))
    evaluation, _ = traced(layers, (2, 3, 9, 9), training=False)
    assert list(training.variables) == list(evaluation.variables)
    assert evaluation.assigns == {}


@pytest.mark.parametrize("shape", [(2, 6, 9), (2, 6, 9, 8), (2, 6, 5, 6, 7)])
def test_one_conv_layer_serves_any_number_of_spatial_dims(shape):
    _, y = traced([nn.Conv(4, 3, stride=2, padding="same", groups=2), nn.MaxPool(2)], shape)
    assert y.shape == (2, 4, *(-(-n // 2) // 2 for n in shape[2:]))


def test_conv_weights_start_with_the_deviation_of_he():
    graph, _ = traced([nn.Conv(64, 3)], (1, 32, 9, 9))
    (weight,) = whole(graph.variables["conv.weight"].init, [])
    assert weight.std() == pytest.approx(np.sqrt(2 / (32 * 9)), rel=0.02)


def test_global_pools_keep_rows_and_channels():
    assert traced([nn.GlobalMeanPool()], (2, 3, 4, 5))[1].shape == (2, 3)
    assert traced([nn.GlobalMaxPool()], (2, 3, 4, 5))[1].shape == (2, 3)
    assert traced([nn.MeanPool(2, stride=1)], (2, 3, 4, 5))[1].shape == (2, 3, 3, 4)


REFUSED = [
    (lambda x: nn.Conv(5, 3, groups=2)(x), "2 groups do not divide 5 channels"),
    (lambda x: nn.Conv(4, 3, groups=4)(x), "c divisible by 4 groups"),
    (lambda x: nn.Conv(4, 3)(mf.reduce_sum(x, (2, 3))), r"takes \(n, c, \*size\)"),
    (lambda x: nn.BatchNorm(momentum=2.0)(x), "momentum 2.0 must be from 0 to 1"),
    (lambda x: nn.LayerNorm(epsilon=0)(x), "epsilon 0 must be > 0"),
    (lambda x: nn.GroupNorm(4)(x), "4 groups do not divide"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_layers_refuse_what_they_cannot_do(build, message):
    graph = Graph("test")
    with building(graph), pytest.raises(GraphError, match=message):
        build(graph.input("x", (2, 6, 9, 9), "float32"))


@pytest.mark.parametrize(
    "layer",
    [nn.Conv(4, 3, groups=2), nn.BatchNorm(), nn.GroupNorm(2), nn.LayerNorm(), nn.RMSNorm(),
     nn.Dense(3)],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_what_a_layer_cannot_take_is_refused_with_the_line_that_calls_it(layer):
    graph = Graph("test", training=True)
    with building(graph):
        x = graph.input("x", (), "float32")
        with pytest.raises(GraphError) as error:
            layer(x)
    line = error.traceback[0].lineno + 1
    assert str(error.value).endswith(f"test_conv_layers.py:{line}")
    assert not x.where.endswith(f":{line}")
