"""A run that stands still ends with code 3 and one sentence that names who holds it up."""

import platform
import re
from functools import partial

import pytest
from cli_job import BY_ROW, ROOT, Runner, write_data, write_job

HOST = platform.node()


@pytest.fixture
def run(mpiexec, tmp_path):
    write_job(tmp_path, "evaluate=test, evaluate_every=mf.Every(steps=1000)")
    write_data(tmp_path)
    return Runner(mpiexec, tmp_path)


@pytest.mark.parametrize(
    ("ranks", "fault", "sentence"),
    [
        pytest.param(ranks, fault, sentence, id=fault, marks=pytest.mark.ranks(ranks))
        for ranks, fault, sentence in (
            (3, "2:endless:40", r"rank 2 \({}\) has been in task relu \(Relu, job.py:13\) of step"
             r" 41 for \d s; 2 ranks wait for it"),
            (2, "0:endless:40", r"rank 0 \({}\) has been in task relu \(Relu, job.py:13\) of step"
             r" 41 for \d s; 1 rank waits for it"),
            (3, "0:SIGSTOP:30", r"rank 0 \({}\), whose process is stopped, has been silent for \d"
             r" s; 2 ranks wait for it in task .* of step 31"),
            (2, "1:slow:40", r"rank 1 \({}\) has been reading train-001.h5 row 3 for step 41 for"
             r" \d s; 1 rank waits for it"),
            (3, "1:deaf:100", r"rank 1 \({}\) has not looked at its messages for \d s in task \S+"
             r" \(\w+, .*\) of step \d+; 2 ranks wait for it"),
            (2, "0:frozen:40", r"rank 0 \({}\), whose process runs, but none of its Python, has"
             r" been silent for \d s; 1 rank waits for it in task .* of step 41"),
            (3, "1:binding:0", r"rank 1 \({}\), whose process is stopped, has been silent for"
             r" \d s; 2 ranks wait for it"),
            (3, "2:opening:0", r"rank 2 \({}\) has been busy before the first step for \d s; 2"
             r" ranks wait for it"),
            (3, "1:unbound:0", r"rank 1 \({}\) has been busy before the first step for \d s; 2"
             r" ranks wait for it"),
            (3, "1:lost:100", r"rank 0 \({0}\), rank 1 \({0}\) and rank 2 \({0}\) are all in task"
             r" \S+ \(\w+, .*\) of step \d+, which has not ended for \d s: a message between them"
             r" is lost"),
        )
    ],
)  # fmt: skip
def test_the_culprit_is_named_and_all_ranks_are_gone(run, tmp_path, ranks, fault, sentence):
    done = run(ranks, "--steps", 40000, "--stall", 3, FAULT=fault, timeout=40)
    assert done.returncode == 3, done.stdout
    said = re.findall(r"^mpiflow: (.*)$", done.stdout, re.MULTILINE)
    assert len(said) == 1, done.stdout
    assert re.fullmatch(sentence.format(HOST), said[0]), done.stdout
    assert said[0] in (tmp_path / "run" / "failure.txt").read_text()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("0:storing:0", r"rank 0 \({}\) has been busy between two steps for \d s; 2 ranks wait .*"),
        ("1:leaving:0", r"rank 1 \({}\), whose process is stopped, has been silent for \d s; .*"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_is_watched_too(run, fault, sentence):
    done = run(3, "--steps", 30, "--stall", 3, FAULT=fault, timeout=40)
    assert done.returncode == 3, done.stdout
    (said,) = re.findall(r"^mpiflow: (.*)$", done.stdout, re.MULTILINE)
    assert re.fullmatch(sentence.format(HOST), said), done.stdout


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSEGV"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed_is_named_though_the_launcher_ends_all(run, tmp_path, rank, kind):
    done = run(4, "--steps", 40000, FAULT=f"{rank}:{kind}:60")
    assert done.returncode != 0
    listed = (tmp_path / "run" / "ranks.txt").read_text()
    pid = re.search(rf"^rank {rank} +host \S+ +pid (\d+)$", listed, re.MULTILINE)[1]
    (said,) = re.findall(r"^mpiflow: (.*)$", done.stdout, re.MULTILINE)
    pattern = rf"rank {rank} \({HOST}\) is gone.*: its process {pid} was killed or crashed"
    assert re.fullmatch(pattern, said), done.stdout
    assert said in (tmp_path / "run" / "failure.txt").read_text()


@pytest.mark.ranks(2)
def test_a_rank_that_pauses_is_no_stall(run):
    done = run(2, "--steps", 200, FAULT="1:pause:100")
    assert done.returncode == 0, done.stdout
    assert "mpiflow: " not in done.stdout


@pytest.fixture
def predict(run, mpiexec, tmp_path):
    """`mpiflow predict` on two ranks, of which one may have a fault."""
    write_job(tmp_path, change=BY_ROW)
    run.train(2, "--steps", 3)
    arguments = (
        "predict", tmp_path / "job.py", "--checkpoint", tmp_path / "run", "--data", tmp_path,
        "-o", tmp_path / "out.h5", "--stall", 3,
    )  # fmt: skip
    path = f"{run.site}:{ROOT}"
    return partial(mpiexec, 2, "-m", "mpiflow", *arguments, timeout=40, PYTHONPATH=path)


@pytest.mark.ranks(2)
def test_predictions_that_are_interrupted_say_so(predict):
    done = predict(FAULT="1:SIGTERM:1")
    assert done.returncode == 1, done.stdout
    assert re.findall(r"^mpiflow: (.*)$", done.stdout, re.MULTILINE) == [
        f"rank 1 of 2 on {HOST}: interrupted"
    ]


@pytest.mark.ranks(2)
def test_predictions_are_watched_too(predict, tmp_path):
    done = predict(FAULT="1:endless:1")
    assert done.returncode == 3, done.stdout
    (said,) = re.findall(r"^mpiflow: (.*)$", done.stdout, re.MULTILINE)
    sentence = rf"rank 1 \({HOST}\) has been in task relu .* of predict, step 2 for \d s.*"
    assert re.fullmatch(sentence, said), done.stdout
    folder = tmp_path / ".out.h5.ranks"
    assert said in (folder / "failure.txt").read_text()
    assert not (tmp_path / "out.h5").exists()
    done = predict()
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "out.h5").exists()
    assert not folder.exists()
