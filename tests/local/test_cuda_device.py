"""Jobs on the cuda device, with NumPy behind what it asks of CuPy: the bits of the host."""

from dataclasses import replace

import pytest
from gpu_jobs import on_gpus
from jobs import classifier, compile_for, evaluate, on_ranks, train


def learn(session):
    return train(session, 3), evaluate(session)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "route"),
    [
        ("data=2", "staged"),
        ("data=3", "nccl"),
        ("data=2,model=2", "nccl"),
        ("stage=2", "staged"),
        ("data=3", "mpi"),
        ("data=2,model=2", "mpi"),
        ("stage=2", "mpi"),
    ],
    ids=str,
)
def test_a_job_learns_what_it_does_on_the_host_to_the_bit(mesh, route):
    expected = on_ranks(compile_for(mesh, classifier()), learn)
    assert on_gpus(compile_for(mesh, classifier(), route=route), learn) == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_job_of_16_bits_does_so_too(precision):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    job = replace(classifier(40), precision=precision)
    expected = on_ranks(compile_for("data=2", job), learn)
    assert on_gpus(compile_for("data=2", job, route="nccl"), learn) == expected
