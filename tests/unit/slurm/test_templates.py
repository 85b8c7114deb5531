"""The batch scripts with a stub for srun: what it is given, and that its exit code is kept."""

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "slurm"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.sbatch"))


def run_template(name, folder, *arguments, srun=0, check=0, **variables):
    """Runs the script with stubs that log their arguments and exit with the codes given."""
    for program, code in (("srun", srun), ("mpiflow", check)):
        stub = folder / program
        log = f"{folder}/{program}.log"
        stub.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {log}\n'
            f'echo "$OMP_NUM_THREADS" > {folder}/threads\nexit {code}\n'
        )
        stub.chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "SLURM_"))}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(FOLDER / name), *arguments],
        env=inherited | path | variables,
        capture_output=True,
        text=True,
    )


def arguments_of(program, folder):
    return (folder / f"{program}.log").read_text().splitlines()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("code", [0, 1, 42, 137, 143])
def test_the_job_ends_with_the_exit_code_of_srun(name, code, tmp_path):
    assert run_template(name, tmp_path, "digits.plan", srun=code).returncode == code


@pytest.mark.parametrize("name", TEMPLATES)
def test_srun_is_given_pmi_the_cpus_and_all_arguments(name, tmp_path):
    run_template(name, tmp_path, "my run/a.plan", "--steps", "3", SLURM_CPUS_PER_TASK="8")
    given = arguments_of("srun", tmp_path)
    assert given[:2] == ["--mpi=pmi2", "--cpus-per-task=8"]
    run = ["mpiflow", "run", "--data", ".", "my run/a.plan", "--steps", "3"]
    assert given[given.index("mpiflow") :] == run


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_folder_of_the_data_can_be_named(name, tmp_path):
    run_template(name, tmp_path, "a.plan", MPIFLOW_DATA="/data of mine")
    assert arguments_of("srun", tmp_path)[-3:] == ["--data", "/data of mine", "a.plan"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_kind_of_pmi_can_be_named(name, tmp_path):
    run_template(name, tmp_path, "a.plan", MPIFLOW_SRUN_MPI="pmix")
    assert arguments_of("srun", tmp_path)[0] == "--mpi=pmix"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("own", "threads"), [({}, "8"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_threads_are_the_cpus_of_a_rank_unless_the_user_says(name, own, threads, tmp_path):
    run_template(name, tmp_path, "a.plan", SLURM_CPUS_PER_TASK="8", **own)
    assert (tmp_path / "threads").read_text().strip() == threads


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bad_plan_ends_the_job_before_srun(name, tmp_path):
    done = run_template(name, tmp_path, "a.plan", check=5, MPIFLOW_DATA="/data of mine")
    assert done.returncode == 5
    assert arguments_of("mpiflow", tmp_path) == ["check", "a.plan", "--data", "/data of mine"]
    assert not (tmp_path / "srun.log").exists()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_job_file_goes_to_run_unchecked(name, tmp_path):
    assert run_template(name, tmp_path, "examples/digits.py", check=5).returncode == 0
    assert arguments_of("srun", tmp_path)[-1] == "examples/digits.py"


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_a_plan_the_usage_is_printed(name, tmp_path):
    done = run_template(name, tmp_path)
    assert done.returncode != 0
    assert f"usage: sbatch {name}" in done.stderr
