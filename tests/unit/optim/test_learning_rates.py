"""Learning rates at the steps where one knows them without a formula."""

import numpy as np
import pytest
from op_harness import call, whole

import mpiflow as mf
from mpiflow.errors import GraphError
from mpiflow.graph.graph import Graph
from mpiflow.ops.gradnorm import ClipFactor, SumOfSquares


def rate(schedule, step):
    (out,) = whole(schedule, [np.asarray(step, np.int64)])
    assert out.dtype == np.float64
    return float(out)


SCHEDULES = [
    mf.Constant(0.4, warmup=4), mf.StepDecay(0.4, every=100, warmup=4),
    mf.Cosine(0.4, 20, warmup=4), mf.LinearDecay(0.4, 20, warmup=4),
    mf.Polynomial(0.4, 20, warmup=4), mf.InverseSqrt(0.4, warmup=4),
]  # fmt: skip
ENDING = [
    mf.Cosine(0.4, 20, end=0.1), mf.LinearDecay(0.4, 20, end=0.1), mf.Polynomial(0.4, 20, end=0.1)
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_a_warm_up_rises_in_equal_steps_to_the_rate(schedule):
    assert [rate(schedule, step) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rate(schedule, 4) <= 0.4


@pytest.mark.parametrize("schedule", ENDING, ids=lambda s: s.name)
def test_a_decay_falls_from_the_rate_to_its_end_and_stays_there(schedule):
    rates = [rate(schedule, step) for step in range(23)]
    assert rates[0] == pytest.approx(0.4)
    assert rates == sorted(rates, reverse=True)
    assert rates[19] > 0.1
    assert rates[20:] == pytest.approx([0.1] * 3)
    assert rate(schedule, 10**12) == pytest.approx(0.1)


def test_a_cosine_is_half_way_at_half_of_its_steps():
    assert rate(mf.Cosine(0.4, 24, end=0.2, warmup=4), 14) == pytest.approx(0.3)


def test_steps_down_are_counted_from_the_first_step():
    schedule = mf.StepDecay(0.8, every=3, factor=0.5, warmup=2)
    rates = [rate(schedule, step) for step in range(7)]
    assert rates == pytest.approx([0.4, 0.8, 0.8, 0.4, 0.4, 0.4, 0.2])


def test_an_inverse_square_root_halves_in_four_times_the_steps():
    schedule = mf.InverseSqrt(0.4, warmup=5)
    assert rate(schedule, 19) == pytest.approx(0.2)
    assert rate(schedule, 79) == pytest.approx(0.1)


def test_only_a_decay_without_steps_takes_those_of_the_run():
    assert mf.Cosine(0.4).over(7).steps == 7
    assert mf.Cosine(0.4, 5).over(7).steps == 5
    assert mf.InverseSqrt(0.4).over(7) == mf.InverseSqrt(0.4)


def test_a_schedule_wants_the_step_count():
    graph = Graph("train")
    x = graph.input("x", (), "float32")
    with pytest.raises(GraphError, match="Cosine takes the step count, an int64 scalar, not float"):
        graph.add(mf.Cosine(0.1, 10), x)


@pytest.mark.parametrize(("squares", "factor"), [(0.0, 1.0), (4.0, 0.5), (np.inf, 0.0)])
def test_a_gradient_is_only_ever_made_smaller(squares, factor):
    found, norm = whole(ClipFactor(1.0), [np.asarray(squares)])
    assert (float(found), float(norm)) == (pytest.approx(factor, abs=1e-5), squares**0.5)


def test_what_is_no_number_is_not_hidden_by_clipping():
    outs = [np.zeros(()), np.zeros(())]
    factor, norm = call(ClipFactor(1.0), [np.asarray(np.nan)], [(), ()], ["float64"] * 2, outs=outs)
    assert np.isnan(factor)
    assert np.isnan(norm)


def test_rounding_does_not_grow_with_the_number_of_blocks():
    x = np.full(2_000_003, 0.1, np.float32)
    (found,) = whole(SumOfSquares(), [x])
    assert float(found) == pytest.approx(len(x) * float(np.float32(0.1)) ** 2, rel=1e-5)
