from dataclasses import replace
from itertools import pairwise

import handmade
import pytest
from handmade import Maker, collective, compute, data_set, program, read, write
from random_plans import random_plan

from mpiflow.errors import PlanError, VerifyError
from mpiflow.plan.records import Output
from mpiflow.plan.simulator import simulate
from mpiflow.plan.timeline import timeline


def test_a_chain_takes_the_sum_of_its_tasks():
    simulation = simulate(handmade.chain(7))
    assert simulation.step_seconds == pytest.approx(7e-3)
    assert simulation.first_step_seconds == pytest.approx(7e-3)
    assert simulation.ends == pytest.approx([7e-3, 14e-3, 21e-3])
    assert dict(simulation.busy)["compute"] == pytest.approx(7e-3)


def overlapped(communication):
    """t0 (1 s) -> c0 beside t1 (2 s) -> t2 (1 s) that needs both."""
    m = Maker("data=2")
    names = [("a", "P"), ("b", "B"), ("c", "B"), ("y", "B")]
    registers = [m.tensor(n, (), layout, 4 * i) for i, (n, layout) in enumerate(names)]
    tasks = [
        compute("t0", "f", "", "a", 1.0), collective("c0", "all_reduce", "data", "a", "b",
                                                     communication),
        compute("t1", "g", "a", "c", 2.0), compute("t2", "h", "b c", "y", 1.0),
    ]  # fmt: skip
    return m.plan([], [program("train", registers, tasks, outputs=(Output("y", "y"),))], 16)


@pytest.mark.parametrize(("seconds", "step", "exposed"), [(1.5, 4.0, 0.0), (5.0, 7.0, 3.0)])
def test_two_streams_overlap_and_only_the_rest_is_exposed(seconds, step, exposed):
    simulation = simulate(overlapped(seconds))
    assert simulation.step_seconds == pytest.approx(step)
    assert simulation.exposed_communication == pytest.approx(exposed)


def with_overhead(plan, seconds, overlap=True):
    """The plan whose collectives take so much from kernels beside them."""
    train = plan.program("train")
    tasks = tuple(
        replace(t, overhead=seconds) if t.kind == "collective" else t for t in train.tasks
    )
    return replace(plan, programs=(replace(train, tasks=tasks),), overlap=overlap)


@pytest.mark.parametrize(
    ("seconds", "overhead", "step", "exposed"),
    [
        (1.5, 0.5, 4.5, 0.5),  # t2 waits until the core has moved the message
        (5.0, 0.5, 7.5, 3.5),  # it leaves so much later; the core has nothing else to do then
        (1.5, 3.0, 7.0, 3.0),
    ],
)
def test_kernels_give_way_to_what_a_message_wants_of_their_core(seconds, overhead, step, exposed):
    simulation = simulate(with_overhead(overlapped(seconds), overhead), steps=2)
    assert simulation.ends == pytest.approx([step, 2 * step])
    assert simulation.exposed_communication == pytest.approx(exposed)
    assert dict(simulation.busy)["compute"] == pytest.approx(4.0)


def test_a_message_that_is_carried_out_while_a_rank_waits_takes_nothing_from_its_kernels():
    plan = replace(overlapped(1.5), overlap=False)
    expected = simulate(plan).step_seconds
    assert simulate(with_overhead(plan, 0.5, overlap=False)).step_seconds == expected


@pytest.mark.parametrize(("seconds", "step"), [(0.5, 4.5), (1.5, 5.5), (5.0, 9.0)])
def test_without_overlap_a_collective_takes_its_time_where_it_is_waited_for(seconds, step):
    simulation = simulate(replace(overlapped(seconds), overlap=False))
    assert simulation.step_seconds == pytest.approx(step)
    assert simulation.exposed_communication == pytest.approx(seconds)
    (start,) = [e.start for e in simulation.events if e.task == "c0" and e.step == 0]
    assert start == pytest.approx(3.0)


def test_without_overlap_those_before_it_on_the_stream_come_first_and_others_last():
    """t0 -> c0, c1, c2; t1 needs c1; nobody needs c2."""
    m = Maker("data=2")
    names = ["a0", "a1", "a2"], ["b0", "b1", "b2"]
    registers = [
        m.tensor(n, (), layout, 4 * (3 * i + j))
        for i, layout in enumerate(["P", "B"])
        for j, n in enumerate(names[i])
    ]
    registers += [m.tensor("y", (), "B", 24)]
    tasks = [compute(f"t{n}", "f", "", n, 1.0) for n in names[0]]
    tasks += [
        collective(f"c{j}", "all_reduce", "data", f"a{j}", f"b{j}", 10.0 ** (j + 1))
        for j in range(3)
    ]
    tasks.append(compute("t1", "g", "b1", "y", 1.0))
    made = m.plan([], [program("train", registers, tasks, outputs=(Output("y", "y"),))], 28)
    events = {e.task: e for e in simulate(replace(made, overlap=False), steps=1).events}
    assert (events["c0"].start, events["c1"].start) == (3.0, 13.0)
    assert events["t1"].start == 113.0
    assert events["c2"].start == 114.0


