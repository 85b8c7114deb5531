"""A small transformer trained on several ranks: the losses are those of one rank."""

from functools import cache

import numpy as np
import pytest
from jobs import MemoryReader, on_ranks, target, train

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.driver import compile_job
from mpiflow.plan.records import DataSet, Field

ROWS, BATCH, LENGTH, WIDTH, WORDS = 60, 12, 6, 8, 13


def job(axis, kv_heads):
    def model(batch):
        ids, label = batch["ids"], batch["label"]
        words = nn.Embedding(WORDS, WIDTH, name="words")
        x = nn.Positions(LENGTH + 2, name="positions")(words(ids))
        mask = mf.not_equal(ids, 0)
        attention = nn.MultiHeadAttention(
            WIDTH, 4, kv_heads=kv_heads, causal=True, dropout=0.1, axis=axis, name="attention"
        )
        x = x + mf.dropout(attention(mf.normalise(x), mask=mask), 0.2)
        x = x + nn.FeedForward(16, axis=axis, name="feed")(mf.normalise(x))
        logits = words.as_logits(x)
        return {"loss": mf.mean_cross_entropy(logits, label, smoothing=0.1, ignore=-1)}

    return mf.Job("words", model, train=mf.Dataset("t-*.h5", batch=BATCH),
                  optimizer=mf.SGD(lr=0.5, momentum=0.9))  # fmt: skip


@cache
def arrays():
    draw = np.random.default_rng(0)
    ids = draw.integers(0, WORDS, (ROWS, LENGTH))
    label = np.where(draw.random((ROWS, LENGTH)) < 0.3, -1, (ids * 5 + 1) % WORDS)
    return {"ids": ids, "label": label}


@cache
def plan(mesh, axis=None, kv_heads=4):
    fields = (Field("ids", (LENGTH,), "int64"), Field("label", (LENGTH,), "int64"))
    data = {"train": DataSet("train", "t-*.h5", fields, (), ROWS, BATCH, False, 0, 4, 4, "")}
    return compile_job(job(axis, kv_heads), data, target(mesh))


def losses(mesh, axis=None, kv_heads=4, steps=25):
    made = plan(mesh, axis, kv_heads)
    readers = {"train": MemoryReader(arrays(), BATCH)}
    by_rank = on_ranks(made, lambda s: [o["loss"] for o in train(s, steps)], readers)
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


CASES = [
    ("data=2", None, 4), ("data=3", None, 4), ("model=2", None, 4), ("model=2", "model", 4),
    ("model=2", "model", 2), ("model=3", "model", 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "axis", "kv_heads"),
    [pytest.param(*c, marks=pytest.mark.ranks(int(c[0][-1]))) for c in CASES],
)
def test_losses_with_dropout_and_masked_labels_do_not_depend_on_the_ranks(mesh, axis, kv_heads):
    alone = losses("data=1", None, kv_heads)
    assert losses(mesh, axis, kv_heads) == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < 0.9 * alone[0]


def test_heads_split_by_an_axis_cost_two_sums_of_activations_a_layer():
    # Megatron's scheme: one sum after attention, one after the feed-forward layer. Whole heads
    # divide evenly, so that no weight and no activation moves besides.
    made = plan("model=2", "model")
    program = next(p for p in made.programs if p.name == "train")
    moves = [task.op for task in program.tasks if task.kind == "collective"]
    assert set(moves) == {"all_reduce"}
    forward = [task.name for task in program.tasks if task.kind == "collective"][:2]
    assert forward == ["attention.out/linear>B", "feed.down/linear>B"]
    layouts = {v.name: str(v.layout[0]) for v in made.variables}
    assert layouts["attention.qkv.weight"] == "S(1)"
    assert layouts["attention.out.weight"] == "S(0)"
