"""Example inputs for every op: one line each; a registered op without one fails its test."""

import conv_examples
import numpy as np
import optimizer_examples
import rows_examples
import transformer_examples

from mpiflow.graph.op import REGISTRY


def floats(*shape, low=-2.0, high=2.0, dtype="float64"):
    """Numbers away from 0, where relu bends."""
    draw = np.random.default_rng(sum(shape) + 7)
    x = draw.uniform(low, high, shape)
    return np.asarray(np.where(abs(x) < 0.1, 0.5, x), dtype)


def positive(*shape):
    return floats(*shape, low=0.5, high=2.0)


def whole_numbers(*shape, high=9, dtype="int64"):
    return np.random.default_rng(sum(shape)).integers(0, high, shape).astype(dtype)


def labels(*shape, classes):
    """Labels with the first and the last class among them."""
    flat = np.random.default_rng(1).integers(0, classes, shape).reshape(-1)
    flat[:1], flat[-1:] = 0, classes - 1
    return flat.reshape(shape)


def made(name, *arrays, **attributes):
    return REGISTRY[name](**attributes), arrays


f, p, n = floats, positive, whole_numbers
BINARY = [(f(5, 4), f(5, 4)), (f(5, 4), f(4)), (f(3, 5, 2), f(5, 1)), (f(4, 1), f(1, 5)),
          (f(), f()), (f(2, 3), f()), (f(1, 4), f(4)), (f(7), f(7))]  # fmt: skip
UNARY = [f(5, 4), f(), f(7), f(2, 1, 3)]

