"""What mpiflow.testing finds wrong with ops of the user's own, and what the graph refuses."""

import math

import numpy as np
import pytest
import user_ops

import mpiflow as mf
from mpiflow.errors import GraphError
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, building
from mpiflow.testing import check_memory, check_op, directions

X = np.random.default_rng(0).standard_normal((5, 3))


def test_a_right_op_passes():
    check_op(user_ops.Cubed(2.0), X)
    check_op(user_ops.RowSum(), X)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("Allocates", r"allocates \d+ bytes beside arrays of 1440000; compute into `out`"),
        ("Centred", r"Centred on \(2,\) parts by S\(0\) -> S\(0\): \nNot equal to tolerance"),
        ("ChangesItsInput", "ChangesItsInput changes an input"),
        ("GivesBack", "the kernel gives something back; it writes `out`"),
        ("NotLinear", "by P -> P"),
        ("TooSmallWorkspace", "the kernel on .* raises ValueError"),
        (
            "WritesAnotherShape",
            r"on \(\(5, 3\),\) that fills \(\(5, 3\),\) raises ValueError: could",
        ),
        ("WritesNothing", "output 0 depends on what was in `out` before"),
        ("WrongGradient", "the gradient of input 0"),
    ],
)
def test_a_planted_fault_is_found(fault, message):
    op = getattr(user_ops, fault)()
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        check_op(op, X, gradient=fault != "Centred")


def test_memory_is_checked_on_large_arrays_only():
    check_memory(user_ops.Cubed(), np.ones((300, 400)))
    with pytest.raises(AssertionError, match="120 bytes show nothing; take larger arrays"):
        check_memory(user_ops.Cubed(), X)


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        (user_ops.TwoOutputs(), 1, r"has 2 outputs, and dtypes\(\) gives 1 dtypes"),
        (user_ops.NoSuchLetter(), 1, "no input of the op has the letter 'c' of its output"),
        (user_ops.GradientOfAnotherShape(), 1, r"the gradient of input 0 is \[\], the input \[3\]"),
        (user_ops.OneGradient(), 2, "gives a tuple of 2 gradients, one for each input, not 1"),
        (user_ops.RowSum(), 1, r"RowSum: input 0 has 1 dims \(3,\), it takes 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_line(op, inputs, message):
    graph = Graph("test")
    with building(graph), pytest.raises(GraphError, match=rf"(?s){message}.*test_testing.py:\d"):
        tensors = [graph.input(f"x{i}", (3,), "float64") for i in range(inputs)]
        gradients(graph, mf.reduce_sum(mf.apply(op, *tensors)), tensors)


def test_a_gradient_is_compared_along_every_element_or_along_mixtures_of_all():
    for shape in [(), (7,), (2, 4), (3, 3), (6, 7)]:
        along = np.array(directions(shape)).reshape(-1, math.prod(shape))
        np.testing.assert_allclose(np.linalg.norm(along, axis=1), 1.0)
        assert np.all(np.abs(along).sum(0) > 0)
        assert len(along) == min(math.prod(shape), 8)
