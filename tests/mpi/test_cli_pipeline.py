"""Pipeline stages through the command line: train, go on elsewhere and come back, fail."""

import time

import numpy as np
import pytest
from cli_job import (
    PINNED,
    STAGED,
    Runner,
    evaluations_of,
    relative,
    steps_of,
    write_data,
    write_job,
)

from mpiflow.cli import main


@pytest.fixture
def run(mpiexec, tmp_path):
    write_job(tmp_path, "evaluate=test, save=mf.Every(steps=5)", change=PINNED)
    write_data(tmp_path)
    return Runner(mpiexec, tmp_path)


def weights(folder, name):
    out = folder / f"{name}.npz"
    assert main(["checkpoint", "export", str(folder / name), "-o", str(out), "--all"]) == 0
    with np.load(out) as file:
        return dict(file)


@pytest.mark.ranks(4)
def test_a_run_goes_on_from_stages_to_others_and_back(run, tmp_path, capsys):
    straight = run.train(1, "--steps", 30, out="straight")
    run.train(2, "--steps", 10, *STAGED)
    assert main(["checkpoint", "info", str(tmp_path / "run"), "--deep"]) == 0
    assert "fc1.weight" in capsys.readouterr().out
    run.train(2, "--steps", 20, "--mesh", "data=2")
    found = run.train(
        4, "--steps", 30, "--mesh", "stage=2,data=2", "--micro-batches", 4, "--schedule", "gpipe"
    )
    assert [row["step"] for row in steps_of(found)] == list(range(1, 31))
    assert relative(steps_of(found), steps_of(straight)) < 1e-5
    for metric in ("loss", "accuracy", "hits"):
        ends = (evaluations_of(rows)[-1:] for rows in (found, straight))
        assert relative(*ends, metric) < 1e-5
    ours, theirs = weights(tmp_path, "run"), weights(tmp_path, "straight")
    assert sorted(ours) == sorted(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(4)
def test_a_run_goes_on_between_stages_of_different_ranks(run, tmp_path):
    straight = run.train(1, "--steps", 20, out="straight")
    run.train(4, "--steps", 5, "--mesh", "stage=2,data=3+1", "--micro-batches", 2, "--zero", 1)
    run.train(1, "--steps", 10)
    found = run.train(
        3, "--steps", 20, "--mesh", "stage=2,model=1+2", "--micro-batches", 4, "--schedule", "gpipe"
    )
    assert [row["step"] for row in steps_of(found)] == list(range(1, 21))
    assert relative(steps_of(found), steps_of(straight)) < 1e-5
    for metric in ("loss", "accuracy", "hits"):
        ends = (evaluations_of(rows)[-1:] for rows in (found, straight))
        assert relative(*ends, metric) < 1e-5
    ours, theirs = weights(tmp_path, "run"), weights(tmp_path, "straight")
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("kernel:14", "step 8, micro-batch 1, task relu (Relu): FloatingPointError: planted"),
        ("reader:7", "step 8, read train: OSError: [Errno 5] Input/output error"),
        ("main:7", "RuntimeError: planted"),
    ],
)
def test_a_fault_on_the_last_stage_ends_the_first_too(run, fault, cause):
    began = time.monotonic()
    done = run(2, "--steps", 40000, *STAGED, FAULT=f"1:{fault}", timeout=40)
    assert time.monotonic() - began < 20
    assert done.returncode == 1, done.stdout
    assert done.stdout.count(cause) == 1, done.stdout
    assert "rank 1" in done.stdout


def test_a_plan_shows_its_stages(run, tmp_path, capsys):
    job = [str(tmp_path / "job.py"), "--data", str(tmp_path), *map(str, STAGED)]
    assert main(["plan", *job, "--after", "stages"]) == 0
    shown = capsys.readouterr().out
    assert "2 pieces on 2 stages" in shown
    assert "piece 0 on stage 0: " in shown
    assert " nodes, fc1/linear .. " in shown
    assert "piece 1 on stage 1: " in shown
    assert " nodes, relu .. " in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--schedule", "gpipe"), "give --micro-batches N"),
        (("--schedule", "best", "--micro-batches", "2"), "'best' is none of 1f1b, gpipe"),
        (("--virtual", "2", "--micro-batches", "1"), "give --micro-batches N"),
    ],
)
def test_schedules_that_cannot_be_meant_are_usage_errors(run, tmp_path, capsys, options, says):
    job = [str(tmp_path / "job.py"), "--data", str(tmp_path), "--mesh", "stage=2", *options]
    assert main(["plan", *job]) == 2
    assert says in capsys.readouterr().err
