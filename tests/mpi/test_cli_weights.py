"""Weights in and out by the command line, fine-tuning, and predictions on several ranks."""

import json

import h5py
import numpy as np
import pytest
from cli_job import BY_ROW, CLASSES, ROOT, Runner, evaluations_of, steps_of, write_data, write_job

from mpiflow.io.weights.source import open_tensors

NAMES = """
[names]
"fc1.weight" = {from = "hidden.weight", as = "o i -> i o"}
"fc1.bias" = "hidden.bias"
"out.*" = "head.*"
"""

KILLED = """
import os, signal, sys
from mpiflow.cli import main
from mpiflow.exec.session import Session

plain = Session.predict

def predict(self, program, step, writer):
    plain(self, program, step, writer)
    self.writes.wait()
    if step == 1 and os.environ["PMI_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

Session.predict = predict
sys.exit(main())
"""


@pytest.fixture
def run(mpiexec, tmp_path):
    write_job(tmp_path, change=BY_ROW)
    write_data(tmp_path)
    return Runner(mpiexec, tmp_path)


@pytest.fixture
def command(mpiexec, tmp_path):
    def command(ranks, *arguments, program=("-m", "mpiflow"), code=0):
        done = mpiexec(ranks, *program, *arguments, PYTHONPATH=ROOT)
        assert done.returncode == code, done.stdout
        return done.stdout

    return command


def predictions(path):
    with h5py.File(path) as file:
        return {name: dataset[:] for name, dataset in file.items()}


@pytest.mark.ranks(3)
def test_predictions_are_those_of_the_evaluation(run, command, tmp_path):
    last = evaluations_of(run.train(2, "--steps", 12))[-1]
    for mesh in ("data=1", "data=3", "stage=2"):
        out, ranks = tmp_path / f"{mesh}.h5", int(mesh[-1])
        said = command(ranks, "predict", tmp_path / "job.py", "--checkpoint", tmp_path / "run",
                       "--data", tmp_path, "-o", out, "--mesh", mesh)  # fmt: skip
        rows = last["rows"]
        assert said == f"{out}: logits float32 ({rows}, {CLASSES})\n{out}: hit bool ({rows},)\n"
    one, *others = (predictions(tmp_path / f"{m}.h5") for m in ("data=1", "data=3", "stage=2"))
    assert one["hit"].sum() == last["hits"]
    for other in others:
        np.testing.assert_array_equal(one["hit"], other["hit"])
        np.testing.assert_allclose(one["logits"], other["logits"], rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
def test_a_rank_that_is_killed_leaves_no_file_of_that_name(run, command, tmp_path):
    run.train(1, "--steps", 1)
    (tmp_path / "killed.py").write_text(KILLED)
    arguments = ("predict", tmp_path / "job.py", "--checkpoint", tmp_path / "run", "--data",
                 tmp_path, "-o", tmp_path / "out.h5")  # fmt: skip
    done = command(2, *arguments, program=[tmp_path / "killed.py"], code=9)
    assert "KILLED BY SIGNAL: 9" in done or "signal 9" in done.lower()
    assert {path.name for path in tmp_path.glob("*out.h5*")} == {".out.h5.part", ".out.h5.ranks"}
    command(1, *arguments)
    assert [path.name for path in tmp_path.glob("*out.h5*")] == ["out.h5"]


@pytest.mark.ranks(2)
def test_weights_go_out_and_come_in_again(run, command, tmp_path):
    first = steps_of(run.train(2, "--steps", 8))[0]
    (tmp_path / "names.toml").write_text(NAMES)
    out, names = tmp_path / "w.safetensors", ("--names", tmp_path / "names.toml")
    said = command(1, "checkpoint", "export", tmp_path / "run", "-o", out, *names)
    assert said.startswith(f"{out}: 4 tensors, ")
    assert "left out what the optimizer keeps, 4 variables" in said
    command(1, "checkpoint", "import", tmp_path / "job.py", out, *names, "--data", tmp_path,
            "-o", tmp_path / "again", "--without", "out.bias")  # fmt: skip
    rows = run.train(2, "--steps", 3, out="again")
    assert [row["step"] for row in steps_of(rows)] == [1, 2, 3]
    assert rows[0]["loss"] < 0.8 * first["loss"]


@pytest.mark.ranks(3)
def test_fine_tuning_goes_on_from_its_own_checkpoint(run, tmp_path):
    run.train(2, "--steps", 8)
    write_job(tmp_path, 'evaluate=test, init="run", frozen=("fc1.*",)', name="tune.py")
    run.train(3, "--steps", 4, job="tune.py", out="tuned")
    rows = run.train(2, "--steps", 7, job="tune.py", out="tuned")
    assert [row["step"] for row in steps_of(rows)] == list(range(1, 8))
    with open_tensors(tmp_path / "run") as start, open_tensors(tmp_path / "tuned") as end:
        for name, stays in (("fc1.weight", True), ("out.weight", False)):
            box = tuple((0, size) for size in start.tensors[name].shape)
            assert np.array_equal(start.read(name, box), end.read(name, box)) == stays
    history = json.loads((tmp_path / "tuned" / "provenance.json").read_text())
    assert [entry["init"][0] for entry in history] == ["run"] * 2
