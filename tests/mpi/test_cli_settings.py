"""When a run saves, evaluates and ends, as the job says."""

import pytest
from cli_job import (
    ROWS,
    TEST_ROWS,
    Runner,
    evaluations_of,
    relative,
    steps_of,
    write_data,
    write_job,
)

PER_EPOCH = 8  # 275 rows in batches of 32


@pytest.fixture
def run(mpiexec, tmp_path):
    write_data(tmp_path)
    return Runner(mpiexec, tmp_path)


@pytest.mark.ranks(2)
def test_several_evaluations_by_name_the_best_kept_and_patience(run, tmp_path):
    """An lr of 0 never improves: the first evaluation is the best, and patience ends the run."""
    write_job(
        tmp_path,
        'evaluate={"test": test, "seen": mf.Dataset("train-*.h5", batch=64)},'
        'best=mf.Best("test.loss", mode="min", patience=3),'
        "evaluate_every=mf.Every(steps=4), save=mf.Every(steps=3, keep=1)",
    )
    rows = run.train(2, "--set", "lr=0.0")
    assert steps_of(rows)[-1]["step"] == 16
    places = [(row["evaluation"], row["step"], row["rows"]) for row in evaluations_of(rows)]
    assert places == [
        (name, step, count)
        for step in (4, 8, 12, 16)
        for name, count in (("test", TEST_ROWS), ("seen", ROWS))
    ]
    assert run.checkpoints() == ["step-00000004", "step-00000016"]

    again = run(2, "--set", "lr=0.0")
    assert again.returncode == 0
    assert "nothing to train: " in again.stdout
    assert "at step 16 of 40, stopped early" in again.stdout
    assert run.rows() == rows


@pytest.mark.ranks(2)
def test_every_so_many_epochs_and_the_job_ends_with_its_epochs(run, tmp_path):
    write_job(
        tmp_path,
        "evaluate=test, evaluate_every=mf.Every(epochs=2), save=mf.Every(epochs=1, keep=2)",
    )
    rows = run.train(2, "--set", "epochs=3")
    assert [row["step"] for row in steps_of(rows)] == list(range(1, 3 * PER_EPOCH + 1))
    assert [row["epoch"] for row in steps_of(rows)] == [1] * 8 + [2] * 8 + [3] * 8
    # At the end there is always one.
    assert [row["step"] for row in evaluations_of(rows)] == [16, 24]
    assert run.checkpoints() == ["step-00000016", "step-00000024"]

    # --steps counts from the start of the run, and goes beyond the job's epochs.
    rows = run.train(2, "--set", "epochs=3", "--steps", 26)
    assert [row["step"] for row in steps_of(rows)] == list(range(1, 27))
    assert steps_of(rows)[-1]["epoch"] == 4
    assert run.checkpoints() == ["step-00000024", "step-00000026"]
    done = run(2, "--set", "epochs=3", "--steps", 20)
    assert done.returncode == 0
    assert "nothing to train: " in done.stdout
    assert "at step 26 of 20" in done.stdout
    assert run.rows() == rows


@pytest.mark.ranks(2)
def test_saves_by_the_minute_and_without_an_evaluation(run, tmp_path):
    write_job(tmp_path, "save=mf.Every(minutes=0.0001, keep=9)")
    rows = run.train(2, "--steps", 400)
    assert len(rows) == 401
    assert evaluations_of(rows) == []
    saved = run.checkpoints()
    assert len(saved) > 1
    assert saved[-1] == "step-00000400"


@pytest.mark.ranks(3)
def test_hosts_may_have_unequal_numbers_of_ranks(run, tmp_path):
    """MPICH can be told to take the ranks for those of two hosts, here of two ranks and of one."""
    write_job(tmp_path)
    apart = run.train(3, "--steps", 12, out="apart", MPIR_CVAR_NUM_CLIQUES="2")
    assert relative(steps_of(apart), steps_of(run.train(3, "--steps", 12))) < 1e-5
