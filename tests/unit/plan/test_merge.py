"""What ranks recorded, merged: one clock, the order of each stream, a file that Perfetto can draw.

The traces are made from the prediction, so that all that was planted in them is known.
"""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from pipeline_jobs import Case, layers, plan_of
from trace_processor import loaded

from mpiflow.errors import DataError
from mpiflow.plan import store
from mpiflow.plan.differences import differences, most_different
from mpiflow.plan.merge import merged, write_merged
from mpiflow.plan.perfetto import predicted
from mpiflow.plan.simulator import simulate
from mpiflow.plan.tracefile import SAME, Clock, Offset, RankTrace

CASE = Case(layers, "stage=2,data=2", 2, optimizer="sgd", dtype="float32")
STEPS, FIRST = 3, 11


@pytest.fixture(scope="module")
def plan():
    return plan_of(CASE)


@cache
def simulated():
    return simulate(plan_of(CASE), "train", 4)


def as_predicted(plan, rank, *, ahead=0.0, slower=1.0):
    """The trace of a rank that did what was predicted, on a clock that is `ahead`."""
    simulation = simulated()
    stage, _ = plan.mesh.stage_of(rank)
    begin, end = simulation.ends[-2:]
    firings = [f for f in predicted(simulation, 3) if f.process == stage]
    once = np.array([[f.start - begin, f.stop - begin] for f in firings]) * slower
    length = (end - begin) * slower
    starts = 100.0 + ahead + length * np.arange(STEPS)
    offset = Offset(100.0 + ahead, ahead, 1e-6)
    return RankTrace(
        rank,
        f"nid{rank}" if ahead else "nid0",
        "train",
        store.digest(plan),
        FIRST,
        tuple((f.task.name, f.micro) for f in firings),
        starts[:, None, None] + once,
        np.stack([starts, starts + length], 1),
        Clock(offset, replace(offset, at=offset.at + 1)) if ahead else SAME,
    )  # fmt: skip


def merge(plan, traces):
    return merged(plan, store.digest(plan), traces)


@pytest.fixture(scope="module")
def found(plan):
    """Four ranks on hosts whose clocks are seconds apart."""
    ahead = (0.0, 7.0, -3.0, 0.25)
    return merge(plan, [as_predicted(plan, r, ahead=s) for r, s in enumerate(ahead)])