EXAMPLES = {
    "Add": [made("Add", *a) for a in [*BINARY, (n(5, 3), n(3))]],
    "Subtract": [made("Subtract", *a) for a in [*BINARY, (n(5, 3), n(3))]],
    "Multiply": [made("Multiply", *a) for a in [*BINARY, (n(5, 3), n(3))]],
    "Divide": [made("Divide", a, np.asarray(abs(b) + 0.5)) for a, b in BINARY],
    "Scale": [made("Scale", a, by=-1.5) for a in UNARY] + [made("Scale", n(5), by=3)],
    "Shift": [made("Shift", a, by=-1.5) for a in UNARY] + [made("Shift", n(5), by=3)],
    "Reciprocal": [made("Reciprocal", a) for a in UNARY],
    "Relu": [made("Relu", a) for a in UNARY],
    "ReluGrad": [made("ReluGrad", a, np.maximum(np.asarray(-a[::-1] if a.ndim else a), 0))
                 for a in UNARY],
    "Exp": [made("Exp", a) for a in UNARY],
    "Log": [made("Log", np.asarray(abs(a))) for a in UNARY],
    "Sqrt": [made("Sqrt", np.asarray(abs(a))) for a in UNARY],
    "Square": [made("Square", a) for a in UNARY],
    "Equal": [made("Equal", n(5, 4, high=2), n(5, 4, high=2)[::-1].copy()),
              made("Equal", n(6, high=3), n(6, high=3, dtype="uint8")),
              made("Equal", n(4, 1, high=3), n(1, 5, high=3)), made("Equal", f(3), f(3))],
    "ArgMax": [made("ArgMax", f(5, 4), dim=1), made("ArgMax", f(5, 4), dim=0),
               made("ArgMax", n(3, 4, 2, high=3), dim=1)],
    "Pick": [made("Pick", f(5, 4), labels(5, classes=4)),
             made("Pick", f(3, 2, 7), labels(3, 2, classes=7).astype("uint8")),
             made("Pick", f(6), labels(classes=6)), made("Pick", f(5, 1), labels(5, classes=1)),
             made("Pick", n(5, 4), labels(5, classes=4).astype("int32"))],
    "PickGrad": [made("PickGrad", f(5), labels(5, classes=4), columns=4),
                 made("PickGrad", f(3, 2), labels(3, 2, classes=7).astype("uint8"), columns=7),
                 made("PickGrad", f(), labels(classes=3), columns=3)],
    "MatMul": [made("MatMul", f(*a), f(*b), transpose_a=ta, transpose_b=tb)
               for ta, a in ((False, (5, 3)), (True, (3, 5)))
               for tb, b in ((False, (3, 4)), (True, (4, 3)))]
              + [made("MatMul", f(2, 5, 3), f(2, 3, 4)),
                 made("MatMul", f(2, 3, 5), f(2, 4, 3), transpose_a=True, transpose_b=True),
                 made("MatMul", f(1, 3), f(3, 1))],
    "Linear": [made("Linear", f(5, 3), f(3, 4)), made("Linear", f(3), f(3, 4)),
               made("Linear", f(2, 5, 3), f(3, 4)), made("Linear", f(2, 5, 3), f(3, 1)),
               made("Linear", f(2, 5, 3), f(4, 3), transpose=True)],
    "RowProduct": [made("RowProduct", f(5, 3), f(5, 4)), made("RowProduct", f(2, 4, 3), f(2, 4, 5)),
                   made("RowProduct", f(3), f(4))],
    "ReduceSum": [made("ReduceSum", f(5, 4), dims=d, keep=k)
                  for d in ((0,), (1,), (0, 1)) for k in (False, True)]
                 + [made("ReduceSum", f(3, 1, 4), dims=(0, 2)), made("ReduceSum", f(5), dims=()),
                    made("ReduceSum", n(5, 4), dims=(1,))],
    "ReduceMax": [made("ReduceMax", f(5, 4), dims=d, keep=k)
                  for d in ((0,), (1,), (0, 1)) for k in (False, True)]
                 + [made("ReduceMax", n(5, 4) - 20, dims=(0,)),
                    made("ReduceMax", n(5, 4, dtype="uint8"), dims=(0, 1))],
    "Expand": [made("Expand", f(5, 1), dims=(1,), lengths=(4,), keep=True),
               made("Expand", f(5), dims=(1,), lengths=(4,)),
               made("Expand", f(5), dims=(0, 2), lengths=(2, 3)),
               made("Expand", f(), dims=(0,), lengths=(5,))],
    "Cast": [made("Cast", f(5, 3), dtype="float32"), made("Cast", n(5, 3), dtype="float64"),
             made("Cast", f(5, dtype="float32"), dtype="float64"),
             made("Cast", n(5, high=2).astype(bool), dtype="float32")],
    "Identity": [made("Identity", a) for a in (*UNARY, n(5))],
    "StopGradient": [made("StopGradient", a) for a in UNARY],
    "Permute": [made("Permute", f(5, 4), order=(1, 0)), made("Permute", f(5), order=(0,)),
                made("Permute", f(2, 5, 3), order=(2, 0, 1))],
    "Reshape": [made("Reshape", f(*a), shape=b) for a, b in [
                    ((4, 3, 2), (4, 6)), ((4, 6), (4, 3, 2)), ((5, 4), (20,)), ((2, 6), (3, 4)),
                    ((5, 1), (5,)), ((5,), (1, 5, 1)), ((), (1,)), ((6, 4), (6, 4)),
                    ((2, 3, 4, 5), (6, 20))]],
    "Fill": [made("Fill", shape=(5, 3), value=1.5), made("Fill", shape=(), value=2.0),
             made("Fill", shape=(4,), value=3, dtype="int64")],
    "Uniform": [made("Uniform", shape=(5, 7), key=(1, 2), low=-0.5, high=0.5),
                made("Uniform", shape=(), key=(1, 2), dtype="float64")],
    "Normal": [made("Normal", shape=(5, 7), key=(1, 2), deviation=0.5, mean=3.0),
               made("Normal", shape=(3, 2, 4), key=(3, 2), dtype="float64")],
    "Slice": [made("Slice", f(5, 4)), made("Slice", n(7))],
    "Accumulate": [made("Accumulate", f(5, 4)), made("Accumulate", f(3), reduce_by="max")],
    "Collect": [made("Collect", f(5, 4)), made("Collect", f())],
    "KeepFirst": [made("KeepFirst", f(5, 4)), made("KeepFirst", f())],
}  # fmt: skip

NO_GRADIENT = {
    "Accumulate", "ArgMax", "Collect", "Equal", "Fill", "KeepFirst", "Normal", "ReduceMax",
    "ReluGrad", "Slice", "Uniform",
}  # fmt: skip
"""Ops that are not differentiated: their outputs are integers, or they are gradients already."""

for family in (conv_examples, optimizer_examples, rows_examples, transformer_examples):
    EXAMPLES |= family.EXAMPLES
    NO_GRADIENT |= family.NO_GRADIENT
