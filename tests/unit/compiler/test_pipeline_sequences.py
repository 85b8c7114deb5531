"""In which turn stages do their segments: complete, in order, and with the bubbles of theory."""

import pytest

from mpiflow.compiler.pipeline import Pipeline, in_flight
from mpiflow.errors import UsageError
from mpiflow.graph.mesh import parse_mesh

SHAPES = [(1, 2), (2, 1), (2, 3), (3, 2), (4, 4), (4, 9), (5, 12)]
"""Stages and micro-batches."""
SCHEDULES = [
    *((pipeline, shape) for pipeline in map(Pipeline, ("1f1b", "gpipe", "zero-bubble"))
      for shape in SHAPES),
    *((Pipeline("interleaved", virtual), shape) for virtual in (2, 3)
      for shape in ((2, 2), (2, 6), (3, 3), (4, 8))),
]  # fmt: skip
every_schedule = pytest.mark.parametrize(("pipeline", "shape"), SCHEDULES)


def sequences(pipeline, stages, micro_batches):
    return [pipeline.sequence(stage, stages, micro_batches) for stage in range(stages)]


@every_schedule
def test_every_segment_is_done_once_of_each_micro_batch_in_turn(pipeline, shape):
    stages, count = shape
    segments = range(3 if pipeline.schedule == "zero-bubble" else 2 * pipeline.virtual)
    for sequence in sequences(pipeline, stages, count):
        for segment in segments:
            assert [k for s, k in sequence if s == segment] == list(range(count))
        assert len(sequence) == len(segments) * count
        for micro in range(count):
            assert [s for s, k in sequence if k == micro] == list(segments)


def place(pipeline, stages, stage, segment):
    """Where a segment is on the way of a micro-batch; behind all others, if nothing follows it."""
    virtual = pipeline.virtual
    if segment >= 2 * virtual:  # gradients of weights
        return 2 * stages * virtual + stage
    if segment >= virtual:
        return 2 * stages * virtual - 1 - place(pipeline, stages, stage, 2 * virtual - 1 - segment)
    return segment * stages + stage


def makespan(pipeline, stages, count, costs):
    """When the last stage is done, if segment s takes costs[s] and messages no time."""
    done, now = {(-1, micro): 0.0 for micro in range(count)}, [0.0] * stages
    left = [list(sequence) for sequence in sequences(pipeline, stages, count)]
    while any(left):
        moved = False
        for stage, mine in enumerate(left):
            while mine:
                segment, micro = mine[0]
                own = place(pipeline, stages, stage, segment)
                before = own - 1 if segment < 2 * pipeline.virtual else 2 * stages - 1 - stage
                if (before, micro) not in done:
                    break
                now[stage] = max(now[stage], done[before, micro]) + costs[segment]
                done[own, micro] = now[stage]
                moved = bool(mine.pop(0))
        assert moved, "stages wait in a circle"
    return max(now)


@every_schedule
def test_stages_that_take_these_turns_come_to_an_end(pipeline, shape):
    costs = [1.0] * 3 if pipeline.schedule == "zero-bubble" else [1.0] * 2 * pipeline.virtual
    assert makespan(pipeline, *shape, costs) >= shape[1] * sum(costs)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (3, 3), (4, 8), (5, 7)])
def test_a_pipeline_fills_and_drains_once(schedule, stages, count):
    assert makespan(Pipeline(schedule), stages, count, [1.0, 2.0]) == 3.0 * (count + stages - 1)


@pytest.mark.parametrize(("stages", "count", "virtual"), [(2, 4, 2), (4, 8, 2), (3, 6, 3)])
def test_interleaved_stages_divide_the_bubble_by_the_pieces_of_a_stage(stages, count, virtual):
    costs = [1.0 / virtual] * virtual + [2.0 / virtual] * virtual
    found = makespan(Pipeline("interleaved", virtual), stages, count, costs)
    assert found == pytest.approx(3.0 * (count + (stages - 1) / virtual))


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (3, 6), (4, 8)])
def test_gradients_of_weights_fill_two_thirds_of_the_bubble(stages, count):
    """With forward, backward and gradients of weights alike: a third of that of 1F1B is left."""
    found = makespan(Pipeline("zero-bubble"), stages, count, [1.0, 1.0, 1.0])
    assert found == pytest.approx(3.0 * count + (stages - 1))


@pytest.mark.parametrize(
    ("schedule", "virtual", "most"),
    [
        ("1f1b", 1, [4, 3, 2, 1]),
        ("gpipe", 1, [8, 8, 8, 8]),
        ("zero-bubble", 1, [4, 4, 4, 4]),
    ],
)
def test_a_stage_holds_as_many_micro_batches_as_its_schedule_needs(schedule, virtual, most):
    pipeline = Pipeline(schedule, virtual)
    assert [in_flight(sequence) for sequence in sequences(pipeline, 4, 8)] == most


def test_more_micro_batches_ahead_are_more_in_flight_up_to_twice_the_stages_behind():
    found = {n: [in_flight(s) for s in sequences(Pipeline(ahead=n), 4, 9)] for n in (1, 2, 3)}
    assert found == {1: [5, 4, 3, 1], 2: [6, 5, 3, 1], 3: [7, 5, 3, 1]}


@pytest.mark.parametrize(
    ("pipeline", "mesh", "count", "says"),
    [
        (Pipeline("pipedream"), "stage=2", 4, "'pipedream' is none of 1f1b, gpipe, interleaved"),
        (Pipeline("interleaved", 0), "stage=2", 4, "--virtual must be at least 1, not 0"),
        (Pipeline("1f1b", 2), "stage=2", 4, "--virtual 2 is for --schedule interleaved, not 1f1b"),
        (Pipeline("gpipe"), "data=2", 4, "mesh data=2 has no axis 'stage'"),
        (Pipeline("gpipe"), "stage=2", 1, "give --micro-batches N"),
        (Pipeline("interleaved", 2), "stage=3", 4, "that 3 stages divide, not 4"),
    ],
)
def test_what_cannot_be_scheduled_is_a_usage_error(pipeline, mesh, count, says):
    with pytest.raises(UsageError, match=says):
        pipeline.check(parse_mesh(mesh), count)
