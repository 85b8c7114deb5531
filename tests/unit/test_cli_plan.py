"""Planning from the command line: what is refused, what --json promises, what need not be there."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpiflow.cli import main
from mpiflow.io.pack import pack
from mpiflow.plan import store

ROOT = Path(__file__).parents[2]
JOB = """import mpiflow as mf
from mpiflow import nn


def job(batch: int = 8, width: int = 5, settings=""):
    train = mf.Dataset("train-*.h5", batch=batch, shuffle=True)
    test = mf.Dataset("test-*.h5", batch=batch)

    def model(batch):
        x = mf.relu(nn.Dense(width)(batch["x"]))
        logits = nn.Dense(3)(x)
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    return mf.Job("small", model, train=train, optimizer=mf.SGD(lr=0.1), evaluate=test)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A job and its data, in the current folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.RandomState(1)
    for name, shards in (("train", [20, 13]), ("test", [11])):
        rows = sum(shards)
        source = {
            "x": random.randn(rows, 4).astype(np.float32),
            "label": random.randint(0, 3, rows),
        }
        pack(source, f"{name}-*.h5", shards=shards)
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


@pytest.fixture
def call(folder, capsys):
    """Runs a command; gives its exit code, standard output and errors."""

    def call(*arguments):
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def json_of(call):
    """Runs a command with --json; gives exit code and object, alone on standard output."""

    def json_of(*arguments):
        code, out, errors = call(*arguments, "--json")
        assert errors == ""
        assert out.count("\n") == 1
        return code, json.loads(out)

    return json_of


# -- the contract of --json -----------------------------------------------------------------------

KEYS = {
    "digest", "ranks", "mesh", "parameters", "nodes", "tasks", "plan_bytes", "compile_seconds",
    "predicted", "collectives", "notes",
}  # fmt: skip


def check_figures(figures):
    assert set(figures) >= KEYS
    assert (figures["ranks"], figures["mesh"], figures["parameters"]) == (3, {"data": 3}, 43)
    assert figures["predicted"]["step_seconds"] > 0
    assert set(figures["predicted"]["peak_bytes"]) == {"host"}
    assert type(figures["predicted"]["bytes_sent"]) is int
    (collective,) = figures["collectives"]
    assert set(collective) == {"kind", "axis", "bytes", "times"}
    assert (collective["kind"], collective["axis"]) == ("all_reduce", "data")
    sent = collective["bytes"] * collective["times"]
    assert sent == figures["predicted"]["bytes_sent"] > 0
    assert figures["notes"] == ["training drops the incomplete last batch: 1 of 33 rows an epoch"]


def test_plan_and_simulate_give_one_object_with_every_figure(json_of, folder):
    code, planned = json_of("plan", "job.py", "--ranks", 3, "-o", "new/folder/a.plan")
    assert code == 0
    check_figures(planned)
    content = (folder / "new/folder/a.plan").read_bytes()
    assert abs(len(content) - planned["plan_bytes"]) < 200
    for job in (["new/folder/a.plan"], ["job.py", "--ranks", 3]):
        code, simulated = json_of("simulate", *job)
        assert code == 0
        check_figures(simulated)
        assert simulated["digest"] == planned["digest"]
        assert simulated["step_seconds"] == pytest.approx(
            planned["predicted"]["step_seconds"], rel=1e-3
        )


def test_check_and_diff_give_one_object(json_of):
    json_of("plan", "job.py", "--ranks", 2, "-o", "a.plan")
    json_of("plan", "job.py", "--ranks", 2, "-o", "b.plan", "--set", "width=6")
    code, checked = json_of("check", "a.plan")
    assert (code, checked["ok"], checked["ranks"]) == (0, True, 2)
    assert json_of("diff", "a.plan", "a.plan") == (0, {"equal": True, "differences": []})
    code, differs = json_of("diff", "a.plan", "b.plan")
    assert (code, differs["equal"]) == (1, False)
    assert any("width" in line or "5" in line for line in differs["differences"])


