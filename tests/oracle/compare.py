"""Compares the values and gradients of ops with PyTorch's."""

import numpy as np
import torch
from op_harness import evaluate

from mpiflow import ops
from mpiflow.graph.grad import gradients
from mpiflow.graph.graph import Graph, building


def ours(function, arrays, seed=0):
    """Value of `function` and the gradients of a random sum of it, for every array of floats."""
    graph = Graph("test")
    with building(graph):
        tensors = [graph.input(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
        y = function(*tensors)
        weight = graph.input("weight", y.shape, y.dtype)
        floats = [t for t in tensors if t.dtype.startswith("float")]
        found = gradients(graph, ops.reduce_sum(y * weight), floats)
    dy = np.random.default_rng(seed).standard_normal(y.shape)
    feeds = dict(zip(tensors, arrays, strict=True)) | {weight: np.asarray(dy, y.dtype)}
    return evaluate(graph, [y, *found], feeds), feeds[weight]


def check(function, theirs, arrays, tolerance=1e-10):
    """`function` of tensors agrees with `theirs` of PyTorch tensors, with all gradients."""
    (y, *found), dy = ours(function, arrays)
    leaves = [torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
    expected = theirs(*leaves)
    expected.backward(torch.tensor(dy))
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=tolerance, atol=tolerance)
    for gradient, leaf in zip(found, (x for x in leaves if x.requires_grad), strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=tolerance, atol=tolerance)
