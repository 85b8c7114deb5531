"""Optimizers on several ranks: the same losses under every layout, exact on resume, averages."""

from functools import cache

import numpy as np
import pytest
from jobs import MemoryReader, data, on_ranks, train
from optim_jobs import BATCH, ROWS, STEPS, regression_plan

import mpiflow as mf
from mpiflow.graph.sbp import S
from mpiflow.plan.traffic import bytes_sent

OPTIMIZERS = [
    mf.SGD(mf.StepDecay(0.05, 4), momentum=0.9, nesterov=True, weight_decay=0.1, clip=1.0),
    mf.Adam(mf.InverseSqrt(0.05, 3), ema=0.9),
    mf.AdamW(mf.Cosine(0.05, warmup=3), groups=(mf.NO_DECAY,), clip=0.5, ema=0.9),
    mf.LAMB(mf.LinearDecay(0.05), groups=(mf.NO_DECAY,), clip=0.5),
    mf.LARS(mf.Polynomial(0.1), trust=0.2, weight_decay=0.1, clip=3.0),
    mf.Adagrad(0.2),
]
MESHES = [
    pytest.param(mesh, split, marks=pytest.mark.ranks(ranks), id=f"{mesh}-{split}")
    for mesh, split, ranks in [
        ("data=2", None, 2), ("data=3", None, 3), ("model=2", S(1), 2), ("model=3", S(0), 3),
        ("data=2,model=2", S(1), 4),
    ]
]  # fmt: skip


@cache
def alone(optimizer):
    return on_ranks(regression_plan(optimizer), lambda session: train(session, 10))[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize(("mesh", "split"), MESHES)
def test_an_optimizer_takes_the_same_steps_on_any_ranks(mesh, split, optimizer):
    plan = regression_plan(optimizer, mesh, split=split)
    if split:
        layouts = {v.name: v.layout[-1] for v in plan.variables}
        assert layouts["in.weight"] == split
    for found in on_ranks(plan, lambda session: train(session, 10)):
        for step, expected in zip(found, alone(optimizer), strict=True):
            assert step == pytest.approx(expected, rel=1e-9)


class Recorder:
    """A writer that keeps every variable."""

    def __init__(self, plan):
        self.values = {v.name: np.zeros(v.shape, v.dtype) for v in plan.variables}

    def write(self, variable, start, array):
        place = tuple(slice(a, a + n) for a, n in zip(start, array.shape, strict=True))
        self.values[variable][place] = array

    def finish(self):
        pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_run_that_goes_on_takes_the_steps_of_one_that_never_stopped(optimizer):
    plan = regression_plan(optimizer, "data=2")
    saved = Recorder(plan)

    def first(session):
        train(session, 4)
        session.save(saved)

    def second(session):
        for name, box in session.boxes().items():
            session.variables[name][...] = saved.values[name][tuple(slice(*ab) for ab in box)]
        session.expect("train", range(4, 10))
        return [session.run("train", step) for step in range(4, 10)]

    whole = on_ranks(plan, lambda session: train(session, 10))[0]
    on_ranks(plan, first)
    if "step" in saved.values:
        assert saved.values["step"] == 4
    assert on_ranks(plan, second)[0] == whole[4:]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["data=1", "data=2", "model=2"])
def test_an_evaluation_uses_the_averages(mesh):
    plan = regression_plan(mf.SGD(0.05, ema=0.5), mesh, evaluate=True)
    test = {"evaluate": MemoryReader(data(133, seed=1), BATCH)}

    def work(session):
        train(session, 3)
        session.expect("evaluate", range(1))
        before = session.run("evaluate")["loss"]
        for name, value in session.variables.items():
            if not name.endswith(".average"):
                value.fill(np.nan)
        session.expect("evaluate", range(1, 2))
        return before, session.run("evaluate", 1)["loss"]

    readers = {"train": MemoryReader(data(ROWS), BATCH)} | test
    before, after = on_ranks(plan, work, readers)[0]
    assert np.isfinite([before, after]).all()


def test_an_average_begins_with_the_weights_and_lags_behind_them():
    plan = regression_plan(mf.SGD(0.05, ema=0.75))

    def work(session):
        start = {n: v.copy() for n, v in session.variables.items()}
        train(session, 1)
        return start, session.variables

    start, after = on_ranks(plan, work)[0]
    for name in ("in.weight", "in.bias", "out.weight", "gain"):
        np.testing.assert_array_equal(start[f"{name}.average"], start[name])
        expected = 0.75 * start[name] + 0.25 * after[name]
        np.testing.assert_allclose(after[f"{name}.average"], expected, rtol=1e-14)


def test_a_schedule_over_the_whole_run_ends_with_its_last_step():
    plan = regression_plan(mf.SGD(mf.LinearDecay(0.1)), epochs=3)
    (task,) = (t for t in plan.program("train").tasks if t.op == "LinearDecay")
    assert task.attributes["steps"] == 3 * STEPS


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_every_update_is_done_in_place(optimizer):
    for mesh, split in (("data=2", None), ("model=2", S(1))):
        tasks = regression_plan(optimizer, mesh, split=split).program("train").tasks
        assert not [t.name for t in tasks if t.name.startswith(("assign ", "keep "))]


def test_a_constant_rate_costs_one_number():
    tasks = regression_plan(mf.SGD(0.1, momentum=0.9)).program("train").tasks
    scalars = [t.op for t in tasks if t.name.startswith("update/") and t.op != "SgdUpdate"]
    assert scalars == ["Fill"]


@pytest.mark.parametrize(
    "optimizer", [mf.Adam(0.1, clip=1.0), mf.LAMB(0.1), mf.LARS(0.1)], ids=repr
)
def test_norms_send_no_gradient_a_second_time(optimizer):
    def gradients(optimizer):
        plan = regression_plan(optimizer, "data=2")
        return bytes_sent(plan, plan.program("train"))

    numbers = 8 * 4  # a sum of squares for each variable, at most
    assert gradients(optimizer) <= gradients(mf.Adam(0.1)) + 2 * numbers
