"""Whole saves and loads over a mesh in one process, for the tests of checkpoints."""

from itertools import product

import numpy as np

from mpiflow.graph.sbp import B, S, box_shape, shard_box
from mpiflow.io.checkpoint.read import CheckpointReader
from mpiflow.io.checkpoint.records import Header, SavedVariable
from mpiflow.io.checkpoint.write import CheckpointWriter, commit, prepare

IDENTITY = (("model", "dense 5\ndense 3"), ("optimizer", "sgd lr=0.1"))


def values(seed=0):
    """Variables of odd sizes, every dtype family, a scalar and one without elements."""
    rng = np.random.default_rng(seed)
    return {
        "fc1.weight": rng.standard_normal((5, 7)).astype("float32"),
        "fc1.bias": rng.standard_normal(3).astype("float64"),
        "step": np.array(seed + 11, "int64"),
        "mask": rng.integers(0, 2, (2, 3, 4)).astype("bool"),
        "half": rng.standard_normal((1, 6)).astype("float16"),
        "none": np.zeros((0, 4), "int32"),
    }


def layout(shape, axes, dims=(0, 1)):
    """Split over every axis: axis i along dim dims[i], or along the last dim that is there."""
    if not shape:
        return (B,) * axes
    return tuple(S(min(dims[i % len(dims)], len(shape) - 1)) for i in range(axes))


def header(step, arrays, *, epoch=2, program="b" * 64, state=None):
    variables = tuple(SavedVariable(n, a.shape, a.dtype.name) for n, a in arrays.items())
    state = {"row": 17, "best": None} if state is None else state
    return Header("digits", step, epoch, "a" * 64, program, IDENTITY, variables, state)


def write_ranks(folder, step, arrays, sizes, dims=(0, 1), ranks=None):
    """What every rank of a mesh of `sizes` writes, each element once."""
    for rank, where in enumerate(product(*map(range, sizes))):
        if ranks is not None and rank not in ranks:
            continue
        writer = CheckpointWriter(folder, step, rank, "host")
        for name, array in arrays.items():
            split = layout(array.shape, len(sizes), dims)
            box = shard_box(array.shape, split, sizes, where)
            if not array.shape and any(where):
                continue
            writer.write(name, tuple(a for a, _ in box), array[tuple(slice(*d) for d in box)])
        writer.finish()


def save(folder, step, arrays, sizes=(2,), dims=(0, 1), **options):
    prepare(folder, step)
    write_ranks(folder, step, arrays, sizes, dims)
    return commit(folder, header(step, arrays, **options), int(np.prod(sizes)), patience=0)


def load_ranks(checkpoint, sizes, dims=(0, 1)):
    """Every variable as the ranks of a mesh of `sizes` load it, joined again."""
    joined = {v.name: np.full(v.shape, 99, v.dtype) for v in checkpoint.variables}
    for where in product(*map(range, sizes)):
        with CheckpointReader(checkpoint) as reader:
            for variable in checkpoint.variables:
                split = layout(variable.shape, len(sizes), dims)
                box = shard_box(variable.shape, split, sizes, where)
                out = np.full(box_shape(box), 98, variable.dtype)
                reader.restore(variable.name, box, out)
                joined[variable.name][tuple(slice(*d) for d in box)] = out
    return joined


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, err_msg=name)