def test_an_explanation_and_a_diff_say_the_same_in_json_and_in_text(call, json_of):
    plan = ("plan", "job.py", "--ranks", 2, "-o", "a.plan", "--explain", "dense.weight")
    code, out, _ = call(*plan)
    assert (code, out.splitlines()[0]) == (0, "variable dense.weight of program train (job.py:10)")
    code, explained = json_of(*plan)
    assert (code, explained["name"], explained["where"]) == (0, "dense.weight", "job.py:10")
    assert [c["chosen"] for c in explained["candidates"]] == [True]
    call("plan", "job.py", "--ranks", 2, "-o", "b.plan", "--zero", 1, "--set", "width=8")
    code, out, _ = call("diff", "a.plan", "b.plan")
    code, differs = json_of("diff", "a.plan", "b.plan")
    for each in differs["breakdowns"]:
        assert each["title"] in out
        assert sum(item["change"] for item in each["items"]) == each["total"]["change"]


def test_data_info_gives_one_object_and_fails_where_a_file_is_bad(json_of, folder):
    code, found = json_of("data", "info", "train-*.h5")
    assert (code, found["rows"], len(found["shards"])) == (0, 33, 2)
    (folder / "train-001.h5").write_bytes(b"")
    code, found = json_of("data", "info", "train-*.h5")
    assert (code, found["rows"]) == (1, 20)
    assert any("train-001.h5: empty" in line for line in found["problems"])
    code, found = json_of("data", "info", "none-*.h5")
    assert (code, found["rows"]) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["plan", "none.py", "--ranks", 2], 2, "UsageError"),
        (["plan", "job.py"], 2, "UsageError"),
        (["plan", "job.py", "--ranks", "two"], 2, "UsageError"),
        (["plan", "--ranks", 2], 2, "UsageError"),
        (["plan", "job.py", "--ranks", 2, "--after", "trace"], 2, "UsageError"),
        (["plan", "job.py", "--mesh", "stage=99"], 1, "CompileError"),
        (["plan", "job.py", "--ranks", 2, "--data", "nowhere"], 1, "DataError"),
        (["plan", "job.py", "--ranks", 2, "-o", "."], 2, "UsageError"),
        (["plan", "job.py", "--ranks", 2, "-o", "job.py/x"], 1, "PlanError"),
        (["check", "none.plan"], 2, "UsageError"),
        (["check", "train-000.h5"], 1, "PlanError"),
        (["simulate", "none.plan"], 2, "UsageError"),
        (["simulate", "job.py", "--ranks", 2, "--program", "none"], 2, "UsageError"),
        (["simulate", "job.py", "--ranks", 2, "--steps", 0], 2, "UsageError"),
        (["diff", "none.plan", "none.plan"], 2, "UsageError"),
        (["checkpoint", "info", "none"], 1, "CheckpointError"),
    ],
)
def test_an_error_is_one_object_too(json_of, arguments, code, kind):
    found, answer = json_of(*arguments)
    assert (found, answer["kind"]) == (code, kind)
    assert set(answer) == {"error", "kind"}


