"""Simulated bubbles and slots of balanced stages are those of theory.

GPipe (Huang et al. 2019), 1F1B and interleaved stages (Narayanan et al. 2021), ZB-H1 (Qi et al.
2024): seconds F forward, B backward, W for gradients of weights, of a stage and a micro-batch.
"""

from dataclasses import replace
from itertools import accumulate

import pytest
from balanced import balanced
from unfolded import firings

from mpiflow.plan.records import RECEIVE, SEND
from mpiflow.plan.simulator import simulate

SIZES = [(2, 2), (4, 4), (3, 9), (8, 16)]
SECONDS = [(1.0, 1.0, 1.0), (1.0, 2.0, 1.5), (0.7, 1.3, 0.6)]


def bubble(stages, count, schedule, virtual, forward, backward, weights):
    """Seconds of a step beyond the work; each stage waits so long for others."""
    plan = balanced(stages, count, schedule, virtual, forward, backward, weights)
    found = simulate(plan, steps=2)
    work = count * (forward + backward + weights)
    for one in found.lanes:
        assert one.computing == pytest.approx(work, abs=1e-9)
        assert dict(one.exposed)["receive"] == pytest.approx(found.step_seconds - work, abs=1e-9)
    assert found.bubble == pytest.approx(found.step_seconds - work, abs=1e-9)
    return found.step_seconds - work


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [*SIZES, (4, 2)])
@pytest.mark.parametrize("seconds", SECONDS)
def test_a_pipeline_waits_to_fill_and_to_drain(schedule, stages, count, seconds):
    wanted = (stages - 1) * sum(seconds)
    assert bubble(stages, count, schedule, 1, *seconds) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("stages", "count"), SIZES)
@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("seconds", SECONDS)
def test_interleaved_stages_wait_a_part_of_that(stages, count, virtual, seconds):
    wanted = (stages - 1) * sum(seconds) / virtual
    found = bubble(stages, count, "interleaved", virtual, *seconds)
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (8, 16), (3, 9)])
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (0.7, 1.3, 0.6), (1.5, 1.0, 0.9)])
def test_gradients_of_weights_fill_the_bubble(stages, count, seconds):
    """Where they are no longer than what waits for them: W <= F and W <= B."""
    forward, backward, weights = seconds
    wanted = (stages - 1) * (forward + backward - weights)
    found = bubble(stages, count, "zero-bubble", 1, *seconds)
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("stages", "count", "virtual"), [(2, 2, 1), (4, 9, 1), (8, 16, 2), (3, 4, 3)]
)
def test_an_evaluation_streams_through_the_stages(stages, count, virtual):
    """The bubble is (p - 1) / (v m + p - 1) of a step, also for a last group that is not full."""
    plan = balanced(stages, count, "1f1b" if virtual == 1 else "interleaved", virtual, 1, 1, 1,
                    trained=False)  # fmt: skip
    found = simulate(plan, steps=2)
    missing = -count % stages if virtual > 1 else 0  # the last group takes as long as a full one
    wanted = count + missing * (virtual - 1) / virtual + (stages - 1) / virtual
    assert found.step_seconds == pytest.approx(wanted, abs=1e-9)


def kept(plan, stage):
    """How many micro-batches' activations a stage has slots for, of all its pieces."""
    program = plan.programs[stage]
    return sum(r.slots for r in program.registers if r.name.startswith("y"))


@pytest.mark.parametrize(("stages", "count"), [(2, 8), (4, 16), (4, 3), (8, 32)])
def test_slots_are_as_many_as_theory_says(stages, count):
    for stage in range(stages):
        ours = min(count, stages - stage)
        assert kept(balanced(stages, count, "gpipe", 1, 1, 1, 1), stage) == count
        # What leaves, and would have one slot, has another: it may leave late.
        late = 2 if ours == 1 and stage < stages - 1 else ours
        assert kept(balanced(stages, count, "1f1b", 1, 1, 1, 1), stage) == min(late, count)
        assert kept(balanced(stages, count, "zero-bubble", 1, 1, 1, 1), stage) == min(stages, count)


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (4, 2), (4, 4), (8, 2)])
def test_as_many_pieces_are_in_flight_at_once_as_theory_says(stages, virtual):
    """At stage 0 p + (p - 1) / v micro-batches, in pieces of 1 / v; slots are for each piece."""
    plan = balanced(stages, 4 * stages, "interleaved", virtual, 1, 1, 1)
    events = [e for e in simulate(plan, steps=1).events if e.stream == "compute@0"]
    begun = [(e.start, 1) for e in events if e.task.startswith("stage 0: y")]
    ended = [(e.stop, -1) for e in events if e.task.startswith("stage 0: dx")]
    alive = accumulate(change for _, change in sorted(begun + ended))
    wanted = virtual * stages + stages - 1
    assert max(alive) == wanted <= kept(plan, 0) <= virtual * 2 * stages


def test_what_messages_take_from_kernels_is_exposed_as_of_stages():
    plan = balanced(2, 4, "1f1b", 1, 1, 1, 1, 0.2)
    tasks = [
        tuple(replace(t, overhead=0.1) if t.kind in (SEND, RECEIVE) else t for t in p.tasks)
        for p in plan.programs
    ]
    programs = tuple(replace(p, tasks=t) for p, t in zip(plan.programs, tasks, strict=True))
    found, plain = simulate(replace(plan, programs=programs)), simulate(plan)
    assert plain.step_seconds + 8 * 0.1 <= found.step_seconds <= plain.step_seconds + 16 * 0.1
    assert dict(found.exposed)["comm"] == 0
    assert found.bubble == pytest.approx(found.step_seconds - 4 * 3)


@pytest.mark.parametrize("hop", [0.2, 3.0])
def test_messages_that_take_time_make_a_step_longer_and_runs_know_it(hop):
    plan = balanced(4, 8, "1f1b", 1, 1, 1, 1, hop)
    found = simulate(plan, steps=2)
    assert found.step_seconds >= 8 * 3 + 3 * (3 + 2 * hop)
    last = max(event.stop for event in firings(plan, "train", 1))
    assert found.first_step_seconds == pytest.approx(last, abs=1e-9)


@pytest.mark.parametrize(("stages", "count"), [(4, 16), (8, 64)])
def test_with_twice_the_stages_behind_in_flight_messages_are_waited_for_once(stages, count):
    """Of each message, the first there and the last back: the bound of any schedule."""
    hop = 0.2

    def bubble(ahead):
        plan = balanced(stages, count, "1f1b", 1, 1, 1, 1, hop, ahead=ahead)
        return simulate(plan, steps=2).step_seconds - 3 * count

    least = (stages - 1) * (3 + 2 * hop)
    assert bubble(stages - 1) == pytest.approx(least, abs=1e-9)
    assert bubble(0) > 1.4 * least
