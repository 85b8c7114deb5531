import os
import subprocess
import sys
import threading

import pytest

from mpiflow.errors import DataError, StallError, TaskError, UsageError
from mpiflow.exec import failure as failures
from mpiflow.exec.failure import guard
from mpiflow.exec.local import LocalWorld, run_local


def alone():
    return LocalWorld(1).transports[0]


@pytest.mark.ranks(3)
def test_one_rank_prints_and_the_job_ends(capsys, tmp_path):
    def work(transport):
        with guard(transport) as failure:
            failure.use_folder(tmp_path)
            if transport.rank == 1:
                raise DataError("row 7 is damaged")
            transport.barrier().wait(transport.check)

    with pytest.raises(SystemExit) as caught:
        run_local(3, work)
    assert caught.value.code == 1
    assert isinstance(caught.value.__cause__, DataError)
    message = f"mpiflow: rank 1 of 3 on {os.uname().nodename}: row 7 is damaged\n"
    assert capsys.readouterr().err == message
    assert (tmp_path / "failure.txt").read_text().startswith(message)


@pytest.mark.ranks(2)
def test_a_second_rank_that_finds_a_stall_says_nothing(capsys, tmp_path, monkeypatch):
    """As under Slurm, where the others live on while the job of the first is being ended."""
    monkeypatch.setattr(failures, "GRACE_SECONDS", 0.0)

    def work(transport):
        failure = failures.Failure(transport)
        failure.use_folder(tmp_path)
        failure.report(StallError(f"rank 5 is silent, says {transport.rank}"))

    run_local(2, work)
    assert capsys.readouterr().err.count("mpiflow: ") == 1


def test_a_stall_is_told_though_the_file_system_stands_still(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "_MARK_SECONDS", 0.01)
    monkeypatch.setattr(failures, "GRACE_SECONDS", 0.01)
    never = threading.Event()
    monkeypatch.setattr(failures, "_is_new", lambda path: never.wait())
    failure = failures.Failure(alone())
    failure.use_folder(tmp_path)
    failure.report(StallError("rank 5 reads for ever"))
    never.set()
    assert capsys.readouterr().err == "mpiflow: rank 5 reads for ever\n"


def test_a_run_that_ends_well_closes_the_transport(tmp_path, capsys):
    with guard(alone()) as failure:
        failure.use_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_marks_of_earlier_runs_are_removed(tmp_path):
    (tmp_path / ".failure-old").touch()
    with guard(alone()) as failure:
        failure.use_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_was_not_foreseen_shows_its_stack_and_its_text_once(capsys):
    with pytest.raises(SystemExit), guard(alone()):
        raise KeyError("weights")
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith("mpiflow: KeyError: 'weights'\n")
    assert printed.count("KeyError: 'weights'") == 1


def test_a_task_error_shows_where_its_cause_arose(capsys):
    with pytest.raises(SystemExit), guard(alone()):
        try:
            [][7]
        except IndexError as error:
            raise TaskError(f"step 3, task fc1: {error}") from error
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith("mpiflow: step 3, task fc1: list index out of range\n")
    assert printed.count("list index") == 1


def test_a_full_disk_does_not_hide_the_error(capsys, tmp_path):
    with pytest.raises(SystemExit) as caught, guard(alone()) as failure:
        failure.use_folder(tmp_path / "never made")
        raise UsageError("no such setting")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "mpiflow: no such setting\n"


def test_the_first_thread_that_fails_is_raised_in_the_next_wait():
    with guard(alone()) as failure:
        failure.check()
        thread = threading.Thread(target=failure.hand_over, args=[DataError("first"), 60])
        thread.start()
        with pytest.raises(DataError, match="first"):
            while True:
                failure.check()
        thread.join()
        failure.hand_over(DataError("second"), 60)
        with pytest.raises(DataError, match="first"):
            failure.check()
        failure._pending = None


def test_a_thread_ends_the_process_if_nobody_takes_its_error(pytestconfig):
    program = (
        "import threading\n"
        "from mpiflow.exec import failure as failures\n"
        "from mpiflow.exec.local import LocalWorld\n"
        "failures.THREAD_GRACE_SECONDS = 0.05\n"
        "with failures.guard(LocalWorld(1).transports[0]) as failure:\n"
        "    failure.start_thread('read', lambda: [][1])\n"
        "    threading.Event().wait(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=pytestconfig.rootpath, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.endswith("mpiflow: IndexError: list index out of range\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [(SystemExit(0), 1), (SystemExit(None), 1), (SystemExit("no"), 1), (SystemExit(3), 3),
     (KeyboardInterrupt(), 1), (ValueError(), 1), (UsageError(), 2), (DataError(), 1)],
)  # fmt: skip
def test_a_failed_job_never_ends_with_0(error, code):
    assert failures.exit_code(error) == code
