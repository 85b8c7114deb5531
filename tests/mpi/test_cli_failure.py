"""What a user sees when a run cannot start, or when one rank of it fails."""

import os
import platform
import subprocess
import sys
import time
from dataclasses import replace

import h5py
import pytest
from cli_job import ROOT, Runner, write_data, write_job

from mpiflow.cli import main
from mpiflow.plan import store


@pytest.fixture
def run(mpiexec, tmp_path):
    write_job(tmp_path, "evaluate=test, save=mf.Every(steps=5)")
    write_data(tmp_path)
    return Runner(mpiexec, tmp_path)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("reader:7", "step 8, read train: OSError: [Errno 5] Input/output error"),
        ("kernel:7", "program train, step 8, task relu (Relu): FloatingPointError: planted"),
        ("main:7", "RuntimeError: planted"),
        ("disk:3", "shard-00001.h5: cannot be written: File too large (errno 27)"),
    ],
)
@pytest.mark.ranks(2)
def test_all_ranks_are_gone_within_5_s_of_a_fault_on_one(run, tmp_path, fault, cause):
    mark = tmp_path / "mark"
    done = run(2, "--steps", 40000, FAULT=f"1:{fault}", MARK=mark)
    assert time.time() - mark.stat().st_mtime < 5
    assert done.returncode == 1, done.stdout
    assert done.stdout.count(cause) == 1, done.stdout
    assert done.stdout.count(f"mpiflow: rank 1 of 2 on {platform.node()}: ") == 1
    assert done.stdout.count("mpiflow: ") == 1
    assert ("job.py:13" in done.stdout) == fault.startswith("kernel")
    assert cause in (tmp_path / "run" / "failure.txt").read_text()
    if fault.startswith("disk"):
        assert "earlier checkpoints are untouched" in done.stdout
        again = run(2, "--steps", 6)
        assert again.returncode == 0, again.stdout
        assert "no checkpoint was complete before: beginning at step 1" in again.stdout
        assert not (tmp_path / "run" / "failure.txt").exists()
        assert run.checkpoints() == ["step-00000005", "step-00000006"]


@pytest.mark.ranks(2)
def test_a_label_out_of_range_is_refused_at_its_step_with_file_and_row(run, tmp_path):
    write_data(tmp_path, label=5)
    done = run(2)
    assert done.returncode == 1
    assert done.stdout.count("mpiflow: ") == 1
    assert f" of 2 on {platform.node()}: step " in done.stdout
    assert "read train: field 'label' must lie in 0..4; out of range:" in done.stdout
    assert "train-000.h5 row 7: 5" in done.stdout


def plan_for(run, ranks):
    path = run.folder / "points.plan"
    arguments = ["--ranks", str(ranks), "--data", str(run.folder), "-o", str(path), "--json"]
    assert main(["plan", str(run.folder / "job.py"), *arguments, *run.device]) == 0
    return path


@pytest.mark.ranks(3)
def test_a_plan_for_two_is_refused_by_three(run, tmp_path):
    plan = plan_for(run, 2)
    done = run(3, job=plan.name)
    assert done.returncode == 1
    assert done.stdout.count("the plan is for 2 ranks, 3 were started") == 1
    assert "mpiexec -n 2" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
    ],
)
def test_a_rank_that_is_alone_although_more_were_started_is_refused(run, tmp_path, variables):
    done = alone(run, variables)
    assert done.returncode == 1
    assert "MPI world of 1 rank, but the launcher started 2" in done.stdout
    assert f"{list(variables)[-1]}=2" in done.stdout
    assert done.stdout.count("mpiflow: ") == 1
    assert not (tmp_path / "run").exists()


def alone(run, variables):
    """As the launcher of another MPI starts a rank: its variables, but no world of several."""
    launcher = ("PMI", "MPI", "OMPI", "SLURM", "HYD")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    command = [sys.executable, "-m", "mpiflow", "run", "job.py"]
    return subprocess.run(
        command, cwd=run.folder, env={**environment, "PYTHONPATH": str(ROOT), **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30,
    )  # fmt: skip


@pytest.mark.ranks(2)
def test_a_run_that_cannot_be_meant_is_refused_before_anything_is_written(run, tmp_path):
    """Every refusal comes once, from one rank."""
    plan = plan_for(run, 2)
    store.save(replace(store.load(plan), version="0.0.1"), tmp_path / "old.plan")
    write_job(tmp_path, name="wrong.py", change=("logits = nn", "x + 'x'; logits = nn"))
    cases = [
        (("--set", "wdth=3"), "job.py", 2, "no setting 'wdth'; it has batch=32, width=9"),
        (("--mesh", "data=3"), "job.py", 2, "--mesh data=3 is for 3 ranks, 2 were started"),
        (("--mesh", "data=2"), plan.name, 2, "--mesh changes a plan"),
        (("--bogus",), "job.py", 2, "unrecognized arguments: --bogus"),
        ((), "old.plan", 1, "made by mpiflow 0.0.1, this is mpiflow "),
        ((), "wrong.py", 1, "wrong.py:14"),
    ]
    for options, job, code, message in cases:
        done = run(2, *options, job=job)
        assert done.returncode == code, done.stdout
        assert message in done.stdout
        assert done.stdout.count("mpiflow: ") == 1, done.stdout
        assert "Traceback" not in done.stdout
        assert not (tmp_path / "run").exists()


@pytest.mark.ranks(2)
def test_other_data_than_the_plan_was_made_for_is_refused(run, tmp_path):
    plan = plan_for(run, 2)
    with h5py.File(tmp_path / "train-001.h5", "r+") as file:
        file["x"][0] += 1
    done = run(2, job=plan.name)
    assert done.returncode == 1
    assert "the plan was made for other data than" in done.stdout
    assert "train-001.h5" in done.stdout
    (tmp_path / "train-001.h5").write_bytes(b"no HDF5")
    (tmp_path / "train-002.h5").write_bytes((tmp_path / "train-002.h5").read_bytes()[:999])
    for job in (plan.name, "job.py"):
        done = run(2, job=job)
        assert done.returncode == 1
        assert "train-001.h5: not an HDF5 file" in done.stdout
        assert "train-002.h5: truncated" in done.stdout
        assert done.stdout.count("mpiflow: ") == 1
    assert not (tmp_path / "run").exists()
