"""Every example gives the same losses and metrics on any mesh and in any layout.

Sizes are odd, so that spans differ and some are empty: 5 rows over 8 ranks, 13 hidden units over 3,
3 classes over 4, 12 heads over 8, and last batches of one row.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
from forced_layouts import forced
from jobs import EXAMPLES, MemoryReader, data, evaluate, on_ranks, target, train

import mpiflow as mf
from mpiflow.compiler.driver import compile_job
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import S
from mpiflow.jobfile import load_job
from mpiflow.models.gpt import GPT
from mpiflow.models.resnet import ResNet
from mpiflow.plan.records import DataSet, Field

sys.path.insert(0, str(EXAMPLES))
import generated

STEPS, ROWS = 10, 36
RESNET = ResNet((1, 1, 0, 0), width=3, classes=3, small=True)
SMALLER = (
    patch.dict("mpiflow.models.gpt.SIZES", tiny=GPT(1, 12, 3, vocabulary=101, context=7)),
    patch("mpiflow.models.images.classifier", lambda *_: RESNET),
    patch("mpiflow.models.resnet.ResNet", lambda *_, **__: RESNET),
    patch("generated.FACE", 7),
)
"""What examples take, with fewer layers and smaller images: there are as many kinds of layouts."""


def example(name, *settings):
    return load_job(str(EXAMPLES / f"{name}.py"), settings)[0]


def resnet():
    return example("images", "batch=5", "size=7", "classes=3", "warmup=2", "dtype=float64")


def gpt(batch):
    return example("gpt", f"batch={batch}", "warmup=2", "vocabulary=101")


def many_heads():
    """A decoder whose 12 heads, hidden dims and words an axis `model` splits."""
    decoder = GPT(1, 24, 12, vocabulary=101, context=7, hidden=13, axis="model")

    def model(batch):
        return {"loss": decoder.loss(batch["tokens"])}

    rows = mf.Dataset("rows-*.h5", batch=5)
    return mf.Job("heads", model, train=rows, evaluate=rows, optimizer=mf.AdamW(lr=0.01))


def images():
    return generated.images(ROWS, 3, size=7, channels=1, classes=3)


def tokens():
    return generated.token_rows(ROWS, 3, vocabulary=101, length=8)


CASES = {
    "digits": (
        lambda: example("digits", "batch=5", "width=13"),
        lambda: data(ROWS, features=64),
    ),
    "resnet": (resnet, images),
    "gpt": (lambda: gpt(5), tokens),
    "gpt of 6 rows": (lambda: gpt(6), tokens),
    "heads": (many_heads, tokens),
    "faces": (
        lambda: example("faces", "batch=5", "classes=7", "warmup=2", "dtype=float64"),
        lambda: generated.faces(ROWS, 3, classes=7),
    ),
    "widedeep": (
        lambda: example("widedeep", "batch=5", "table=101", "width=7", "warmup=2"),
        lambda: generated.clicks(ROWS, 3, table=101),
    ),
}
"""Name -> its job and its rows."""


@pytest.fixture(autouse=True, scope="module")
def _smaller():
    with ExitStack() as stack:
        for change in SMALLER:
            stack.enter_context(change)
        yield


@cache
def plan_of(case, mesh, seed=None, zero=0, micro_batches=1):
    """The plan of a case, for an evaluation that ends with a batch of one row."""
    make, rows = CASES[case]
    job = replace(make(), micro_batches=micro_batches)
    fields = tuple(Field(name, a.shape[1:], a.dtype.name) for name, a in rows().items())
    batch = job.train.batch
    records = {
        name: DataSet(name, "rows-*.h5", fields, (), count, batch, False, 0, 4, 4, "")
        for name, count in (("train", ROWS), ("evaluate", batch + 1))
    }
    with forced(seed):
        return compile_job(job, records, target(mesh, zero=zero))


@cache
def numbers(case, mesh, seed=None, **options):
    """Losses and metrics of each step of training, then of an evaluation: (steps, values)."""
    plan, rows = plan_of(case, mesh, seed, **options), CASES[case][1]()
    readers = {record.name: MemoryReader(rows, record.batch) for record in plan.data}

    def work(session):
        steps = [list(o.values()) for o in train(session, STEPS)]
        return steps, [list(o.values()) for _, o in evaluate(session)]

    by_rank = on_ranks(plan, work, readers)
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


def check(case, mesh, seed=None, **options):
    alone, found = numbers(case, "data=1"), numbers(case, mesh, seed, **options)
    assert len(alone[1]) == 2
    for ours, theirs in zip(found, alone, strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def on(*meshes):
    """Cases marked with the ranks of their mesh; a seed of forced layouts may stand beside it."""
    pairs = [mesh if isinstance(mesh, tuple) else (mesh, None) for mesh in meshes]
    cases = [
        pytest.param(mesh, seed, marks=pytest.mark.ranks(parse_mesh(mesh).size))
        for mesh, seed in pairs
    ]
    return pytest.mark.parametrize(("mesh", "seed"), cases)


FEW = (
    "width=3", ("model=2", 1), ("a=4", 2), ("data=2,model=2", 3), ("a=2,b=2", 4),
    ("model=2,data=3", 5), ("model=3", 6),
)  # fmt: skip
"""Beside those of test_example_models.py."""
MANY = (
    *FEW, "data=2", "data=3", "data=2,model=3", "data=3,model=2", ("a=3,b=2", 8), ("a=6", 9),
    ("data=1,model=2,expert=1", 6),
)  # fmt: skip


def test_forced_layouts_differ_from_the_cheapest():
    def layouts(seed):
        plan = plan_of("digits", "a=2,b=2", seed)
        return [task.inputs for task in plan.program("train").tasks], plan.program("train").seconds

    found = [layouts(seed) for seed in (None, 4, 5)]
    assert found[1][0] != found[0][0] != found[2][0] != found[1][0]
    assert found[0][1] < min(found[1][1], found[2][1])


@on(*MANY)
def test_a_multilayer_perceptron_on_any_mesh(mesh, seed):
    check("digits", mesh, seed)


@pytest.mark.parametrize("case", ["resnet", "gpt", "faces", "widedeep"])
@on(*FEW)
def test_an_example_on_any_mesh(case, mesh, seed):
    check(case, mesh, seed)


@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    ("case", "mesh", "seed"),
    [
        ("digits", "data=8", None), ("digits", "data=2,model=4", 1), ("resnet", "data=8", None),
        ("gpt", "a=8", 2),
    ],
)  # fmt: skip
def test_five_rows_are_spread_over_eight_ranks(case, mesh, seed):
    check(case, mesh, seed)


def test_ranks_beyond_the_rows_read_none():
    plan = plan_of("digits", "data=8")
    image = next(r for r in plan.program("train").registers if r.name == "batch/image")
    assert [plan.slice(rank).shape(image)[0] for rank in range(8)] == [1] * 5 + [0] * 3


@on("model=8", ("model=8", 1))
def test_twelve_heads_are_spread_unevenly(mesh, seed):
    check("heads", mesh, seed)


def test_a_rank_holds_whole_heads():
    plan = plan_of("heads", "model=8")
    weight = next(v for v in plan.variables if v.name == "block0.attention.qkv.weight")
    assert weight.layout == (S(1, 6),)
    assert [plan.slice(rank).shape(weight)[1] // 6 for rank in range(8)] == [2] * 4 + [1] * 4


@on(("data=2", 1), ("data=4", 2), ("data=2,model=2", 3))
def test_micro_batches_of_three_rows_on_any_mesh(mesh, seed):
    check("gpt of 6 rows", mesh, seed, micro_batches=2)


@pytest.mark.parametrize("zero", [1, 3])
@on("data=3", ("data=2,model=2", 1))
def test_split_variables_on_any_mesh(mesh, seed, zero):
    check("gpt of 6 rows", mesh, seed, zero=zero, micro_batches=zero)