def test_what_a_job_file_prints_is_among_the_notes(json_of, folder):
    (folder / "job.py").write_text("print('hello')\n" + JOB)
    assert json_of("plan", "job.py", "--ranks", 2)[1]["notes"][-1] == "hello"
    (folder / "job.py").write_text("print('hello')\n1 / 0\n")
    code, answer = json_of("plan", "job.py", "--ranks", 2)
    assert (code, answer["notes"]) == (1, ["hello"])
    assert answer["error"].startswith("ZeroDivisionError: division by zero\n")


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "none.py", "--ranks", "2"], 2, "none.py: no such file (in "),
        (["plan", "job.py"], 2, "say how many ranks"),
        (["plan", "job.py", "--ranks", "0"], 2, "--ranks must be at least 1, not 0"),
        (["plan", "job.py", "--ranks", "2", "--mesh", "data=3"], 2, "has 3 ranks, --ranks says 2"),
        (["plan", "job.py", "--ranks", "2", "--set", "wdth=3"], 2, "no setting 'wdth'"),
        (["plan", "job.py", "--ranks", "2", "--set", "batch=34"], 1, "batch of 34 rows is larger"),
        (["plan", "job.py:none", "--ranks", "2"], 1, "job.py has no function 'none'"),
        (["plan", "job.py", "--ranks", "2", "--data", "x"], 1, "no file matches 'train-*.h5' in "),
        (["plan", "job.py", "--ranks", "2", "--after", "x"], 2, "--after x: the steps are trace,"),
        (["plan", "job.py", "--ranks", "2", "-o", "train-000.h5/x"], 1, "train-000.h5"),
        (["plan", "job.py", "--ranks", "2", "--explain", "dens"], 2, "the nearest are dense"),
        (
            ["plan", "job.py", "--ranks", "2", "--explain", "relu", "--after", "lower"],
            2,
            "give one of them",
        ),
        (["simulate", "a.plan", "--set", "width=3"], 2, "--set changes a plan, and a.plan is one"),
        (["simulate", "a.plan", "--mesh", "data=2"], 2, "--mesh changes a plan"),
        (["simulate", "a.plan", "--memory", "1GiB"], 2, "--memory changes a plan"),
        (["plan", "job.py", "--ranks", "2", "--memory", "40 bits"], 2, "--memory 40 bits: say how"),
        (["plan", "job.py", "--ranks", "2", "--memory", "0.1"], 2, "needs at least a byte"),
        (["plan", "job.py", "--ranks", "2", "--memory", "100"], 1, "does not fit 100 B a rank"),
        (["simulate", "a.plan", "--program", "x"], 2, "--program x: the plan has initialise, "),
        (["diff", "a.plan", "job.py"], 2, "job.py: a job file; make a plan of it with"),
        (["check", "a.plan", "--data", "x"], 1, "the plan was made for other data than "),
        (
            ["plan", "job.py", "--ranks", "2", "--bogus"],
            2,
            "unrecognized arguments: --bogus\nusage",
        ),
        (["run", "job.py", "--stall", "-1"], 2, "--stall takes seconds, or 0 for never, not -1.0"),
        (
            ["predict", "job.py", "--checkpoint", "run", "-o", "out.h5", "--stall", "nan"],
            2,
            "--stall takes seconds, or 0 for never, not nan",
        ),
        (["none"], 2, "invalid choice: 'none'"),
        ([], 2, "the following arguments are required: COMMAND\nusage: mpiflow "),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_message(call, arguments, code, message):
    if "a.plan" in arguments:
        assert call("plan", "job.py", "--ranks", 2, "-o", "a.plan")[0] == 0
    found, out, errors = call(*arguments)
    assert (found, out) == (code, "")
    assert message in errors
    assert errors.startswith("mpiflow: ")
    assert "Traceback" not in errors
    assert errors.count("mpiflow: ") == 1


def test_all_bad_files_are_listed_at_once(call, folder):
    (folder / "train-000.h5").write_bytes((folder / "train-000.h5").read_bytes()[:900])
    (folder / "train-001.h5").write_text("hello")
    code, _, errors = call("plan", "job.py", "--ranks", 2)
    assert code == 1
    assert "2 problem(s) in 2 file(s)" in errors
    assert "train-000.h5: truncated" in errors
    assert "train-001.h5: not an HDF5 file" in errors


def test_unequal_files_are_listed_with_both_values(call, folder):
    with h5py.File("train-001.h5", "r+") as file:
        labels, x = file["label"][:], file["x"][:]
        del file["label"], file["x"]
        file["label"], file["x"] = labels.astype("f4"), x[:, :3]
    code, _, errors = call("plan", "job.py", "--ranks", 2)
    assert code == 1
    assert "field 'label' has dtype float32; train-000.h5: int64" in errors
    assert "field 'x' has row shape (3,); train-000.h5: (4,)" in errors


