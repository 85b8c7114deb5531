"""Whatever goes wrong on one rank, all are gone within 10 s and the cause is printed once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Every rank but the last works on and on; the last does FAULT at step 3.
PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
import numpy as np
from mpiflow.errors import *
from mpiflow.exec.failure import guard
from mpiflow.exec.launch import check_ranks, connect

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

def recurse():
    recurse()

def thread_raises():
    raise DataError("train-1.h5: row 7 is damaged")

transport = connect()
with guard(transport) as failure:
    folder = Path(sys.argv[1])
    if sys.argv[2] == "folder":
        failure.use_folder(folder)
    start = transport.group(tuple(range(transport.size)), "data").bind_all_reduce(np.ones(1000))
    (folder / f"pid-{transport.rank}").write_text(str(os.getpid()))
    transport.barrier().wait()
    for step in range(10**9):
        if step == 3 and transport.rank == transport.size - 1:
            FAULT
        start().wait(transport.check)
"""

STUCK = """
            import time
            sys.modules[guard.__module__].THREAD_GRACE_SECONDS = 0.2
            failure.start_thread("read", thread_raises)
            time.sleep(60)
"""

pytestmark = pytest.mark.host("of processes that run no plan")


def alive(folder, until):
    """The ranks that still run at the time `until`, or none as soon as there is none."""
    pids = [path.read_text() for path in folder.glob("pid-*")]
    assert pids
    while (running := [pid for pid in pids if runs(pid)]) and time.monotonic() < until:
        os.sched_yield()
    return running


def runs(pid):
    try:
        # After the name, in brackets, comes the state; a zombie has ended.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def fail(mpiexec, tmp_path):
    def run(fault, ranks=2, folder="folder"):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.replace("FAULT", fault))
        began = time.monotonic()
        done = mpiexec(ranks, program, tmp_path, folder, timeout=30)
        assert alive(tmp_path, until=began + 10) == []
        assert time.monotonic() - began < 10
        assert done.returncode != 0
        return done

    return run


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("raise DataError('row 7 is damaged')", 1, "mpiflow: rank 1 of 2 on {host}: row 7 is dam"),
        ("raise UsageError('no such thing')", 2, "mpiflow: rank 1 of 2 on {host}: no such thing"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("recurse()", 1, "RecursionError: maximum recursion depth"),
        ("raise Unprintable", 1, "Unprintable: <exception str() failed>"),
        ("raise KeyboardInterrupt", 1, "mpiflow: rank 1 of 2 on {host}: interrupted"),
        ("sys.exit(3)", 3, "left by sys.exit(3) while other ranks were at work"),
        ("sys.exit(0)", 1, "left by sys.exit(0) while other ranks were at work"),
        ("sys.exit('enough')", 1, "left by sys.exit('enough')"),
        ("failure.start_thread('read', thread_raises)", 1, "train-1.h5: row 7 is damaged"),
        ("failure.start_thread('read', sys.exit)", 1, "left by sys.exit(None)"),
        (STUCK, 1, "train-1.h5: row 7 is damaged"),
    ],
)
@pytest.mark.ranks(2)
def test_a_failure_on_one_rank_ends_all_and_is_printed_once(fail, tmp_path, fault, code, cause):
    done = fail(fault)
    host = os.uname().nodename
    cause = cause.format(host=host)
    assert done.returncode == code, done.stdout
    assert done.stdout.count(cause) == 1, done.stdout
    assert f"rank 1 of 2 on {host}" in done.stdout
    assert done.stdout.count("mpiflow: ") == 1, done.stdout
    foreseen = any(word in fault for word in ("DataError", "UsageError", "exit", "thread"))
    assert done.stdout.count("Traceback") <= (not foreseen), done.stdout
    assert cause in (tmp_path / "failure.txt").read_text()


