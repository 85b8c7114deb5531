"""Every example learns, and its losses are the same on 1, 2 and 3 ranks."""

import sys
from functools import cache

import numpy as np
import pytest
from jobs import EXAMPLES, MemoryReader, on_ranks, train

from mpiflow.compiler.driver import Target, compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.graph.mesh import parse_mesh
from mpiflow.jobfile import load_job
from mpiflow.plan.records import DataSet, Field

sys.path.insert(0, str(EXAMPLES))
import pack_text

ROWS = 36


def text(model):
    words = pack_text.chain(ROWS * 33, 256, seed=3)
    if model == "gpt":
        return pack_text.gpt_rows(words, 33)
    return pack_text.bert_rows(words, 33, 256, seed=0)


CASES = {
    "gpt": (("batch=6", "warmup=2"), lambda: text("gpt")),
}
"""Example -> its settings, and its rows."""


@cache
def losses(example, mesh, steps=5):
    settings, rows = CASES[example]
    job, _ = load_job(str(EXAMPLES / f"{example}.py"), settings)
    arrays = rows()
    batch = job.train.batch
    fields = tuple(Field(name, *declared) for name, declared in job.train.fields.items())
    for field in fields:
        array = arrays[field.name]
        assert (array.shape[1:], array.dtype.name) == (field.shape, field.dtype)
    count = len(next(iter(arrays.values())))
    data = {
        name: DataSet(name, "rows-*.h5", fields, (), count, batch, False, 0, 4, 4, "")
        for name in ("train", *job.evaluations)
    }
    plan = compile_job(job, data, Target(parse_mesh(mesh), find_machine("cpu")))
    readers = {name: MemoryReader(arrays, batch) for name in data}
    found = on_ranks(plan, lambda session: [o["loss"] for o in train(session, steps)], readers)
    assert all(other == found[0] for other in found)
    return found[0]


@pytest.mark.parametrize("example", CASES)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3)])
def test_losses_do_not_depend_on_the_ranks(example, ranks):
    alone = losses(example, "data=1")
    assert np.isfinite(alone).all()
    assert len(set(alone)) == len(alone)
    np.testing.assert_allclose(losses(example, f"data={ranks}"), alone, rtol=1e-4)
