"""What a job computes does not depend on how many ranks run it; what was predicted is measured."""

from pathlib import Path

import numpy as np
import pytest
from cli_job import (
    CLASSES,
    FEATURES,
    TEST_ROWS,
    Runner,
    evaluations_of,
    relative,
    steps_of,
    write_data,
    write_job,
)

from mpiflow.io.checkpoint import read

STEPS = 30


def weights(run):
    """All variables of the newest checkpoint of a run, whole."""
    saved, skipped = read.newest(Path(run) / "checkpoints", deep=True)
    assert not skipped
    arrays = {v.name: np.empty(v.shape, v.dtype) for v in saved.variables}
    with read.CheckpointReader(saved) as reader:
        for name, array in arrays.items():
            reader.restore(name, tuple((0, n) for n in array.shape), array)
    return arrays


def count(variables, test):
    """Hits and mean cross entropy over all test rows, by NumPy in float64."""
    v = {name: array.astype(np.float64) for name, array in variables.items()}
    hidden = np.maximum(test["x"] @ v["fc1.weight"] + v["fc1.bias"], 0)
    logits = hidden @ v["out.weight"] + v["out.bias"]
    picked = logits[np.arange(len(logits)), test["label"]]
    losses = np.log(np.exp(logits).sum(1)) - picked
    return int((logits.argmax(1) == test["label"]).sum()), losses.mean()


def check_contract(rows):
    """The metrics file, key by key."""
    steps, evaluations, last = steps_of(rows), evaluations_of(rows), rows[-1]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert set(row) == {"step", "epoch", "loss", "accuracy", "hits", "seconds"}
        assert type(row["step"]) is type(row["epoch"]) is int
        assert row["seconds"] > 0
    for row in evaluations:
        assert set(row) == {"evaluation", "step", "epoch", "rows", "loss", "accuracy", "hits"}
        assert (row["evaluation"], row["rows"]) == ("evaluate", TEST_ROWS)
        before = next(r for r in steps if r["step"] == row["step"])
        assert rows.index(row) == rows.index(before) + 1
        assert row["epoch"] == before["epoch"]
    assert len(steps) + len(evaluations) + 1 == len(rows)
    measured = {"peak_bytes", "process_bytes", "bytes_sent", "step_seconds", "items"}
    assert set(last) == {*measured, "predicted", "ranks", "slowest", "tasks"}
    assert set(last["predicted"]) == measured
    assert type(last["bytes_sent"]) is int
    for each in (last, last["predicted"]):
        assert sum(each["items"].values()) == pytest.approx(each["step_seconds"], rel=1e-9)
    assert set(last["slowest"]["items"]) == set(last["items"]) == set(last["predicted"]["items"])
    assert len(last["tasks"]) == 3


@pytest.mark.parametrize("batch", [32, 35])
@pytest.mark.ranks(4)
def test_losses_and_evaluations_are_those_of_one_rank(mpiexec, tmp_path, batch):
    write_job(tmp_path)
    test = write_data(tmp_path)
    run = Runner(mpiexec, tmp_path)
    options = ("--set", f"batch={batch}", "--steps", STEPS)
    alone = run.train(1, *options, out="alone")
    for ranks in (2, 3, 4):
        rows = run.train(ranks, *options, out=f"on-{ranks}")
        assert relative(steps_of(rows), steps_of(alone)) < 1e-5
        check_contract(rows)
        ours, theirs = evaluations_of(rows), evaluations_of(alone)
        assert [row["step"] for row in ours] == [row["step"] for row in theirs]
        assert [row["hits"] for row in ours] == [row["hits"] for row in theirs]
        assert relative(ours, theirs) < 1e-5

        variables = weights(tmp_path / f"on-{ranks}")
        assert variables["fc1.weight"].shape == (FEATURES, 9)
        assert variables["out.bias"].shape == (CLASSES,)
        hits, loss = count(variables, test)
        assert ours[-1]["hits"] == hits
        assert ours[-1]["accuracy"] == pytest.approx(hits / TEST_ROWS, rel=1e-6)
        assert ours[-1]["loss"] == pytest.approx(loss, rel=1e-5)

        last = rows[-1]
        assert last["peak_bytes"] == last["predicted"]["peak_bytes"]
        assert last["bytes_sent"] == last["predicted"]["bytes_sent"] > 0
    assert alone[-1]["bytes_sent"] == alone[-1]["predicted"]["bytes_sent"] == 0
    assert alone[-1]["peak_bytes"] == alone[-1]["predicted"]["peak_bytes"]


@pytest.mark.ranks(3)
def test_a_rank_that_no_row_is_left_for_takes_part(mpiexec, tmp_path):
    write_job(tmp_path)
    write_data(tmp_path)
    run = Runner(mpiexec, tmp_path)
    options = ("--set", "batch=2", "--steps", 6)
    alone, rows = (run.train(n, *options, out=f"on-{n}") for n in (1, 3))
    assert relative(steps_of(rows), steps_of(alone)) < 1e-5
    assert relative(evaluations_of(rows), evaluations_of(alone)) < 1e-5
    assert rows[-1]["peak_bytes"] == rows[-1]["predicted"]["peak_bytes"]
