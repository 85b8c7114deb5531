"""Ops of the user's own, from the command line: on every rank, by consent, and unchanged."""

import pytest
from cli_job import Runner, relative, steps_of, write_data, write_job

from mpiflow.cli import main
from mpiflow.plan import store

OPS = '''
import mpiflow as mf

SLOPE = 0.1


@mf.op
class Leaky(mf.Op):
    """x, and SLOPE of it below zero."""

    rule = "... -> ..."

    def grad(self, inputs, outputs, dys):
        return (mf.where(mf.greater(inputs[0], 0.0), dys[0], dys[0] * SLOPE),)

    def kernel(self, shard, out, x):
        shard.xp.multiply(x, SLOPE, out=out)
        shard.xp.maximum(out, x, out=out)
'''


@pytest.fixture
def run(mpiexec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    (tmp_path / "activations.py").write_text(OPS)
    job = write_job(tmp_path, "evaluate=test", change=("mf.relu(", "mf.apply(Leaky(), "))
    job.write_text("from activations import Leaky\n" + job.read_text())
    return Runner(mpiexec, tmp_path)


def plan(run, ranks):
    arguments = ["--ranks", str(ranks), "-o", "job.plan", *run.device]
    assert main(["plan", "job.py", *arguments]) == 0


@pytest.mark.ranks(2)
def test_a_job_file_brings_its_ops_and_a_plan_takes_them_by_consent(run, capfd):
    losses = {ranks: steps_of(run.train(ranks, out=f"run{ranks}")) for ranks in (1, 2)}
    assert relative(losses[2], losses[1]) < 1e-5

    plan(run, 2)
    (op,) = store.load("job.plan").ops
    assert (op.name, op.file) == ("activations.Leaky", "activations.py")
    refused = run(2, job="job.plan")
    assert refused.returncode == 1
    assert refused.stdout.count("uses ops of the user's own, activations.Leaky") == 1
    assert (
        "written in activations.py; if you trust what is there now, name it: --ops act"
        in refused.stdout
    )
    again = run.train(2, "--ops", "activations.py", job="job.plan", out="again")
    assert relative(steps_of(again), losses[2]) == 0


@pytest.mark.ranks(2)
def test_a_kernel_that_returns_its_result_ends_the_run(run, tmp_path):
    kernel = "shard.xp.multiply(x, SLOPE, out=out)\n"
    (tmp_path / "activations.py").write_text(OPS.replace(kernel, "return x * SLOPE\n"))
    done = run(2)
    assert done.returncode == 1
    assert "leaky (activations.Leaky): TypeError: the kernel gives something back" in done.stdout


@pytest.mark.ranks(2)
def test_a_plan_is_not_run_with_an_op_that_was_changed(run, tmp_path):
    plan(run, 2)
    (tmp_path / "activations.py").write_text(OPS.replace("0.1", "0.2"))
    done = run(2, "--ops", "activations.py", job="job.plan")
    assert done.returncode == 1
    assert "op activations.Leaky in" in done.stdout
    assert "is not the one that the plan was made with" in done.stdout


def test_a_changed_op_is_a_changed_program(run, tmp_path):
    run.train(1, "--steps", "2")
    (tmp_path / "activations.py").write_text(OPS.replace("0.1", "0.2"))
    done = run(1, "--steps", "4")
    assert done.returncode == 1
    assert "ops: 'activations.Leaky " in done.stdout


def test_ops_go_with_a_plan_and_are_files(run, capsys):
    for arguments, message in [
        (["run", "job.py", "--ops", "activations.py"], "--ops activations.py goes with a plan"),
        (["simulate", "job.py", "--ops", "a.py"], "--ops a.py goes with a plan"),
        (["check", "job.plan", "--ops", "none.py"], "--ops none.py: no such file"),
        (["check", "job.plan", "--ops", "job.plan"], "ops are declared in a .py file"),
    ]:
        plan(run, 1)
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
