"""The ops: one class each, registered when this package is imported."""

from mpiflow.ops import movement, rowupdate, scaling, update
from mpiflow.ops.activation import absolute, gelu, power, sigmoid, silu, softplus, tanh
from mpiflow.ops.attention import attention, merge_heads, rotary, split_heads
from mpiflow.ops.batchnorm import batch_norm, running_moments
from mpiflow.ops.concat import concat, cut, split, stack, unstack
from mpiflow.ops.conv import conv
from mpiflow.ops.dropout import dropout
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
)
from mpiflow.ops.embedding import embedding
from mpiflow.ops.gather import gather
from mpiflow.ops.index import argmax, pick
from mpiflow.ops.losses import (
    arc_margin,
    binary_cross_entropy,
    cos_margin,
    cross_entropy,
    huber,
    l1,
    mean_cross_entropy,
    mse,
    weighted_mean,
)
from mpiflow.ops.matmul import linear, linear_transposed, matmul
from mpiflow.ops.norm import group_norm, layer_norm, rms_norm
from mpiflow.ops.pool import global_max_pool, global_mean_pool, max_pool, mean_pool
from mpiflow.ops.random import Fill, Normal, Uniform, fill, random_key
from mpiflow.ops.reduction import mean, reduce_max, reduce_sum, total
from mpiflow.ops.sample import block_count, sample_rows
from mpiflow.ops.scatter import add_at, one_hot
from mpiflow.ops.select import (
    clip,
    equal,
    greater,
    greater_equal,
    keep,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    not_equal,
    where,
)
from mpiflow.ops.shape import cast, identity, permute, reshape, stop_gradient
from mpiflow.ops.softmax import log_softmax, masked_softmax, normalise, softmax
from mpiflow.ops.step import graph_step

__all__ = [
    "Fill", "Normal", "Uniform", "absolute", "add", "add_at", "arc_margin", "argmax", "attention",
    "batch_norm", "binary_cross_entropy", "block_count", "cast", "clip", "concat", "conv",
    "cos_margin", "cross_entropy", "cut", "divide", "dropout", "embedding", "equal", "exp", "fill",
    "gather", "gelu", "global_max_pool", "global_mean_pool", "graph_step", "greater",
    "greater_equal", "group_norm", "huber", "identity", "keep", "l1", "layer_norm", "less",
    "less_equal", "linear", "linear_transposed", "log", "log_softmax", "logical_and", "logical_not",
    "logical_or", "masked_softmax", "matmul", "max_pool", "maximum", "mean", "mean_cross_entropy",
    "mean_pool", "merge_heads", "minimum", "movement", "mse", "multiply", "normalise", "not_equal",
    "one_hot", "permute", "pick", "power", "random_key", "reduce_max", "reduce_sum", "relu",
    "reshape", "rms_norm", "rotary", "rowupdate", "running_moments", "sample_rows", "scale",
    "scaling", "sigmoid", "silu", "softmax", "softplus", "split", "split_heads", "sqrt", "square",
    "stack", "stop_gradient", "subtract", "tanh", "total", "unstack", "update", "weighted_mean",
    "where",
]  # fmt: skip
