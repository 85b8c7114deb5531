"""What a step leaves in its variables: every value is computed from those of before the step."""

from itertools import pairwise

import numpy as np
import pytest
from jobs import MemoryReader, compile_for, data, on_ranks, train

import mpiflow as mf
from mpiflow import nn

ROWS = 12


def plan_of(change, mesh="data=1"):
    """A job that trains w on the images, and beside it does what `change` says."""

    def model(batch):
        x = mf.cast(batch["image"], "float32") / 16
        w = nn.variable("w", (6,), nn.uniform(1.0))
        outputs = {"loss": mf.mean(mf.square(x * w))}
        return outputs | (change(outputs["loss"]) or {})

    train_set = mf.Dataset("train-*.h5", batch=ROWS)
    job = mf.Job("assign", model, train=train_set, optimizer=mf.SGD(lr=0.1, momentum=0.5))
    return compile_for(mesh, job, rows=ROWS)


def variable(name, value, shape=(3,)):
    return nn.variable(name, shape, nn.constant(value), trainable=False)


def after(plan, steps):
    """Outputs and variables after each step, on rank 0."""

    def work(session):
        session.expect("train", range(steps))
        found = []
        for step in range(steps):
            outputs = session.run("train", step)
            found.append((outputs, {n: v.copy() for n, v in session.variables.items()}))
        return found

    return on_ranks(plan, work, {"train": MemoryReader(data(ROWS), ROWS)})[0]


def test_a_counter_counts_steps():
    def change(loss):
        count = variable("count", 0.0, ())
        mf.assign(count, count + 1.0)

    assert [float(v["count"]) for _, v in after(plan_of(change), 3)] == [1, 2, 3]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["data=1", "data=2"])
def test_two_variables_change_places(mesh):
    def change(loss):
        a, b = variable("a", 1.0), variable("b", 2.0)
        mf.assign(a, b)
        mf.assign(b, a)

    found = [(v["a"][0], v["b"][0]) for _, v in after(plan_of(change, mesh), 3)]
    assert found == [(2, 1), (1, 2), (2, 1)]


def test_values_move_on_along_a_row_of_variables():
    def change(loss):
        a, b, c = (variable(n, float(i)) for i, n in enumerate("abc"))
        mf.assign(a, b)
        mf.assign(b, c)
        mf.assign(c, c * 2.0)

    found = [[v[n][0] for n in "abc"] for _, v in after(plan_of(change), 3)]
    assert found == [[1, 2, 4], [2, 4, 8], [4, 8, 16]]


def test_variables_that_change_by_one_another_use_old_values():
    def change(loss):
        a, b = variable("a", 1.0), variable("b", 2.0)
        mf.assign(a, a + b)
        mf.assign(b, b - a)

    found = [(v["a"][0], v["b"][0]) for _, v in after(plan_of(change), 3)]
    assert found == [(3, 1), (4, -2), (2, -6)]


def test_a_variable_may_be_read_after_it_was_assigned():
    def change(loss):
        a = variable("a", 1.0)
        mf.assign(a, a * 2.0)
        return {"sum": mf.reduce_sum(a)}

    assert [o["sum"] for o, _ in after(plan_of(change), 3)] == [3, 6, 12]


def test_one_value_is_given_to_two_variables():
    def change(loss):
        a, b = variable("a", 1.0), variable("b", 2.0)
        doubled = b * 2.0
        mf.assign(a, doubled)
        mf.assign(b, doubled)

    found = [(v["a"][0], v["b"][0]) for _, v in after(plan_of(change), 2)]
    assert found == [(4, 4), (8, 8)]


def test_a_variable_shown_as_an_output_has_the_value_of_before_the_step():
    def change(loss):
        count = variable("count", 5.0, ())
        mf.assign(count, count + 1.0)
        return {"count": count}

    assert [o["count"] for o, _ in after(plan_of(change), 3)] == [5, 6, 7]


def test_the_new_value_can_be_shown_too():
    def change(loss):
        count = variable("count", 5.0, ())
        new = count + 1.0
        mf.assign(count, new)
        return {"count": new}

    assert [o["count"] for o, _ in after(plan_of(change), 3)] == [6, 7, 8]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["data=1", "data=2"])
def test_an_average_of_losses_is_the_same_on_all_ranks(mesh):
    def change(loss):
        average = variable("average", 0.0, ())
        mf.assign(average, average * 0.5 + mf.stop_gradient(loss) * 0.5)

    expected = 0.0
    for outputs, variables in after(plan_of(change, mesh), 4):
        expected = 0.5 * expected + 0.5 * outputs["loss"]
        assert float(variables["average"]) == pytest.approx(expected, rel=1e-6)


def test_the_optimizers_update_uses_weights_of_before_the_step():
    def change(loss):
        w = loss.graph.variables["w"].tensor
        kept = variable("kept", 0.0, (6,))
        mf.assign(kept, w)

    found = after(plan_of(change), 3)
    for (_, before), (_, now) in pairwise(found):
        np.testing.assert_array_equal(now["kept"], before["w"])
        assert not np.array_equal(now["w"], before["w"])


@pytest.mark.ranks(2)
def test_a_loss_alone_is_trained_too():
    losses = [o["loss"] for o in on_ranks(
        plan_of(lambda loss: None, "data=2"), lambda s: train(s, 5),
        {"train": MemoryReader(data(ROWS), ROWS)})[0]]  # fmt: skip
    assert losses == sorted(losses, reverse=True)