@pytest.fixture(scope="module")
def events(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    count = write_merged(found, path)
    events = json.loads(path.read_text())["traceEvents"]
    assert count == sum(event["ph"] != "M" for event in events)
    return events


def test_clocks_are_aligned(found):
    spans = np.array([each.spans for each in found.ranks])
    np.testing.assert_allclose(spans - spans[0], 0, atol=1e-9)
    assert (found.hosts, found.uncertainty) == (4, 1e-6)
    assert found.steps == range(FIRST, FIRST + STEPS)
    assert found.step_seconds == pytest.approx(found.simulation.step_seconds, rel=1e-6)


def test_the_order_of_what_was_predicted_is_that_of_the_prediction(found):
    assert found.out_of_order() == []


def test_two_tasks_that_changed_places_are_found(plan):
    trace = as_predicted(plan, 2)
    stream = [i for i, (name, _) in enumerate(trace.firings) if name.startswith("grad")]
    a, b = stream[3:5]
    times = trace.times.copy()
    times[1, [a, b]] = times[1, [b, a]]
    (line,) = merge(plan, [as_predicted(plan, 0), replace(trace, times=times)]).out_of_order()
    (first, micro), (second, _) = trace.firings[a], trace.firings[b]
    assert line.startswith(f"rank 2, step {FIRST + 1}, compute: {second} of micro-batch")
    assert f"ran where {first} of micro-batch {micro + 1} was predicted" in line


def test_a_firing_that_was_not_seen_is_no_change_of_places_but_is_told(plan):
    trace = as_predicted(plan, 0)
    times = trace.times.copy()
    times[0, 0] = np.nan
    (line,) = merge(plan, [replace(trace, times=times)]).out_of_order()
    assert line.startswith(f"rank 0, step {FIRST}, ")


def test_the_tasks_that_differ_most_are_named_with_their_rank(plan):
    traces = [as_predicted(plan, rank) for rank in range(4)]
    times = traces[3].times.copy()
    slow = next(i for i, (name, _) in enumerate(traces[3].firings) if name.startswith("grad/"))
    name = traces[3].firings[slow][0]
    times[:, slow, 1] += 0.5
    worst = merge(plan, [*traces[:3], replace(traces[3], times=times)]).different()
    assert len(worst) == 3
    assert (worst[0].task, worst[0].rank) == (name, 3)
    assert worst[0].measured - worst[0].predicted == pytest.approx(0.5, abs=1e-6)
    assert max(each.measured - each.predicted for each in worst[1:]) < 1e-6


def test_of_each_task_the_worst_rank_is_told_once(plan):
    program = plan.at_stage(0).program("train")
    traces = [as_predicted(plan, rank, slower=1 + rank) for rank in (0, 1)]
    worst = most_different([d for trace in traces for d in differences(program, trace)])
    assert len({each.task for each in worst}) == 3
    assert {each.rank for each in worst} == {1}


def test_every_thread_draws_one_thing_at_a_time(events):
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    assert len(threads) > 4
    for drawn in threads.values():
        for (start, length), (after, _) in pairwise(sorted(drawn)):
            assert after >= start + length - 1e-3  # a nanosecond


def test_prediction_and_measurement_have_processes_of_their_own(events):
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [
        "predicted: stage 0 (2 ranks)", "predicted: stage 1 (2 ranks)",
        "rank 0 on nid0", "rank 1 on nid1", "rank 2 on nid2", "rank 3 on nid3",
    ]  # fmt: skip
    steps = Counter(
        (e["pid"], e["args"]["step"]) for e in events if e["ph"] == "X" and e["cat"] == "compute"
    )
    for step in range(FIRST, FIRST + STEPS):
        assert steps[1, step] == steps[3, step] == steps[4, step] > 0
        assert steps[2, step] == steps[5, step] == steps[6, step] > 0


def test_a_prediction_that_takes_longer_is_drawn_where_there_is_room(plan, tmp_path):
    traces = [as_predicted(plan, rank, slower=0.6) for rank in range(4)]
    write_merged(merge(plan, traces), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = {e["args"]["step"] for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert drawn == {FIRST, FIRST + 2}
    test_every_thread_draws_one_thing_at_a_time(events)


def test_arrows_go_from_each_send_to_its_receive(plan, events):
    ends = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    drawn = [e for e in events if e["ph"] == "X" and e["pid"] > 2]
    assert len(ends) == sum(e["cat"] == "send" for e in drawn) > 0
    for pair in ends.values():
        tasks = [
            next(
                e for e in drawn
                if (e["pid"], e["tid"]) == (end["pid"], end["tid"])
                and e["ts"] - 1e-3 <= end["ts"] <= e["ts"] + e["dur"] + 1e-3
            )
            for end in (pair["s"], pair["f"])
        ]  # fmt: skip
        assert [task["cat"] for task in tasks] == ["send", "receive"]
        assert tasks[0]["args"]["step"] == tasks[1]["args"]["step"]
        assert tasks[0]["pid"] != tasks[1]["pid"]


def test_perfetto_draws_what_was_written(found, events, tmp_path):
    write_merged(found, tmp_path / "trace.json")
    with loaded(tmp_path / "trace.json") as processor:
        assert processor.troubles() == {}
        names = processor.rows("select name from process where name is not null order by pid")
        assert [name for (name,) in names] == [
            e["args"]["name"] for e in events if e["name"] == "process_name"
        ]
        ((slices, arrows),) = processor.rows(
            "select (select count(*) from slice), (select count(*) from flow)"
        )
        assert slices == sum(event["ph"] == "X" for event in events)
        assert arrows == sum(event["ph"] == "s" for event in events) > 0
        orders = processor.orders()
        for rank in range(4):
            for process, stream, step in orders:
                if process == f"predicted: stage {rank // 2} (2 ranks)":
                    wanted = orders[process, stream, step]
                    assert orders[f"rank {rank} on nid{rank}", stream, step] == wanted
        assert {step for process, _, step in orders if process == "rank 3 on nid3"} == {11, 12, 13}
        assert processor.backwards() == []
        assert processor.unnamed() == []


def test_no_arrow_goes_back_in_time(plan, tmp_path):
    """Clocks of hosts that are a second apart, and not known to be."""
    traces = [as_predicted(plan, rank) for rank in range(4)]
    late = [replace(t, times=t.times + 1.0, steps=t.steps + 1.0) for t in traces[:2]]
    write_merged(merge(plan, [*late, *traces[2:]]), tmp_path / "trace.json")
    with loaded(tmp_path / "trace.json") as processor:
        assert processor.troubles() == {}
        assert processor.backwards() == []
        ((arrows,),) = processor.rows("select count(*) from flow")
        assert arrows > 0  # those from the second stage


def test_arrows_reach_receives_that_waited_since_before_the_send(plan, tmp_path):
    traces = [as_predicted(plan, rank, slower=100.0) for rank in range(4)]
    for trace in traces:
        program = plan.at_stage(trace.rank // 2).program("train")
        kinds = {task.name: task.kind for task in program.tasks}
        for i, (name, _) in enumerate(trace.firings):
            if kinds[name] == "receive":
                trace.times[:, i, 0] = trace.steps[:, 0]
    count = write_merged(merge(plan, traces), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert count == sum(event["ph"] != "M" for event in events)
    assert any(event.get("cat") == "arrived" for event in events)
    with loaded(tmp_path / "trace.json") as processor:
        assert processor.troubles() == {}
        assert processor.backwards() == []
        arrows = sum(event["ph"] == "s" for event in events)
        assert processor.rows("select count(*) from flow") == [(arrows,)]


@pytest.mark.parametrize("up", [100.0, 1.3e7], ids=["minutes", "months"])
def test_no_task_is_lost_that_follows_at_once_on_a_clock_that_drifts(plan, tmp_path, up):
    """A float of seconds since so long tells no nanoseconds."""
    traces = []
    for rank in range(4):
        trace = as_predicted(plan, rank, slower=1 + np.pi / 10)
        if rank > 1:
            first = Offset(100.0 + up, up + np.pi * 1e-6, 1e-6)
            clock = Clock(first, replace(first, at=first.at + 1, ahead=first.ahead + np.e * 1e-6))
            trace = replace(trace, times=trace.times + up, steps=trace.steps + up, clock=clock)
        traces.append(trace)
    write_merged(merge(plan, traces), tmp_path / "trace.json")
    with loaded(tmp_path / "trace.json") as processor:
        assert processor.troubles() == {}


def test_traces_of_another_plan_are_refused(plan):
    with pytest.raises(DataError, match="rank 1 is of plan feedfeedfeed, the run's plan is"):
        merge(plan, [as_predicted(plan, 0), replace(as_predicted(plan, 1), digest="feed" * 16)])


def test_ranks_that_recorded_no_step_together_are_refused(plan):
    with pytest.raises(DataError, match="no step together"):
        merge(plan, [as_predicted(plan, 0), replace(as_predicted(plan, 1), first=FIRST + 3)])
