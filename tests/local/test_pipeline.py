"""Pipeline stages give the losses of one rank, whatever their number and their schedule."""

from dataclasses import replace

import pytest
from jobs import classifier, compile_for, evaluate, on_ranks, train

import mpiflow as mf
from mpiflow.compiler.pipeline import Pipeline

STEPS = 4


def pipelined(mesh, micro_batches, schedule="1f1b", virtual=1):
    job = classifier(hidden="B", optimizer=mf.Adam(lr=0.01, clip=1.0))
    job = replace(job, micro_batches=micro_batches)
    return compile_for(mesh, job, pipeline=Pipeline(schedule, virtual))


def work(session):
    steps = train(session, STEPS)
    return [step["loss"] for step in steps], [outputs for _, outputs in evaluate(session)]


@pytest.fixture(scope="module")
def alone():
    return on_ranks(pipelined("data=1", 1), work)[0]


@pytest.mark.parametrize(
    ("mesh", "micro_batches", "schedule", "virtual"),
    [
        ("stage=2", 1, "1f1b", 1),
        ("stage=2", 4, "1f1b", 1),
        ("stage=4", 16, "1f1b", 1),
        ("stage=2,data=2", 4, "1f1b", 1),
        ("stage=2,model=2", 2, "1f1b", 1),
        ("data=2,stage=2", 4, "1f1b", 1),
        ("stage=2,data=3", 2, "zero-bubble", 1),
        ("stage=3", 8, "zero-bubble", 1),
        ("stage=2", 8, "gpipe", 1),
        ("stage=2", 4, "interleaved", 2),
        ("stage=3", 1, "1f1b", 1),
    ],
)
def test_stages_train_as_one_rank_does(alone, mesh, micro_batches, schedule, virtual):
    losses, metrics = alone
    for found, evaluated in on_ranks(pipelined(mesh, micro_batches, schedule, virtual), work):
        assert found == pytest.approx(losses, rel=1e-6)
        for ours, theirs in zip(evaluated, metrics, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
