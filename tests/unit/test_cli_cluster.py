"""--cluster: which machine a plan is for, and what it says of the ranks there."""

import json
from pathlib import Path

import pytest

from mpiflow.cli import main

ROOT = Path(__file__).parents[2]
DECLARED = ROOT / "tests/golden/declared.py"
SITE = """
name = "site"
nodes = 2
devices_per_node = 3
process_bytes = 100_000_000
[device]
memory_bytes = 900_000
memory_bandwidth = 8e9
launch_seconds = 1e-3
matrix_flops = { float32 = 6e10 }
[links.inner]
latency_seconds = 1e-6
bandwidth = 1e10
[links.outer]
latency_seconds = 1e-2
bandwidth = 1e9
[storage]
latency_seconds = 1e-4
bandwidth = 1e9
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command beside site.toml; gives its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.toml").write_text(SITE)

    def call(*arguments):
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def planned(call, *arguments):
    code, out, err = call("plan", DECLARED, *arguments, "--json")
    assert code == 0, out + err
    return json.loads(out)


def test_a_machine_file_prices_the_plan_and_gives_its_ranks(call):
    made = planned(call, "--cluster", "site.toml")
    assert made["mesh"] == {"data": 6}
    # A launch of a millisecond and a message of ten between nodes are in it.
    assert made["predicted"]["step_seconds"] > 0.05
    assert made["predicted"]["process_bytes"] > 100_000_000
    assert any("axis data goes between nodes" in note for note in made["notes"])


def test_fewer_ranks_than_devices_are_a_note_and_more_are_refused(call):
    made = planned(call, "--cluster", "site.toml", "--ranks", 3)
    assert any(
        note.startswith("machine site") and "has 6 devices; 3 ranks" in note
        for note in made["notes"]
    )
    assert not any("between nodes" in note for note in made["notes"])
    code, _, err = call("plan", DECLARED, "--cluster", "site.toml", "--ranks", 7)
    assert code == 2
    assert "has 2 nodes of 3 devices, 6 in all, and mesh data=7 has 7 ranks" in err


def test_what_does_not_fit_into_a_device_is_refused_unless_memory_says_otherwise(call):
    Path("site.toml").write_text(SITE.replace("900_000", "100_000"))
    code, out, err = call("plan", DECLARED, "--cluster", "site.toml")
    assert (code, out) == (1, "")
    assert "does not fit 97.7 KiB a rank on mesh data=6" in err
    assert "what would help: " in err
    made = planned(call, "--cluster", "site.toml", "--memory", "1MiB")
    assert made["layouts"]["memory_limit"] == 1 << 20
    assert made["predicted"]["peak_bytes"]["host"] > 100_000


def test_cpu_is_the_default(call):
    default, named = planned(call, "--ranks", 2), planned(call, "--ranks", 2, "--cluster", "cpu")
    assert default["digest"] == named["digest"]
    assert default["notes"] == named["notes"]


def test_the_plan_names_the_machine_and_the_program_does_not_depend_on_it(call):
    cpu, gpu = planned(call, "--ranks", 2), planned(call, "--ranks", 2, "--cluster", "h100")
    assert cpu["digest"] != gpu["digest"]
    assert cpu["program"] == gpu["program"]
    assert any("ranks run on CPUs" in note for note in gpu["notes"])
    code, out, _ = call("plan", DECLARED, "--ranks", 2, "--cluster", "site.toml")
    assert code == 0
    assert "for machine site " in out


def test_without_overlap_all_communication_is_exposed(call):
    Path("serial.toml").write_text(
        SITE.replace("[links.inner]", "[links]\noverlap = false\n[links.inner]")
    )
    exposed = []
    for name in ("site.toml", "serial.toml"):
        code, out, _ = call("simulate", DECLARED, "--ranks", 6, "--cluster", name, "--json")
        assert code == 0
        made = json.loads(out)
        exposed.append(made["exposed"]["comm"] / made["busy"]["comm.data"])
    assert exposed[0] < 0.99
    assert exposed[1] == pytest.approx(1.0)


def test_simulate_takes_a_cluster(call):
    seconds = []
    for name in ("cpu", "site.toml"):
        code, out, _ = call("simulate", DECLARED, "--ranks", 2, "--cluster", name, "--json")
        assert code == 0
        seconds.append(json.loads(out)["step_seconds"])
    assert seconds[1] > 10 * seconds[0]


def test_beside_a_plan_that_runs_a_cluster_cannot_be_meant(call):
    assert call("plan", DECLARED, "--ranks", 2, "-o", "two.plan")[0] == 0
    code, _, err = call("run", "two.plan", "--cluster", "h100")
    assert code == 2
    assert "--cluster changes a plan, and two.plan is one already" in err


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("h1000", "there is no machine 'h1000'; built in are a100, cpu, h100, h200"),
        ("none.toml", "none.toml: No such file or directory"),
        ("cpu", "say how many ranks"),
    ],
)
def test_a_cluster_that_is_not_there_is_said(call, cluster, message):
    code, _, err = call("plan", DECLARED, "--cluster", cluster)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "site.txt"), "a machine file ends in .toml"),
        (("-o", "no/site.toml"), "there is no folder no"),
        (("-o", "x.toml", "--data", "no"), "--data no: no such folder"),
        (("-o", "folder.toml"), "-o folder.toml: it cannot be written"),
        ((), "required: -o"),
    ],
)
def test_what_calibrate_cannot_do_is_said_before_it_measures(call, arguments, message):
    Path("folder.toml").mkdir()
    code, _, err = call("calibrate", *arguments)
    assert code == 2
    assert message in err
