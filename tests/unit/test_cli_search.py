"""plan --search: what it prints and writes, and what it refuses."""

import json
import shlex
from pathlib import Path

import pytest

from mpiflow.cli import main
from mpiflow.plan import store

ROOT = Path(__file__).parents[2]
DECLARED = ROOT / "tests/golden/declared.py"
FEW = ("--ranks", 2, "--micro-batches", 2, "--zero", 1, "--recompute", "none")


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs `mpiflow plan` on the digits; gives its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main(["plan", str(DECLARED), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_best_is_written_and_its_command_makes_the_same_plan(call):
    code, out, err = call("--search", *FEW, "--memory", "1MiB", "-o", "best.plan")
    assert code == 0
    assert err.startswith("search 1/12: --mesh data=2 --micro-batches 2 --zero 1")
    heads, first = out.splitlines()[1:3]
    assert heads.split() == ["mesh", "micro-batches", "schedule", "zero", "recompute", "step",
                             "memory", "bubble", "messages"]  # fmt: skip
    (line,) = (line for line in out.splitlines() if line.startswith("the best of them: "))
    command = shlex.split(line.removeprefix("the best of them: "))
    assert command[:3] == ["mpiflow", "plan", str(DECLARED)]
    assert first.split()[1] == command[command.index("--mesh") + 1]
    code, _, _ = call(*command[3:], "-o", "again.plan")
    assert code == 0
    assert Path("best.plan").read_bytes() == Path("again.plan").read_bytes()
    assert store.load("best.plan").layouts.limit == 1 << 20


def test_json_has_the_best_and_the_command(call):
    code, out, err = call("--search", *FEW, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    steps = [one["step_seconds"] for one in found["best"]]
    assert steps == sorted(steps)
    assert found["best"][0]["arena_bytes"] > 0
    for one in found["best"]:
        assert one["zero"] == 1
        assert one["micro_batches"] == 2
        assert 0 <= one["bubble"] < 1
    meshes = [one["mesh"] for one in found["best"]]
    assert {"data": 2} in meshes
    assert {"stage": 2} in meshes
    assert "--mesh" in found["command"]


def test_what_is_given_is_not_searched(call):
    code, out, _ = call("--search", "--mesh", "stage=2", "--schedule", "gpipe", "--json")
    found = json.loads(out)
    assert code == 0
    assert {tuple(one["mesh"].items()) for one in found["best"]} == {(("stage", 2),)}
    assert {one["schedule"] for one in found["best"]} == {"gpipe"}


def test_without_search_all_ranks_are_on_the_axis_data(call):
    code, out, _ = call("--ranks", 4, "--json")
    assert code == 0
    assert json.loads(out)["mesh"] == {"data": 4}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--explain", "fc1.weight"), "--explain shows one"),
        (("--after", "trace"), "--after shows one"),
        (("--memory-report",), "--memory-report shows one"),
        (("--zero", 7), "--zero takes a level from 0 to 3, not 7"),
        (("--schedule", "zero-bubble", "--micro-batches", 1), "is for pipeline stages"),
        (("--recompute", "some"), "some"),
        (("--plans", 0), "--plans must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, arguments, says):
    code, out, err = call("--ranks", 2, "--search", *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_as_many_plans_are_made_as_asked_for(call):
    code, out, err = call("--search", *FEW, "--plans", 1)
    assert code == 0
    assert [line.split(":")[0] for line in err.splitlines()] == ["search 1/1"]
    assert " 1 of " in out.splitlines()[0]


def test_a_number_of_plans_is_for_a_search(call):
    code, _, err = call(*FEW, "--plans", 3)
    assert code == 2
    assert "--plans 3 says how many plans --search makes; give both" in err


def test_where_nothing_fits_it_says_what_would_help(call):
    code, out, err = call("--search", *FEW, "--memory", "40KiB")
    assert (code, out) == (1, "")
    assert "does not fit 40.0 KiB" in err
    assert "what would help" in err


def test_the_memory_report_and_the_figures_of_json(call):
    mesh = ("--mesh", "stage=2", "--micro-batches", 4)
    code, out, _ = call(*mesh, "--memory-report")
    assert code == 0
    assert "memory of a rank, at the fullest moment" in out
    assert "stage 1: fullest in " in out
    assert "declared.py:" in out
    assert "program train" not in out
    code, out, _ = call(*mesh, "--json")
    made = json.loads(out)
    for one in made["memory"]:
        arena = made["predicted"]["peak_bytes"][f"host.{one['stage']}"]
        assert sum(one["classes"].values()) == one["arena_bytes"] == arena
    code, out, _ = call(*mesh)
    assert code == 0
    assert out.index("program train") < out.index("memory of a rank, at the fullest moment")
