"""Which values of a field are legal where it is used as an index, and that others are refused."""

import numpy as np
import pytest
from jobs import MemoryReader, compile_arrays, on_ranks, train

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.limits import Limits, index_limits
from mpiflow.errors import MpiflowError
from mpiflow.graph.graph import Graph, building

CLASSES = 5


def limits(use):
    """Those of `label`, as `use(logits, label)` uses it."""
    graph = Graph("train")
    logits = graph.input("logits", (6, CLASSES), "float32")
    label = graph.input("label", (6,), "int64")
    with building(graph):
        graph.outputs["loss"] = mf.mean(use(logits, label))
    return index_limits(graph).get("label")


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (mf.cross_entropy, Limits(5)),
        (lambda x, y: mf.cross_entropy(x, mf.cast(y, "int32")), Limits(5)),
        (lambda x, y: mf.cross_entropy(x, y, ignore=-1), Limits(5, frozenset({-1}))),
        (lambda x, y: mf.mean_cross_entropy(x, y, ignore=9), Limits(5, frozenset({9}))),
        (lambda x, y: mf.cross_entropy(x, y, ignore=-1) + mf.cross_entropy(x, y), Limits(5)),
        (
            lambda x, y: mf.cross_entropy(x, y, ignore=3) + mf.cross_entropy(x, y),
            Limits(5, frozenset({3})),
        ),
        (lambda x, y: mf.reduce_sum(x, -1) * mf.cast(y, "float32"), None),
    ],
)
def test_an_index_is_below_a_size_or_ignored(use, expected):
    assert limits(use) == expected


def job(batch=4):
    def model(batch):
        logits = nn.Dense(CLASSES, name="out")(batch["x"])
        return {"loss": mf.mean_cross_entropy(logits, batch["label"], ignore=-100)}

    data = mf.Dataset("train-*.h5", batch=batch)
    return mf.Job("ignoring", model, train=data, optimizer=mf.SGD(lr=0.1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("value", "legal"), [(-100, True), (4, True), (-1, False), (5, False)])
def test_a_label_that_is_neither_legal_nor_ignored_is_refused_where_it_is_read(value, legal):
    label = np.array([0, 1, 2, -100, 4, 3, value, 0])
    arrays = {"x": np.ones((8, 3), np.float32), "label": label}
    plan = compile_arrays("data=2", job(), arrays)

    def losses():
        readers = {"train": MemoryReader(arrays, 4)}
        return on_ranks(plan, lambda session: [o["loss"] for o in train(session, 2)], readers)

    if legal:
        assert np.isfinite(losses()).all()
        return
    words = rf"field 'label' must lie in 0..4 or be -100; out of range:\n.*: {value}"
    with pytest.raises(MpiflowError, match=words):
        losses()
