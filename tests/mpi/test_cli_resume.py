"""Nothing is lost: a run that was killed, stopped or changed goes on, on any rank count."""

import json

import pytest
from cli_job import Runner, evaluations_of, relative, steps_of, write_data, write_job

STOPPED = 75


@pytest.fixture
def run(mpiexec, tmp_path):
    write_job(tmp_path, "evaluate=test, save=mf.Every(steps=5, keep=3)")
    write_data(tmp_path)
    return Runner(mpiexec, tmp_path)


def rows_read(folder, name):
    """What was read for each step: the lists of all ranks, joined in the batch's order."""
    parts = {}
    for path in folder.glob(f"{name}-*"):
        for line in path.read_text().splitlines():
            step, start, read = json.loads(line)
            parts.setdefault(step, {})[start] = read
    return {
        step: [row for start in sorted(part) for row in part[start]] for step, part in parts.items()
    }


@pytest.mark.ranks(3)
def test_killed_on_two_ranks_and_resumed_on_three_equals_straight(run, tmp_path):
    straight = run.train(1, "--steps", 40, out="straight", RECORD=f"{tmp_path}/straight-read")
    killed = run(2, "--steps", 40, FAULT="1:SIGKILL:17", RECORD=f"{tmp_path}/killed-read")
    assert killed.returncode not in (0, STOPPED)
    assert run.checkpoints()[-1] in ("step-00000015", "step-00000015.partial")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 17, "epoch": 3, "lo')

    resumed = run.train(3, "--steps", 40, RECORD=f"{tmp_path}/resumed-read")
    assert [row["step"] for row in steps_of(resumed)] == list(range(1, 41))
    assert relative(steps_of(resumed), steps_of(straight)) < 1e-5
    assert [row["epoch"] for row in steps_of(resumed)] == [r["epoch"] for r in steps_of(straight)]
    assert relative(evaluations_of(resumed), evaluations_of(straight)) < 1e-5
    places = [(row.get("evaluation"), row.get("step")) for row in resumed]
    assert places == [(row.get("evaluation"), row.get("step")) for row in straight]

    all_read = rows_read(tmp_path, "straight-read")
    assert sorted(all_read) == list(range(40))
    first, second = (rows_read(tmp_path, f"{name}-read") for name in ("killed", "resumed"))
    # Readers run ahead: of later steps a killed rank may have read only its part.
    assert all(first[step] == all_read[step] for step in range(17))
    assert sorted(second) == list(range(min(second), 40))
    assert min(second) in (10, 15)
    assert all(second[step] == all_read[step] for step in second)

    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = run(3, "--steps", 40)
    assert again.returncode == 0
    assert again.stdout.count("nothing to train: ") == 1
    assert "is at step 40 of 40" in again.stdout
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before

    on_two = run.train(2, "--steps", 40)
    assert steps_of(on_two) == steps_of(resumed)
    assert [r["step"] for r in evaluations_of(on_two)] == [8, 16, 24, 32, 40]
    assert "peak_bytes" in on_two[-1]


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGUSR1"])
@pytest.mark.ranks(2)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(run, signal):
    stopped = run(2, "--steps", 40000, FAULT=f"1:{signal}:6")
    assert stopped.returncode == STOPPED, stopped.stdout
    assert stopped.stdout.count("stopped as asked after step") == 1
    rows = run.rows()
    step = steps_of(rows)[-1]["step"]
    assert 7 <= step < 40000
    assert run.checkpoints()[-1] == f"step-{step:08}"
    assert "peak_bytes" in rows[-1]
    done = run(2, "--steps", step + 2)
    assert done.returncode == 0
    assert f"going on after step {step} (written by 2 ranks)" in done.stdout
    assert [row["step"] for row in steps_of(run.rows())] == list(range(1, step + 3))


@pytest.mark.ranks(2)
def test_a_run_that_is_asked_to_stop_before_it_begins_stops_as_soon_as_it_has(run):
    stopped = run(2, "--steps", 40000, FAULT="1:asked:0")
    assert stopped.returncode == STOPPED, stopped.stdout
    step = steps_of(run.rows())[-1]["step"]
    assert step < 5
    assert run.checkpoints() == [f"step-{step:08}"]


@pytest.mark.ranks(2)
def test_a_changed_program_goes_on_only_if_that_is_accepted(run):
    run.train(2, "--steps", 10)
    before = run.rows()
    refused = run(2, "--steps", 12, "--set", "lr=0.2")
    assert refused.returncode == 1
    assert refused.stdout.count("mpiflow: ") == 1
    assert "SGD(lr=0.1, " in refused.stdout
    assert "SGD(lr=0.2, " in refused.stdout
    assert "--accept-changes" in refused.stdout
    assert run.rows() == before

    accepted = run(2, "--steps", 12, "--set", "lr=0.2", "--accept-changes")
    assert accepted.returncode == 0, accepted.stdout
    assert "accepted a change: optimizer: " in accepted.stdout
    assert [row["step"] for row in steps_of(run.rows())] == list(range(1, 13))

    wider = run(2, "--steps", 14, "--set", "width=10", "--accept-changes")
    assert wider.returncode == 1
    assert "fc1.weight: float32 (12, 9) in the checkpoint, float32 (12, 10)" in wider.stdout


@pytest.mark.ranks(2)
def test_a_torn_checkpoint_is_passed_over_and_fresh_keeps_the_old_run(run, tmp_path):
    straight = steps_of(run.train(2, "--steps", 10))
    shard = tmp_path / "run" / "checkpoints" / "step-00000010" / "shard-00001.h5"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    done = run(2, "--steps", 10)
    assert done.returncode == 0
    assert "passed over a checkpoint: " in done.stdout
    assert "step-00000010/shard-00001.h5" in done.stdout
    assert "going on after step 5" in done.stdout
    again = run.rows()
    assert [row["step"] for row in steps_of(again)] == list(range(1, 11))
    assert relative(steps_of(again), straight) < 1e-6

    fresh = run(2, "--steps", 5, "--fresh")
    assert fresh.returncode == 0
    assert f"moved the old run to {tmp_path / 'run.1'}" in fresh.stdout
    assert run.rows("run.1") == again
    assert [row["step"] for row in steps_of(run.rows())] == list(range(1, 6))
    for shard in (tmp_path / "run" / "checkpoints").glob("*/shard-00000.h5"):
        shard.unlink()
    refused = run(2, "--steps", 7)
    assert refused.returncode == 1
    assert "no checkpoint there is complete" in refused.stdout
    assert "--fresh" in refused.stdout