@pytest.mark.ranks(2)
def test_a_killed_rank_takes_the_others_with_it(fail):
    fail("os.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.ranks(3)
def test_ranks_that_fail_together_print_one_cause(mpiexec, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.replace("step == 3 and transport.rank", "step == 3 or 0").replace("FAULT", "1 / 0")
    )
    for attempt in range(3):
        done = mpiexec(3, program, tmp_path, "folder", timeout=30)
        assert done.returncode == 1
        assert done.stdout.count("ZeroDivisionError") == 1, (attempt, done.stdout)
    assert len(list(tmp_path.glob(".failure-*"))) == 1


@pytest.mark.ranks(2)
def test_without_a_run_folder_the_rank_prints_its_own_error(fail):
    done = fail("raise DataError('damaged')", folder="none")
    assert done.stdout.count("mpiflow: rank 1 of 2 on") == 1


@pytest.mark.ranks(3)
def test_an_error_that_all_ranks_raise_is_printed_once(mpiexec, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.replace("    start = ", "    check_ranks(transport, 2)\n    start = ")
    )
    done = mpiexec(3, program, tmp_path, "none", timeout=30)
    assert done.returncode == 1
    assert done.stdout.count("mpiflow: the plan is for 2 ranks, 3 were started") == 1
    assert done.stdout.count("the plan is for") == 1


@pytest.mark.ranks(2)
def test_leaving_without_closing_ends_the_others_too(mpiexec, tmp_path):
    """A program that uses no guard: its own error, or the end of it, must not hang."""
    for ending, code in (("raise ValueError('mine')", 1), ("sys.exit(0)", 1)):
        program = tmp_path / "program.py"
        program.write_text(
            "import sys\nfrom mpiflow.exec.launch import connect\ntransport = connect()\n"
            f"if transport.rank == 1:\n    {ending}\ntransport.barrier().wait()\n"
            "transport.barrier().wait()\n"
        )
        done = mpiexec(2, program, timeout=15)
        assert done.returncode == code, done.stdout
        assert done.stdout.count("ValueError: mine") == ending.count("mine")


@pytest.mark.ranks(2)
def test_a_job_that_ends_well_ends_with_0_and_says_nothing(mpiexec, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("10**9", "20").replace("FAULT", "pass"))
    done = mpiexec(2, program, tmp_path, "folder")
    assert (done.returncode, done.stdout) == (0, "")
    assert not (tmp_path / "failure.txt").exists()


def alone(tmp_path, fault, **variables):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("10**9", "5").replace("FAULT", fault))
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    launcher = ("PMI", "MPI", "OMPI", "SLURM", "HYD")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    return subprocess.run(
        [sys.executable, program, tmp_path, "folder"],
        env={**environment, "PYTHONPATH": root, **variables},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("pass", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise UsageError('no such setting')", 2, "mpiflow: no such setting\n"),
        (
            "failure.start_thread('read', thread_raises)\n            while 1: failure.check()",
            1,
            "train-1.h5: row 7 is damaged",
        ),
    ],
)
def test_a_rank_alone_ends_by_itself(tmp_path, fault, code, message):
    done = alone(tmp_path, fault)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert bool(done.stderr) == bool(message)


def test_srun_without_pmi_is_refused(tmp_path):
    """What srun gives where it does not know the MPI: the same variables, but worlds of 1."""
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    for rank in range(2):
        done = alone(tmp_path, "pass", SLURM_PROCID=str(rank), **step)
        assert done.returncode == 1
        assert "MPI world of 1 rank, but the launcher started 2 (SLURM_NTASKS=2)" in done.stderr
        assert "mpi4py is linked to" in done.stderr


def test_a_shell_in_a_slurm_job_may_run_alone(tmp_path):
    assert alone(tmp_path, "pass", SLURM_JOB_ID="1", SLURM_NTASKS="2").returncode == 0


def test_the_launcher_of_another_mpi_is_refused(tmp_path):
    done = alone(tmp_path, "pass", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    assert done.returncode == 1
    assert "started 2 (OMPI_COMM_WORLD_SIZE=2)" in done.stderr


@pytest.mark.parametrize("level", ["single", "serialized", "multiple"])
@pytest.mark.ranks(2)
def test_any_thread_level_will_do(mpiexec, tmp_path, level):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("10**9", "5").replace("FAULT", "pass"))
    done = mpiexec(2, program, tmp_path, "folder", MPI4PY_RC_THREAD_LEVEL=level)
    assert (done.returncode, done.stdout) == (0, "")
