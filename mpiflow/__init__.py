"""mpiflow trains neural networks on supercomputers from a plan that is compiled before the run.

A job file imports this module as `mf`; see the README. Importing it starts no MPI and needs
NumPy only.
"""

from contextlib import AbstractContextManager

from mpiflow.threads import limit_threads

limit_threads()  # before NumPy is imported, or it has no effect

from mpiflow import nn
from mpiflow.errors import MpiflowError
from mpiflow.graph.graph import Hint
from mpiflow.graph.graph import current as _current
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import Op, op
from mpiflow.graph.sbp import B, P, S
from mpiflow.graph.tensor import Tensor
from mpiflow.job import Best, Dataset, Every, Job, Weights
from mpiflow.ops import (
    absolute,
    add,
    arc_margin,
    argmax,
    attention,
    batch_norm,
    binary_cross_entropy,
    cast,
    clip,
    concat,
    conv,
    cos_margin,
    cross_entropy,
    cut,
    divide,
    dropout,
    embedding,
    equal,
    exp,
    gather,
    gelu,
    global_max_pool,
    global_mean_pool,
    graph_step,
    greater,
    greater_equal,
    group_norm,
    huber,
    keep,
    l1,
    layer_norm,
    less,
    less_equal,
    log,
    log_softmax,
    logical_and,
    logical_not,
    logical_or,
    masked_softmax,
    matmul,
    max_pool,
    maximum,
    mean,
    mean_cross_entropy,
    mean_pool,
    minimum,
    mse,
    multiply,
    normalise,
    not_equal,
    one_hot,
    permute,
    pick,
    power,
    reduce_max,
    reduce_sum,
    relu,
    reshape,
    rms_norm,
    rotary,
    scale,
    sigmoid,
    silu,
    softmax,
    softplus,
    split,
    sqrt,
    square,
    stack,
    stop_gradient,
    subtract,
    tanh,
    total,
    unstack,
    weighted_mean,
    where,
)
from mpiflow.ops.base import apply
from mpiflow.ops.schedule import (
    Constant,
    Cosine,
    InverseSqrt,
    LinearDecay,
    Polynomial,
    StepDecay,
)
from mpiflow.optim import LAMB, LARS, NO_DECAY, SGD, Adagrad, Adam, AdamW, Group
from mpiflow.version import __version__

__all__ = [
    "LAMB", "LARS", "NO_DECAY", "SGD", "Adagrad", "Adam", "AdamW", "B", "Best", "Constant",
    "Cosine", "Dataset", "Every", "Group", "InverseSqrt", "Job", "LinearDecay", "Mesh",
    "MpiflowError", "Op", "P", "Polynomial", "S", "StepDecay", "Tensor", "Weights", "__version__",
    "absolute", "add", "apply", "arc_margin", "argmax", "assign", "attention", "batch_norm",
    "binary_cross_entropy", "cast", "clip", "concat", "conv", "cos_margin", "cross_entropy", "cut",
    "divide", "dropout", "embedding", "equal", "exp", "gather", "gelu", "global_max_pool",
    "global_mean_pool", "graph_step", "greater", "greater_equal", "group_norm", "hint", "huber",
    "is_training", "keep", "l1", "layer_norm", "less", "less_equal", "log", "log_softmax",
    "logical_and", "logical_not", "logical_or", "masked_softmax", "matmul", "max_pool", "maximum",
    "mean", "mean_cross_entropy", "mean_pool", "minimum", "mse", "multiply", "nn", "normalise",
    "not_equal", "one_hot", "op", "permute", "pick", "power", "recompute", "reduce_max",
    "reduce_sum", "relu", "reshape", "rms_norm", "rotary", "scale", "sigmoid", "silu", "softmax",
    "softplus", "split", "sqrt", "square", "stack", "stage", "stop_gradient", "subtract", "tanh",
    "total", "unstack", "weighted_mean", "where",
]  # fmt: skip


def assign(variable: Tensor, value: Tensor) -> None:
    """At the end of the step `variable` becomes `value`: the only way in which one changes."""
    if variable.graph.training:
        variable.graph.assign(variable, value)


def hint(x: Tensor, sbp: Hint) -> Tensor:
    """Ask for a layout of `x`: one SBP for every mesh axis, or by axis name with B elsewhere."""
    x.graph.hints[x.name] = sbp
    x.graph.hint_lines[x.name] = x.graph.where
    return x


def recompute() -> AbstractContextManager[None]:
    """Let training compute what is made inside again, rather than keep it for the backward pass."""
    return _current().recompute()


def is_training() -> bool:
    """Whether the model is being traced for training, not for evaluation."""
    return _current().training


def stage(index: int) -> AbstractContextManager[None]:
    """Pin what the model computes inside to a pipeline stage: `with mf.stage(0): x = first(x)`.

    Stages are named in the order of the model, from 0. Where a mesh has fewer than a model names,
    neighbours share one; without an axis `stage` it has no effect. What is pinned to none is cut
    where the compiler finds it best.
    """
    return _current().stage(index)
