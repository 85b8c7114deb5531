"""`mpiflow run --micro-batches N`: the same run, which may go on with another N."""

import pytest
from cli_job import Runner, evaluations_of, relative, steps_of, write_data, write_job


@pytest.mark.ranks(2)
def test_a_run_in_micro_batches_is_that_of_whole_batches_and_goes_on_in_others(mpiexec, tmp_path):
    write_job(tmp_path, "evaluate=test, save=mf.Every(steps=5)")
    write_data(tmp_path)
    run = Runner(mpiexec, tmp_path)
    whole = run.train(1, "--steps", 16, out="whole")
    run.train(2, "--steps", 8, "--micro-batches", 2)
    cut = run.train(2, "--steps", 16, "--micro-batches", 4)
    for chosen in (steps_of, evaluations_of):
        assert relative(chosen(cut), chosen(whole)) < 1e-5
    assert [row["step"] for row in steps_of(cut)] == list(range(1, 17))

    refused = run(2, "--steps", 30, "--micro-batches", 5)
    assert refused.returncode == 1
    assert "a batch of 32 rows cannot be cut into 5 micro-batches" in refused.stdout
    assert steps_of(run.rows()) == steps_of(cut)
