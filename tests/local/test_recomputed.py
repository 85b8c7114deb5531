"""Activations that are computed again change no number, and the arenas that hold them shrink."""

from dataclasses import replace
from functools import cache

import pytest
from jobs import EXAMPLES, MemoryReader, on_ranks, target, train
from micro_jobs import arrays as rows_of
from micro_jobs import job as job_of
from test_example_models import CASES

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.jobfile import load_job
from mpiflow.plan.records import DataSet, Field

STEPS = 2


def compiled(job, arrays, mesh, level, schedule="1f1b", virtual=1, **more):
    fields = tuple(Field(name, a.shape[1:], a.dtype.name) for name, a in arrays.items())
    rows = len(next(iter(arrays.values())))
    data = DataSet("train", "rows-*.h5", fields, (), rows, job.train.batch, False, 0, 4, 4, "")
    wanted = target(mesh, recompute=level, pipeline=Pipeline(schedule, virtual), **more)
    return compile_job(replace(job, evaluate=None), {"train": data}, wanted)


@cache
def example(case, mesh, level, micro_batches=1, settings=()):
    """The plan of an example, and its reader."""
    name, given, rows = CASES[case]
    job, _ = load_job(str(EXAMPLES / f"{name}.py"), (*given, *settings))
    job, arrays = replace(job, micro_batches=micro_batches), rows()
    return compiled(job, arrays, mesh, level), MemoryReader(arrays, job.train.batch)


def losses(plan, reader):
    def work(session):
        return [step["loss"] for step in train(session, STEPS)]

    found = on_ranks(plan, work, {"train": reader})
    assert all(other == found[0] for other in found)
    return found[0]


def again(plan):
    return [t for p in plan.programs for t in p.tasks if t.name.startswith("again/")]


def check(level, *case):
    """The losses are those of a plan that keeps everything."""
    kept, reader = example(*case[:2], "none", *case[2:])
    plan, _ = example(*case[:2], level, *case[2:])
    assert again(plan)
    assert not again(kept)
    assert plan.identity == kept.identity
    assert losses(plan, reader) == losses(kept, reader)


@pytest.mark.ranks(4)
def test_losses_of_a_transformer_stay():
    check("selective", "gpt", "stage=2,data=2", 3)


@pytest.mark.ranks(2)
def test_losses_with_batch_norms_and_sampled_classes_stay():
    check("full", "faces", "data=2", 1, ("sampled=0.5",))


BATCH = 48


def layers(batch, marked=False, count=5):
    """Equal layers with dropout; the user marks two of them."""
    x = nn.Dense(96, name="layer0")(mf.cast(batch["x"], "float32"))
    for i in range(1, count):
        if marked and i in (2, 3):
            with mf.recompute():
                x = layer(x, i)
        else:
            x = layer(x, i)
    return {"loss": mf.mean_cross_entropy(x, batch["label"], ignore=-1)}


def layer(x, i):
    h = mf.gelu(nn.Dense(192, name=f"layer{i}.up")(nn.LayerNorm(name=f"layer{i}.norm")(x)))
    return x + nn.Dense(96, name=f"layer{i}.down")(mf.dropout(h, 0.3))


def layered(level, mesh="data=1", *, marked=False, micro_batches=2, precision="float32", **more):
    job = job_of(lambda rows: layers(rows, marked), BATCH, micro_batches, precision=precision)
    return compiled(job, rows_of(BATCH), mesh, level, **more)


def layered_losses(*case, **more):
    plan = layered(*case, **more)
    return losses(plan, MemoryReader(rows_of(BATCH), BATCH)), plan


@pytest.mark.parametrize(
    ("mesh", "level", "more"),
    [
        ("data=1", "selective", {"micro_batches": 1}),
        ("stage=2", "full", {"micro_batches": 4, "schedule": "gpipe"}),
        ("stage=2", "full", {"micro_batches": 4, "schedule": "zero-bubble"}),
        ("stage=2", "full", {"micro_batches": 4, "schedule": "interleaved", "virtual": 2}),
        ("data=2,stage=2", "selective", {"micro_batches": 2}),
        ("data=2", "full", {"micro_batches": 1, "zero": 3}),
        ("model=2", "full", {}),
    ],
)
@pytest.mark.ranks(2)
def test_losses_stay_in_every_schedule_and_layout(mesh, level, more):
    (kept, _), (found, plan) = (layered_losses(x, mesh, **more) for x in ("none", level))
    assert again(plan)
    assert found == kept


@pytest.mark.ranks(2)
def test_losses_stay_in_16_bits():
    pytest.importorskip("ml_dtypes")
    more = {"micro_batches": 2, "precision": "float16"}
    assert (
        layered_losses("full", "stage=2", **more)[0] == layered_losses("none", "stage=2", **more)[0]
    )


@pytest.mark.ranks(2)
def test_what_is_marked_is_computed_again_with_the_same_dropout():
    (kept, _), (found, plan) = (layered_losses("none", marked=x) for x in (False, True))
    names = {name for task in again(plan) for name in (task.name, *task.inputs)}
    assert any(name.startswith("layer2.up") for name in names)
    assert any("dropout" in name for name in names)
    assert not any(name.startswith(("layer1.", "layer4.")) for name in names)
    assert found == kept
    assert layered_losses("none", "data=2", marked=True)[0] == pytest.approx(kept, rel=1e-5)


def test_what_is_marked_keeps_less_than_the_level_of_the_rest():
    plan = layered("selective", marked=True)
    products = {t.inputs[1].partition(".")[0] for t in again(plan) if t.op == "Linear"}
    assert {"layer2", "layer3"} <= products
    assert not {"layer1", "layer4"} & products


def test_an_arena_is_as_small_as_the_plan_says_and_smaller_than_without():
    sizes, seen = [], []
    for level in ("none", "selective", "full"):
        plan, reader = example("gpt", "data=1", level)

        def work(session):
            train(session, STEPS)
            return session.arena.peak

        sizes.append(plan.arena())
        seen.append(on_ranks(plan, work, {"train": reader})[0])
    assert sizes == seen
    assert sizes[0] > sizes[1] > sizes[2]
