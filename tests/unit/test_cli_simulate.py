"""What-if questions from the command line: slower ranks, other machines, more nodes, traces."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from trace_processor import loaded

from mpiflow.cli import main

DECLARED = Path(__file__).parents[1] / "golden/declared.py"
SITE = """
name = "site"
devices_per_node = 2
process_bytes = 100_000_000
[device]
memory_bytes = 2_000_000
memory_bandwidth = 8e9
launch_seconds = 1e-5
matrix_flops = { float32 = 6e10 }
[links.inner]
latency_seconds = 1e-6
bandwidth = 1e10
[links.outer]
latency_seconds = 1e-4
bandwidth = 1e9
[storage]
latency_seconds = 1e-5
bandwidth = 1e9
"""
PIPELINE = ("--mesh", "stage=2,data=2", "--micro-batches", 4)


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command beside site.toml; gives its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    Path("site.toml").write_text(SITE)

    def call(*arguments):
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def json_of(call):
    def json_of(*arguments):
        code, out, err = call("simulate", *arguments, "--json")
        assert code == 0, out + err
        return json.loads(out)

    return json_of


@pytest.fixture
def plan(call):
    code, _, err = call("plan", DECLARED, *PIPELINE, "-o", "two.plan")
    assert code == 0, err
    return "two.plan"


def test_the_items_of_each_stage_add_up_to_the_step(json_of):
    made = json_of(DECLARED, *PIPELINE)
    assert [stage["name"] for stage in made["stages"]] == ["stage 0", "stage 1"]
    for each in (*made["stages"], made):
        assert sum(each["items"].values()) == pytest.approx(made["step_seconds"], rel=1e-9)
    assert made["bubble_seconds"] == made["items"]["stages"] > 0
    arenas = made["predicted"]["peak_bytes"]
    assert [s["arena_bytes"] for s in made["stages"]] == [arenas["host.0"], arenas["host.1"]]
    assert made["first_step_seconds"] > 0
    assert made["initialise_seconds"] > 0


def test_the_table_has_a_row_for_each_stage_and_one_for_all(call):
    code, out, _ = call("simulate", DECLARED, *PIPELINE)
    lines = out.splitlines()
    assert code == 0
    table = lines[lines.index("of a step, compute works and waits for:") + 1 :]
    assert " ".join(table[0].split()) == "ranks computing other stages collectives step arena"
    assert [row.split()[:2] for row in table[1:3]] == [["stage", "0"], ["stage", "1"]]
    assert table[3].split()[:2] == ["all", "4"]
    assert "the first step is over after" in table[-1]


def test_a_straggler_makes_a_step_longer_and_lanes_of_its_own(json_of, call, plan):
    even, slow = json_of(plan), json_of(plan, "--straggler", "3@1")
    assert slow["step_seconds"] > 1.5 * even["step_seconds"]
    names = [stage["name"] for stage in slow["stages"]]
    assert names == ["stage 0, rank 1", "stage 0, others along data", "stage 1, rank 3",
                     "stage 1, others along data"]  # fmt: skip
    assert json_of(plan, "--straggler", "1@1")["step_seconds"] == even["step_seconds"]
    assert len(json_of(plan, "--straggler", "2@stage=1")["stages"]) == 2
    out = call("simulate", plan, "--straggler", "3@1")[1]
    assert "note: with --straggler 3@1 a step takes" in out


def test_a_plan_is_priced_anew_for_a_cluster_as_a_job_is_for_its_own(json_of, plan):
    other = json_of(plan, "--cluster", "site.toml")
    compiled = json_of(DECLARED, *PIPELINE, "--cluster", "site.toml")
    assert other["step_seconds"] == pytest.approx(compiled["step_seconds"], rel=0.2)
    assert other["step_seconds"] > 1.5 * json_of(plan)["step_seconds"]
    assert any("prices of machine site" in note for note in other["notes"])
    same = json_of(plan, "--cluster", "cpu")
    assert same["step_seconds"] == pytest.approx(json_of(plan)["step_seconds"], rel=2e-3)


def test_factors_multiply_the_seconds_of_streams(json_of, plan):
    even = json_of(plan)
    slow = json_of(plan, "--factor", "compute=2", "--factor", "comm=3")
    assert slow["items"]["computing"] == pytest.approx(2 * even["items"]["computing"])


def test_nodes_make_a_table_that_says_where_scaling_ends(call, json_of):
    job = (DECLARED, "--cluster", "site.toml")
    made = json_of(*job, "--nodes", "1,2", "--nodes", "8")
    assert [(p["nodes"], p["ranks"]) for p in made["points"]] == [(1, 2), (2, 4), (8, 16)]
    steps = {p["ranks"]: p["step_seconds"] for p in made["points"]}
    assert steps[16] > min(steps.values())
    assert made["conclusion"].startswith("beyond 2 ranks a step is no shorter: ")
    assert made["conclusion"].endswith("is waiting for collectives")
    code, out, _ = call("simulate", *job, "--nodes", "1,2,8")
    assert code == 0
    rows = out.splitlines()
    assert rows[0].split()[:3] == ["nodes", "ranks", "mesh"]
    assert rows[1].split()[:3] == ["1", "2", "data=2"]
    assert rows[-1] == made["conclusion"]


def test_nodes_scale_the_axis_data_of_a_mesh(json_of):
    job = (DECLARED, "--cluster", "site.toml", "--nodes", "1,2", "--mesh", "model=2")
    made = json_of(*job)
    assert [p["mesh"] for p in made["points"]] == [
        {"model": 2, "data": 1}, {"model": 2, "data": 2}
    ]  # fmt: skip


def test_what_does_not_fit_has_a_row_that_says_so(call):
    Path("small.toml").write_text(SITE.replace("2_000_000", "200_000"))
    job = ("simulate", DECLARED, "--cluster", "small.toml", "--zero", 0)
    code, out, _ = call(*job, "--nodes", 1)
    assert code == 0
    assert "1 nodes: " in out
    assert out.splitlines()[-1] == "there is no plan for any of these"


def test_a_trace_opens_in_perfetto(call, json_of, plan):
    code, out, _ = call("simulate", plan, "--trace", "new/trace.json", "--steps", 2)
    assert code == 0
    assert "open it at https://ui.perfetto.dev" in out
    trace = json.loads(Path("new/trace.json").read_text())
    events = trace["traceEvents"]
    named = {(e["name"], e["pid"], e.get("tid")): e["args"] for e in events if e["ph"] == "M"}
    processes = [args["name"] for (what, *_), args in named.items() if what == "process_name"]
    assert processes == ["stage 0 (2 ranks)", "stage 1 (2 ranks)"]
    threads = {key[1:]: args["name"] for key, args in named.items() if key[0] == "thread_name"}
    fired = [e for e in events if e["ph"] == "X"]
    assert len(fired) + len([e for e in events if e["ph"] == "M"]) == len(events)
    assert {(e["pid"], e["tid"]) for e in fired} <= set(threads)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in fired)
    sends = [e for e in fired if e["cat"] == "send" and "micro-batch" in e["args"]]
    assert {e["args"]["micro-batch"] for e in sends} == {0, 1, 2, 3}
    assert all(e["args"]["bytes"] > 0 for e in sends)
    assert any(e["args"].get("line", "").startswith("declared.py:") for e in fired)
    assert {e["args"]["step"] for e in fired} == {0, 1}
    for thread in threads:
        mine = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in fired if (e["pid"], e["tid"]) == thread
        )
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(mine))
    with loaded(Path("new/trace.json")) as processor:
        assert processor.troubles() == {}
        drawn = {key[:2]: names for key, names in processor.orders().items()}
        assert len(drawn) == len(threads)
        assert processor.rows("select count(*) from slice") == [(len(fired),)]
    last = max(e["ts"] + e["dur"] for e in fired if e["cat"] not in ("read", "write"))
    even = json_of(plan, "--steps", 2)
    total = even["first_step_seconds"] + even["step_seconds"]
    assert last == pytest.approx(1e6 * total, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--straggler", "slow"), "--straggler slow: give FACTOR@RANK"),
        (("--straggler", "2@4"), "--straggler 2@4: the plan has 4 ranks, 0 to 3"),
        (("--factor", "comm"), "--factor comm: give STREAM=FACTOR"),
        (("--nodes", 2), "is a plan for certain ranks; give the .py file"),
        (("--trace", "."), "--trace .: a folder"),
        (("--cluster", "none.toml"), "none.toml: No such file"),
        (("--mesh", "data=4"), "--mesh changes a plan"),
    ],
)
def test_what_cannot_be_meant_is_said(call, plan, arguments, message):
    code, out, err = call("simulate", plan, *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "2"), "machine cpu does not say how many devices a node has"),
        (("--nodes", "0", "--cluster", "site.toml"), "--nodes '0': give numbers of nodes"),
        (("--nodes", "1", "--cluster", "site.toml", "--mesh", "model=3"), "which take 3"),
        (("--nodes", "1", "--trace", "t.json"), "--nodes makes a table; leave out --trace"),
    ],
)
def test_nodes_must_be_numbers_that_fit(call, arguments, message):
    code, out, err = call("simulate", DECLARED, *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("factor", ["comm.model=2", "comm=-1", "comm=nan", "comm=inf"])
def test_a_factor_that_cannot_be_names_the_streams_there_are(call, plan, factor):
    code, _, err = call("simulate", plan, "--factor", factor)
    assert code == 1
    assert "give a factor of 0 or more for comm, comm.data, compute" in err
