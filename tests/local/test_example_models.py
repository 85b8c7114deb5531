"""Every example learns, and its losses are the same on 1, 2 and 3 ranks."""

import sys
from functools import cache

import numpy as np
import pytest
from jobs import EXAMPLES, MemoryReader, compile_arrays, data, on_ranks, train

from mpiflow.jobfile import load_job

sys.path.insert(0, str(EXAMPLES))
import generated

ROWS = 36


def images(size):
    return generated.images(ROWS, 3, size=size, channels=1, classes=10)


def words(draw):
    return draw(ROWS, 3, vocabulary=256, length=33)


CASES = {
    "digits": ("digits", ("batch=7",), lambda: data(ROWS, features=64)),
    "gpt": ("gpt", ("batch=6", "warmup=2"), lambda: words(generated.token_rows)),
    "bert": ("bert", ("batch=6", "warmup=2"), lambda: words(generated.pairs)),
    "alexnet": ("images", ("batch=7", "warmup=2", "size=16", "lr=0.1"), lambda: images(16)),
    "resnet": (
        "images",
        ("batch=7", "warmup=2", "size=8", "model=resnet18", "dtype=float64"),
        lambda: images(8),
    ),
    "faces": (
        "faces",
        ("batch=7", "warmup=2", "classes=9", "dtype=float64"),
        lambda: generated.faces(ROWS, 3, classes=9),
    ),
    "widedeep": (
        "widedeep",
        ("batch=12", "warmup=2"),
        lambda: generated.clicks(ROWS, 3, table=200),
    ),
    "field": (
        "field",
        ("batch=6", "warmup=2", "size=8"),
        lambda: generated.fields(ROWS, 3, size=8),
    ),
}
"""Name -> example, its settings, and its rows."""


@cache
def losses(case, mesh, steps=10, more=()):
    example, settings, rows = CASES[case]
    job, _ = load_job(str(EXAMPLES / f"{example}.py"), (*settings, *more))
    arrays = rows()
    if job.train.fields:
        declared = {name: (a.shape[1:], a.dtype.name) for name, a in arrays.items()}
        assert job.train.fields == declared
    plan = compile_arrays(mesh, job, arrays)
    readers = {"train": MemoryReader(arrays, job.train.batch)}
    found = on_ranks(plan, lambda session: [o["loss"] for o in train(session, steps)], readers)
    assert all(other == found[0] for other in found)
    return found[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 3)])
def test_losses_do_not_depend_on_the_ranks(case, ranks):
    alone = losses(case, "data=1")
    assert np.isfinite(alone).all()
    assert len(set(alone)) == len(alone)
    # Batch norm makes of small differences large ones; in float64 there is none to speak of.
    tolerance = 1e-8 if "dtype=float64" in CASES[case][1] else 1e-4
    np.testing.assert_allclose(losses(case, f"data={ranks}"), alone, rtol=tolerance)


@pytest.mark.ranks(2)
def test_faces_are_the_same_on_a_model_axis():
    np.testing.assert_allclose(losses("faces", "model=2"), losses("faces", "data=1"), rtol=1e-8)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["gpt", "faces", "widedeep", "field"])
def test_losses_in_16_bits_follow_those_of_float32(case):
    pytest.importorskip("ml_dtypes")
    full = ("dtype=float32",) if "dtype=float64" in CASES[case][1] else ()
    exact = losses(case, "data=2", 2, full)
    near = losses(case, "data=2", 2, (*full, "precision=bfloat16"))
    assert near != exact
    np.testing.assert_allclose(near, exact, rtol=5e-2)
