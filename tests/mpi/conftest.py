"""Tests on real ranks, of two kinds; plain `pytest tests` runs both.

- Tests of how whole programs behave use the fixture `mpiexec`, which starts ranks and waits.
- Tests marked `mpi` are themselves the ranks' program. Outside mpiexec, pytest-mpi skips them;
  `test_marked.py` starts them all, as `mpiexec -n N python -m pytest --with-mpi -m mpi tests/mpi`
  does by hand. There, the first test that fails on any rank ends all ranks, as the others may be
  waiting for it.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from cli_job import on_device

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/unit/exec"))


@pytest.fixture
def mpiexec(request):
    """`mpiexec(ranks, *arguments)` runs python with the arguments on that many ranks.

    Gives the completed process, output and errors together in `stdout`. A run that is still there
    after `timeout` seconds is ended, with all its ranks, and fails the test. With --device fake,
    what runs plans does so there.
    """
    options = request.config.option
    return partial(run_mpiexec, device=on_device(options.device, options.route))


def run_mpiexec(ranks, *arguments, timeout=60, prefix=(), device=(), **variables):
    beside = Path(sys.executable).parent / "mpiexec"
    command = [beside if beside.exists() else "mpiexec", *prefix, "-n", ranks, sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        [str(part) for part in (*command, *with_device(arguments, device))],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # mpiexec passes the signal on to its ranks.
        process.terminate()
        output, _ = process.communicate(timeout=10)
        pytest.fail(f"still running after {timeout} s; its output:\n{output}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def with_device(arguments, device):
    """The arguments of a command line that runs a plan, with these options if it names no device.

    A plan in a file has its route already.
    """
    given = [str(argument) for argument in arguments]
    runs = next((i for i, word in enumerate(given[:3]) if word in ("run", "predict")), None)
    if runs is None or "--device" in given:
        return arguments
    job = given[runs + 1]
    return (*arguments, *(device[:2] if job.endswith(".plan") else device))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep the unmarked tests of this folder: pytest-mpi takes its name, mpi, for the mark."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("mpi"):
            item.own_markers = [
                mark
                for mark in item.own_markers
                if "--with-mpi" not in mark.kwargs.get("reason", "")
            ]


def pytest_runtest_logreport(report):
    """Under mpiexec, a failure on one rank ends all ranks once it is printed."""
    if report.failed and "PMI_RANK" in os.environ:
        from mpi4py import MPI

        sys.__stderr__.write(f"\n{report.nodeid}\n{report.longreprtext}\n")
        sys.__stderr__.flush()
        MPI.COMM_WORLD.Abort(1)
