"""The folder of a run: where it begins, and what is refused before the first step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpiflow as mf
from mpiflow import nn, runfolder
from mpiflow.errors import CheckpointError, DataError
from mpiflow.graph.mesh import parse_mesh
from mpiflow.io.checkpoint import write
from mpiflow.io.pack import pack
from mpiflow.plan import store
from mpiflow.planning import make_plan
from mpiflow.runlock import RunLock
from mpiflow.train import Options


def job(lr=0.1, patience=0):
    def model(batch):
        return {"loss": mf.mean(mf.square(nn.Dense(1, name="fc")(batch["x"])))}

    data = mf.Dataset("x.h5", batch=4)
    best = mf.Best("loss", mode="min", patience=patience) if patience else None
    return mf.Job("j", model, train=data, evaluate=data, optimizer=mf.SGD(lr=lr), best=best)


@pytest.fixture
def plan_of(tmp_path):
    pack({"x": np.ones((20, 3), np.float32)}, f"{tmp_path}/x.h5")

    def plan_of(**settings):
        return make_plan(job(**settings), tmp_path, parse_mesh("data=1"), tmp_path)

    return plan_of


@pytest.fixture
def prepare(tmp_path):
    def prepare(plan, **options):
        with RunLock() as lock:
            return runfolder.prepare(plan, Options(tmp_path / "run", tmp_path, **options), lock)

    return prepare


def save(plan, out, step, **state):
    """A checkpoint of step `step`, as a run of the plan on one rank leaves it."""
    folder = out / runfolder.CHECKPOINTS
    write.prepare(folder, step)
    writer = write.CheckpointWriter(folder, step, 0, "here")
    for variable in plan.variables:
        writer.write(variable.name, (0,) * len(variable.shape), np.zeros(variable.shape, "f4"))
    writer.finish()
    header = write.header(
        plan, digest=store.digest(plan), program=store.program_digest(plan),
        step=step, epoch=1, state=state,
    )  # fmt: skip
    write.commit(folder, header, 1)


def write_metrics(out, *rows):
    (out / runfolder.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def step(number):
    return {"step": number, "loss": 1.0, "seconds": 0.1}


LAST = {"peak_bytes": {"host": 1}}


def test_a_new_run_begins_with_nothing_and_leaves_plan_and_provenance(plan_of, prepare, tmp_path):
    plan = plan_of()
    assert prepare(plan) == runfolder.Start()
    assert store.load(tmp_path / "run" / runfolder.PLAN) == plan
    prepare(plan)
    history = json.loads((tmp_path / "run" / runfolder.PROVENANCE).read_text())
    assert len(history) == 2
    assert history[0]["digest"] == store.digest(plan)
    assert {"started", "command", "host", "python", "mpiflow", "numpy", "ranks"} < set(history[0])


def test_it_goes_on_from_the_newest_and_drops_the_rows_after_it(plan_of, prepare, tmp_path):
    plan = plan_of()
    prepare(plan)
    out = tmp_path / "run"
    for number in (1, 2):
        save(plan, out, number, best=0.5, best_step=1, since_best=number)
    write_metrics(out, step(1), step(2), step(3), step(4))
    (out / runfolder.FAILURE).write_text("of the attempt before")
    start = prepare(plan)
    assert (start.step, start.best, start.best_step, start.since_best) == (2, 0.5, 1, 2)
    assert Path(start.checkpoint).name == "step-00000002"
    assert not start.over
    assert start.remarks == (
        "going on after step 2 (written by 1 ranks)",
        "dropped the metrics of 2 steps after step 2",
    )
    assert (out / runfolder.METRICS).read_text().count("\n") == 2
    assert not (out / runfolder.FAILURE).exists()


def test_a_run_that_is_over_is_complete_where_its_metrics_are(plan_of, prepare, tmp_path):
    plan = plan_of()
    prepare(plan)
    out = tmp_path / "run"
    save(plan, out, 5)
    write_metrics(out, step(5), LAST)
    assert prepare(plan).complete
    assert prepare(plan, steps=4).complete
    assert not prepare(plan, steps=6).over
    write_metrics(out, step(5))
    start = prepare(plan)
    assert start.over
    assert not start.complete


def test_a_run_without_patience_left_is_over(plan_of, prepare, tmp_path):
    plan = plan_of(patience=3)
    prepare(plan)
    save(plan, tmp_path / "run", 2, best=0.5, best_step=1, since_best=2)
    assert not prepare(plan).over
    save(plan, tmp_path / "run", 3, best=0.5, best_step=1, since_best=3)
    assert prepare(plan).over


def test_fresh_moves_every_old_run_aside(plan_of, prepare, tmp_path):
    plan = plan_of()
    prepare(plan)
    for number in (1, 2):
        save(plan, tmp_path / "run", 3)
        start = prepare(plan, fresh=True)
        assert start.step == 0
        assert start.remarks == (f"moved the old run to {tmp_path}/run.{number}",)
        assert (tmp_path / f"run.{number}" / "checkpoints" / "step-00000003").is_dir()


def test_a_run_killed_in_its_first_save_begins_anew_and_says_so(plan_of, prepare, tmp_path):
    plan = plan_of()
    prepare(plan)
    write.prepare(tmp_path / "run" / runfolder.CHECKPOINTS, 4)
    write_metrics(tmp_path / "run", step(1), step(2))
    start = prepare(plan)
    assert (start.checkpoint, start.step) == ("", 0)
    passed, anew, dropped = start.remarks
    assert "step-00000004.partial" in passed
    assert anew == "no checkpoint was complete before: beginning at step 1"
    assert dropped == "dropped the metrics of 2 steps after step 0"


def test_it_never_begins_anew_where_a_checkpoint_was_damaged(plan_of, prepare, tmp_path):
    plan = plan_of()
    prepare(plan)
    save(plan, tmp_path / "run", 4)
    (shard,) = (tmp_path / "run").glob("checkpoints/*/*.h5")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="no checkpoint there is complete"):
        prepare(plan)


def test_another_program_is_refused_unless_accepted(plan_of, prepare, tmp_path):
    prepare(plan_of())
    save(plan_of(), tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"SGD\(lr=0.1.* in the checkpoint, 'SGD\(lr=0.2"):
        prepare(plan_of(lr=0.2))
    start = prepare(plan_of(lr=0.2), accept_changes=True)
    assert start.step == 2
    assert any(line.startswith("accepted a change: optimizer") for line in start.remarks)


def test_a_folder_that_cannot_be_used_is_named(plan_of, tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.h5/run: the run's folder cannot be used"):
        runfolder.prepare(plan_of(), Options(tmp_path / "x.h5" / "run", tmp_path), RunLock())


def test_other_data_are_refused_before_anything_is_written(plan_of, prepare, tmp_path):
    plan = plan_of()
    pack({"x": np.ones((21, 3), np.float32)}, f"{tmp_path}/x.h5", overwrite=True)
    with pytest.raises(DataError, match=r"x\.h5: 21 rows; the plan says 20"):
        prepare(plan)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["{", "", "3"])
def test_a_damaged_provenance_is_told_and_holds_nothing_up(plan_of, prepare, tmp_path, content):
    plan = plan_of()
    prepare(plan)
    (tmp_path / "run" / runfolder.PROVENANCE).write_text(content)
    assert "provenance.json was damaged" in prepare(plan).remarks[0]
    assert len(json.loads((tmp_path / "run" / runfolder.PROVENANCE).read_text())) == 1


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_in_which_a_run_is_at_work_is_refused(plan_of, tmp_path, fresh):
    plan, options = plan_of(), Options(tmp_path / "run", tmp_path)
    again = Options(tmp_path / "run", tmp_path, fresh=fresh)
    with RunLock() as first, RunLock(patience=0) as second:
        runfolder.prepare(plan, options, first)
        with pytest.raises(CheckpointError, match=f"at work here: process {os.getpid()} on"):
            runfolder.prepare(plan, again, second)
        first.close()
        runfolder.prepare(plan, again, second)


def test_a_killed_process_leaves_no_lock(tmp_path):
    program = f"""
import sys; from pathlib import Path; from mpiflow.runlock import RunLock
RunLock().take(Path({str(tmp_path)!r})); print("taken", flush=True); sys.stdin.read()"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as other:
        assert other.stdout.readline() == b"taken\n"
        with RunLock(patience=0) as lock, pytest.raises(CheckpointError, match="at work here"):
            lock.take(tmp_path)
        other.kill()
        other.wait()
    with RunLock(patience=0) as lock:
        lock.take(tmp_path)
