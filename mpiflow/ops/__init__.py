"""The ops: one class each, registered when this package is imported."""

from mpiflow.ops import movement, update
from mpiflow.ops.elementwise import (
    add,
    divide,
    exp,
    log,
    multiply,
    relu,
    scale,
    sqrt,
    square,
    subtract,
    tanh,
)
from mpiflow.ops.index import argmax, equal, pick
from mpiflow.ops.losses import cross_entropy
from mpiflow.ops.matmul import linear, matmul
from mpiflow.ops.random import Fill, Normal, Uniform, fill, random_key
from mpiflow.ops.reduction import mean, reduce_max, reduce_sum, total
from mpiflow.ops.shape import cast, identity, permute, reshape, stop_gradient

__all__ = [
    "Fill", "Normal", "Uniform", "add", "argmax", "cast", "cross_entropy", "divide", "equal",
    "exp", "fill", "identity", "linear", "log", "matmul", "mean", "movement", "multiply",
    "permute", "pick", "random_key", "reduce_max", "reduce_sum", "relu", "reshape", "scale",
    "sqrt", "square", "stop_gradient", "subtract", "tanh", "total", "update",
]  # fmt: skip