def test_a_missing_field_names_the_line_that_asks_for_it(call, folder):
    (folder / "job.py").write_text(JOB.replace('batch["x"]', 'batch["image"]'))
    code, _, errors = call("plan", "job.py", "--ranks", 2)
    assert code == 1
    assert f"field 'image'; train-*.h5 has label, x\n  {folder}/job.py:10" in errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def model(batch):", "def model(batch)"), "SyntaxError: expected ':'"),
        (("logits = nn", "nonsense; logits = nn"), "NameError: name 'nonsense' is not defined"),
        (("nn.Dense(3)(x)", "nn.Dense(3)(x[0])"), "job.py:11"),
        (('"loss"', '"lose"'), "the model gives lose; training needs an output named 'loss'"),
        (("nn.Dense(width)", "nn.Dense(0)"), "job.py:10"),
        (("evaluate=test", 'evaluate={"train": test}'), "cannot be named 'train'"),
        (("evaluate=test", 'evaluate={"a_tail": test}'), "cannot be named 'a_tail'"),
        (("evaluate=test", 'evaluate={"a b": test}'), "cannot be named 'a b'"),
        (
            ("evaluate=test", 'evaluate=test, best=mf.Best("acuracy")'),
            "best: there is no metric 'acuracy'; the evaluations give evaluate.loss",
        ),
        (
            ("evaluate=test", 'evaluate=test, best=mf.Best("none.loss")'),
            "best: there is no metric 'none.loss'; the evaluations give evaluate.loss",
        ),
    ],
)
def test_a_job_that_does_not_fit_together_names_what_and_where(call, folder, change, message):
    assert change[0] in JOB
    (folder / "job.py").write_text(JOB.replace(*change))
    code, out, errors = call("plan", "job.py", "--ranks", 2)
    assert (code, out) == (1, "")
    assert message in errors
    assert "Traceback" not in errors


def test_plans_that_cannot_be_used(call, folder):
    call("plan", "job.py", "--ranks", 2, "-o", "a.plan")
    content = (folder / "a.plan").read_text()
    store.save(replace(store.load("a.plan"), version="0.0.1"), "old.plan")
    (folder / "cut.plan").write_text(content[:1000])
    (folder / "edited.plan").write_text(content.replace('"epochs":1', '"epochs":2'))
    (folder / "empty.plan").write_text("{}")
    for name, message in (
        ("old", "made by mpiflow 0.0.1, this is mpiflow "),
        ("cut", "is truncated or no plan file"),
        ("edited", "was edited or damaged: digest in the file is "),
        ("empty", "is no plan file"),
    ):
        code, _, errors = call("check", f"{name}.plan")
        assert code == 1
        assert f"{name}.plan: " in errors
        assert message in errors


def test_a_usage_error_is_said_by_the_first_rank_only(call, monkeypatch):
    for variable in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
        for rank, said in (("0", True), ("1", False)):
            monkeypatch.setenv(variable, rank)
            code, _, errors = call("run", "job.py", "--bogus")
            assert code == 2
            assert bool(errors) == said
        monkeypatch.delenv(variable)


# -- what planning does not need ------------------------------------------------------------------


def test_planning_needs_no_mpi_no_gpu_and_with_declared_fields_no_hdf5(folder):
    declared = 'fields={"x": ((4,), "float32"), "label": ((), "int64")}, '
    text = JOB.replace('"train-*.h5", ', f'"absent-*.h5", rows=40, {declared}')
    (folder / "job.py").write_text(
        text.replace('"test-*.h5", ', f'"none-*.h5", rows=9, {declared}')
    )
    program = (
        "import sys\n"
        "for name in ('mpi4py', 'cupy', 'h5py'): sys.modules[name] = None\n"
        "from mpiflow.cli import main\n"
        "sys.exit(main(['plan', 'job.py', '--ranks', '7', '--set', 'batch=9', '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ranks"] == 7


def test_python_dash_m_is_the_same_command(folder):
    command = [sys.executable, "-m", "mpiflow", "plan", "job.py", "--set", "width=4", "--json"]
    done = subprocess.run(
        [*command, "--ranks", "2"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["parameters"] == 35


def test_the_text_says_how_to_start_it(call):
    code, out, errors = call("plan", "job.py", "--ranks", 2, "-o", "a.plan")
    assert (code, errors) == (0, "")
    assert "start it with mpiexec -n 2 mpiflow run a.plan" in out
    code, out, _ = call("check", "a.plan")
    assert code == 0
    assert "data as planned: train 33 rows, evaluate 11 rows" in out


def test_the_command_that_is_shown_can_be_copied_where_a_name_has_spaces(call):
    assert "mpiflow run 'my digits.plan'" in call("plan", "job.py", "--ranks", "2",
                                                  "-o", "my digits.plan")[1]  # fmt: skip


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_ends_the_command_quietly(folder, option):
    command = [sys.executable, "-m", "mpiflow", "plan", "job.py", "--ranks", "2", *option]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
                          env=environment) as started:  # fmt: skip
        started.stdout.close()
        assert started.stderr.read() == b""
