"""A trace through the command line: recorded by ranks, merged, and drawn beside the prediction."""

import json
import shutil

import pytest
from cli_job import PINNED, STAGED, Runner, write_data, write_job
from trace_processor import loaded

from mpiflow.cli import main
from mpiflow.plan import tracefile
from mpiflow.plan.store import load


@pytest.fixture
def run(mpiexec, tmp_path):
    write_job(tmp_path, "evaluate=test", change=PINNED)
    write_data(tmp_path)
    return Runner(mpiexec, tmp_path)


def order_of(events, process, stream, step):
    """The tasks of a stream in a step, as they are drawn in a process."""
    thread = next(
        e["tid"] for e in events
        if (e["name"], e["pid"], e["args"].get("name")) == ("thread_name", process, stream)
    )  # fmt: skip
    drawn = [
        e for e in events
        if e["ph"] == "X" and e["cat"] != "arrived"
        and (e["pid"], e["tid"], e["args"]["step"]) == (process, thread, step)
    ]  # fmt: skip
    drawn.sort(key=lambda event: (event["ts"], event["ts"] + event["dur"]))
    return [(e["name"], e["args"].get("micro-batch", 0)) for e in drawn]


def streams_of(plan):
    """By stage, the streams of a training step; on devices copies have some of their own."""
    programs = [plan.at_stage(stage).program("train") for stage in range(plan.mesh.stages)]
    return [{task.stream for task in program.tasks} for program in programs]


@pytest.mark.ranks(2)
def test_the_streams_of_a_pipeline_do_what_was_predicted_in_that_order(run, tmp_path, capsys):
    done = run(2, "--steps", 20, "--trace=4:9", *STAGED)
    assert done.returncode == 0, done.stdout
    assert "traced the steps 4 to 9: `mpiflow trace " in done.stdout
    assert main(["trace", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 ranks, steps 4 to 9: predicted ")
    assert "clocks: all ranks were on one host\n" in out
    planned = streams_of(load(tmp_path / "run/plan.plan"))
    count = sum(map(len, planned))
    assert count >= 10
    assert f"order: as predicted, on all {count} streams in every step\n" in out
    events = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    streams = {
        (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"
    } - {(3, "step"), (4, "step")}  # fmt: skip
    assert streams == {(1 + p, name) for p in range(4) for name in planned[p % 2]}
    for process, stream in sorted(streams):
        if process < 3:
            wanted = order_of(events, process, stream, 4)
            assert wanted
            for step in range(4, 10):
                assert order_of(events, 2 + process, stream, step) == wanted
    with loaded(tmp_path / "run/trace.json") as processor:
        assert processor.troubles() == {}
        assert processor.backwards() == []
        assert processor.unnamed() == []
        assert processor.rows("select count(*) from flow") == [
            (sum(event["ph"] == "s" for event in events),)
        ]
        orders = {
            (process.split(" on ")[0], *key): tasks
            for (process, *key), tasks in processor.orders().items()
        }
        for stage, names in enumerate(planned):
            for stream in names:
                for step in range(4, 10):
                    wanted = orders[f"predicted: stage {stage} (1 rank)", stream, 4]
                    assert orders[f"rank {stage}", stream, step] == wanted


@pytest.mark.ranks(2)
def test_a_run_that_is_shorter_keeps_what_it_did_and_another_one_replaces_it(run, tmp_path, capsys):
    assert run(2, "--steps", 6, "--trace=5:30", "--mesh", "data=2").returncode == 0
    folder = tmp_path / "run/trace"
    assert {tracefile.load(p).times.shape[0] for p in folder.iterdir()} == {2}
    shutil.copy(folder / "rank-00001.npz", folder / "rank-00007.npz")
    assert run(1, "--steps", 9, "--trace").returncode == 0
    assert [path.name for path in folder.iterdir()] == ["rank-00000.npz"]
    assert tracefile.load(folder / "rank-00000.npz").first == 9  # all that is left
    assert main(["trace", str(tmp_path / "run"), "--json", "-o", str(tmp_path / "one.json")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ranks"], answer["steps"], answer["missing"]) == ([0], [9, 9], [])
    assert answer["out_of_order"] == []
    assert len(answer["tasks"]) == 3
    assert (tmp_path / "one.json").stat().st_size > 1000

    done = run(1, "--steps", 12, "--trace=3:4")
    assert done.returncode == 2
    assert done.stdout.count("--trace 3:4: this run does the steps 10 to 12") == 1


def test_a_run_without_a_trace_and_ranks_without_one_are_usage_errors(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 2
    assert (
        "no traces there; start the run with `mpiflow run ... --trace`" in capsys.readouterr().err
    )
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace/rank-00003.npz").touch()
    (tmp_path / "trace/rank-mine.npz").touch()
    assert main(["trace", str(tmp_path), "-o", str(tmp_path)]) == 2
    assert "a folder; name the file in it" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--ranks", "3:4"]) == 2
    assert "--ranks 3:4: rank 4 has no trace; those from 3 to 3 have" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--ranks", "all"]) == 2
    assert "give numbers and spans" in capsys.readouterr().err
