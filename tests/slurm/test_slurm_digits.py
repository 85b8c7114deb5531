"""The batch scripts train the digits job on a real Slurm, and their exit codes are true."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest

ROOT = Path(__file__).parents[2]
SINGLE, MULTI = ROOT / "slurm/single-node.sbatch", ROOT / "slurm/multi-node.sbatch"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")
STEPS = 60
# What srun gives when a rank failed: that rank's code, or that of the ranks it ended for it.
FAILED = {1, 137, 143}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the packed digits and a plan each for 2 and for 4 ranks."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pack_digits.py", "--out", str(folder / "digits")])
        runpy.run_path(str(ROOT / "examples/pack_digits.py"), run_name="__main__")
    for ranks in (2, 4):
        make_plan(folder, ranks)
    return folder


def make_plan(folder, ranks):
    command = ["plan", str(ROOT / "examples/digits.py"), "--ranks", str(ranks)]
    done = subprocess.run(
        [sys.executable, "-m", "mpiflow", *command, "-o", f"{ranks}.plan"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def submit(slurm, folder, script, *arguments, options=()):
    return slurm.run(script, *arguments, options=options, cwd=folder)


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run):
    return [row["step"] for row in metrics_of(run) if "loss" in row and "seconds" in row]


def wait_for_step(run, seconds):
    end = time.monotonic() + seconds
    while not (
        (run / "metrics.jsonl").exists() and '"step"' in (run / "metrics.jsonl").read_text()
    ):
        assert time.monotonic() < end, f"{run}: no step within {seconds} s"
        time.sleep(0.05)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("script", "plan", "options"),
    [(SINGLE, "2.plan", ()), (MULTI, "4.plan", TWO_BY_TWO)],
    ids=["single-node", "multi-node"],
)
def test_a_script_trains_the_digits(script, plan, options, slurm, folder):
    out = script.stem
    arguments = (plan, "--out", out, "--steps", STEPS)
    job = submit(slurm, folder, script, *arguments, options=options)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    rows = metrics_of(folder / out)
    assert steps_of(folder / out) == list(range(1, STEPS + 1))
    evaluations = [row for row in rows if "evaluation" in row]
    assert evaluations[-1]["rows"] == 360
    assert evaluations[-1]["accuracy"] >= 0.9
    assert rows[-1]["bytes_sent"] == rows[-1]["predicted"]["bytes_sent"] > 0


@pytest.mark.ranks(4)
def test_a_signal_ends_the_job_with_75_and_it_goes_on_later(slurm, folder):
    job = slurm.sbatch(
        MULTI, "4.plan", "--out", "signal", "--steps", 10**6, options=TWO_BY_TWO, cwd=folder
    )
    wait_for_step(folder / "signal", seconds=60)
    slurm.signal(job, "USR1")
    stopped = slurm.wait(job)
    assert (stopped.state, stopped.exit_code) == ("FAILED", 75), stopped.output
    step = steps_of(folder / "signal")[-1]
    again = ("4.plan", "--out", "signal", "--steps", step + 5)
    job = submit(slurm, folder, MULTI, *again, options=TWO_BY_TWO)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    assert steps_of(folder / "signal") == list(range(1, step + 6))


def test_missing_data_end_the_job_before_any_rank_starts(slurm, folder, monkeypatch):
    empty = folder / "empty"
    empty.mkdir()
    monkeypatch.setenv("MPIFLOW_DATA", str(empty))
    job = submit(slurm, folder, MULTI, "4.plan", "--out", "missing", options=TWO_BY_TWO)
    assert (job.state, job.exit_code) == ("FAILED", 1), job.output
    assert "digits/train-000.h5" in job.output
    assert "srun" not in job.output
    assert not (folder / "missing").exists()


@pytest.mark.ranks(4)
def test_a_failing_rank_fails_the_job(slurm, folder):
    spoilt = folder / "spoilt"
    shutil.copytree(folder / "digits", spoilt / "digits")
    with h5py.File(spoilt / "digits/train-002.h5", "r+") as file:
        file["label"][7] = 10
    make_plan(spoilt, 4)
    job = submit(slurm, spoilt, MULTI, "4.plan", options=TWO_BY_TWO)
    assert job.state == "FAILED", job.output
    assert job.exit_code in FAILED, job.output
    assert "10" in job.output
    assert "train-002.h5" in job.output


@pytest.mark.ranks(4)
def test_srun_without_pmi_is_refused(slurm, folder, monkeypatch):
    monkeypatch.setenv("MPIFLOW_SRUN_MPI", "none")
    job = submit(slurm, folder, MULTI, "4.plan", "--out", "alone", options=TWO_BY_TWO)
    assert job.state == "FAILED", job.output
    assert job.exit_code in FAILED, job.output
    assert "--mpi=pmi2" in job.output
    assert not (folder / "alone").exists()


@pytest.mark.ranks(2)
def test_a_plan_for_another_number_of_ranks_is_refused(slurm, folder):
    job = submit(slurm, folder, SINGLE, "4.plan", "--out", "other")
    assert job.state == "FAILED", job.output
    assert job.exit_code in FAILED, job.output
    assert "the plan is for 4 ranks" in job.output
    assert not (folder / "other").exists()


def test_a_damaged_plan_ends_the_job_before_any_rank_starts(slurm, folder):
    text = (folder / "2.plan").read_text()
    (folder / "damaged.plan").write_text(text[: len(text) // 2])
    job = submit(slurm, folder, SINGLE, "damaged.plan")
    assert (job.state, job.exit_code) == ("FAILED", 1), job.output
    assert "srun" not in job.output
