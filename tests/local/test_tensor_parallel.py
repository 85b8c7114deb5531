"""A transformer's block on a model axis sends what Megatron's does, and nothing besides."""

from collections import Counter
from math import prod

import numpy as np
import pytest
from jobs import compile_arrays

import mpiflow as mf
from mpiflow.models.gpt import GPT
from mpiflow.plan.slice import itemsize

LENGTH, WIDTH = 32, 256
SHAPES = {
    "gpt": {},
    "gpt with dropout": {"dropout": 0.1},
    "llama": {"rotary_base": 10000.0, "gated": True, "rms": True, "bias": False, "tied": False,
              "kv_heads": 4},
}  # fmt: skip
SUM = Counter({"all_reduce": 1})
PAIR = Counter({"reduce_scatter": 1, "all_gather": 1})


def collectives(mesh, shape, layers):
    """The messages: (direction, collective) of activations; (collective, bytes)."""
    model = GPT(layers, WIDTH, 8, vocabulary=64, context=LENGTH, axis="model", **SHAPES[shape])
    job = mf.Job(
        "block", lambda b: {"loss": model.loss(b["tokens"])}, mf.Dataset("rows-*.h5", batch=1),
        optimizer=mf.AdamW(lr=0.001),
    )  # fmt: skip
    plan = compile_arrays(mesh, job, {"tokens": np.zeros((2, LENGTH + 1), np.int32)})
    program = plan.program("train")
    tensors = plan.tensors(program)
    backward = next(i for i, t in enumerate(program.tasks) if t.name.startswith("grad/"))
    activations, others = Counter(), Counter()
    for i, task in enumerate(program.tasks):
        first = tensors[task.inputs[0]] if task.kind == "collective" else None
        if first is None:
            continue
        if first.shape == (1, LENGTH, WIDTH):
            activations["backward" if i > backward else "forward", task.op] += 1
        else:
            others[task.op, prod(first.shape) * itemsize(first.dtype)] += 1
    return activations, others


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        ("model=2", "gpt"),
        ("model=2", "llama"),
        ("model=4", "gpt with dropout"),
        ("model=4", "llama"),
    ],
)
def test_a_block_more_sums_its_activations_twice_forward_and_twice_backward(mesh, shape):
    # What embedding and loss send is the same with any number of blocks. A sum is an all_reduce,
    # or a pair of the same bytes where that lets the ranks share what lies between blocks.
    (few, outside), (more, others) = (collectives(mesh, shape, layers) for layers in (2, 3))
    assert others == outside
    assert not few - more
    for direction in ("forward", "backward"):
        sent = Counter({op: n for (where, op), n in (more - few).items() if where == direction})
        assert sent in (SUM + SUM, SUM + PAIR, PAIR + PAIR)