def test_without_overlap_a_collective_of_a_collective_waits_with_it():
    """t0 -> c0 -> c1 (of another axis) -> t2, beside t1."""
    m = Maker("data=2,model=2")
    layouts = {"a": "P P", "b": "B P", "c": "B B", "x": "B B", "y": "B B"}
    registers = [m.tensor(n, (), layout, 4 * i) for i, (n, layout) in enumerate(layouts.items())]
    tasks = [
        compute("t0", "f", "", "a", 1.0),
        collective("c0", "all_reduce", "data", "a", "b", 10.0),
        collective("c1", "all_reduce", "model", "b", "c", 100.0),
        compute("t1", "g", "a", "x", 5.0),
        compute("t2", "h", "c x", "y", 1.0),
    ]
    made = m.plan([], [program("train", registers, tasks, outputs=(Output("y", "y"),))], 20)
    events = {e.task: e for e in simulate(replace(made, overlap=False), steps=1).events}
    starts = [events[name].start for name in ("c0", "c1", "t2")]
    assert starts == pytest.approx([6.0, 16.0, 116.0])
    free = {e.task: e for e in simulate(made, steps=1).events}
    assert [free[n].start for n in ("c0", "c1", "t2")] == pytest.approx([1.0, 11.0, 111.0])


@pytest.mark.parametrize("seed", range(150))
def test_without_overlap_steps_take_no_less_and_at_most_the_sum(seed):
    plan, steps = random_plan(seed), 4
    try:
        free = simulate(plan, steps=steps)
    except VerifyError:
        return  # a plan with a circle of waits
    bound = simulate(replace(plan, overlap=False), steps=steps)
    total = sum(task.seconds for task in plan.program("train").tasks)
    assert len(bound.events) == len(free.events)
    assert free.ends[-1] <= bound.ends[-1] + 1e-9
    assert bound.ends[-1] <= steps * total + 1e-9
    for stream, tasks in plan.program("train").order:
        events = [e for e in bound.events if e.stream == stream]
        names = [plan.program("train").tasks[i].name for i in tasks]
        assert [e.task for e in events] == steps * names
        assert all(a.stop <= b.start + 1e-9 for a, b in pairwise(events))


def test_factors_slow_a_stream_or_its_kind():
    for name in ("comm", "comm.data"):
        assert simulate(overlapped(2.5), factors={name: 2}).step_seconds == pytest.approx(7.0)
    assert simulate(overlapped(1.0), factors={"compute": 0.5}).step_seconds == pytest.approx(2.0)


def reading(slots, read_seconds, compute_seconds, writing=False):
    m = Maker("data=2")
    registers = [m.tensor("x", (), "B", 0, slots=slots), m.tensor("y", (), "B", 64)]
    tasks = [read("r0", "x", read_seconds), compute("t0", "f", "x", "y", compute_seconds)]
    outputs = (Output("y", "y"),)
    if writing:
        registers = [m.tensor("y", (), "B", 0, slots=slots)]
        tasks = [compute("t0", "f", "", "y", compute_seconds), write("w0", "y", read_seconds)]
        outputs = ()
    train = program("train", registers, tasks, outputs=outputs, data="" if writing else "train")
    return m.plan([], [train], 68, (data_set(),))


@pytest.mark.parametrize(
    ("slots", "read_seconds", "step"),
    [(1, 2.0, 5.0), (2, 2.0, 3.0), (2, 4.0, 4.0), (5, 4.0, 4.0)],
)
def test_slots_let_reads_run_ahead(slots, read_seconds, step):
    simulation = simulate(reading(slots, read_seconds, 3.0), steps=6)
    assert simulation.step_seconds == pytest.approx(step)
    assert simulation.first_step_seconds == pytest.approx(read_seconds + 3.0)
    assert simulation.exposed_input == pytest.approx(step - 3.0)


def test_slots_limit_how_far_reads_run_ahead():
    for slots in (1, 2, 3):
        events = simulate(reading(slots, 0.1, 3.0), steps=6).events
        reads = [e for e in events if e.stream == "read"]
        stops = [e.stop for e in events if e.stream == "compute"]
        assert [e.start >= stops[e.step - slots] for e in reads[slots:]] == [True] * (6 - slots)


@pytest.mark.parametrize(("slots", "step"), [(1, 6.0), (2, 5.0), (3, 5.0)])
def test_writes_run_behind_until_the_staging_slots_are_full(slots, step):
    simulation = simulate(reading(slots, 5.0, 1.0, writing=True), steps=8)
    assert simulation.first_step_seconds == pytest.approx(1.0)
    assert simulation.step_seconds == pytest.approx(step)


def test_events_of_a_stream_never_overlap_and_follow_its_order():
    plan = handmade.sharded()
    simulation = simulate(plan, steps=4, factors={"comm.model": 3.5, "read": 0.3})
    for stream, tasks in plan.program("train").order:
        events = [e for e in simulation.events if e.stream == stream]
        assert all(a.stop <= b.start for a, b in pairwise(events))
        assert [e.task for e in events] == 4 * [plan.program("train").tasks[i].name for i in tasks]


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(PlanError, match="no program 'predict'; it has train"):
        simulate(handmade.chain(2), "predict")
    with pytest.raises(PlanError, match="0 steps"):
        simulate(handmade.chain(2), steps=0)
    with pytest.raises(PlanError, match=r"comm\.model=2"):
        simulate(overlapped(1.0), factors={"comm.model": 2})


def test_the_timeline_shows_each_stream_at_work():
    lines = timeline(simulate(overlapped(5.0)), width=14).splitlines()
    assert lines[0] == "program train, step 1: 7.00 s; later steps 7.00 s"
    assert "|..1111111111..|" in lines[1]
    assert "|111111......11|" in lines[2]
    assert lines[-1] == "  compute waits 3.00 s for comm"
    assert "2" in timeline(simulate(reading(2, 1.0, 3.0))).splitlines()[2]
