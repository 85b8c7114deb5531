"""Jobs in float16 and bfloat16: 16-bit products, float32 variables, loss scaling."""

from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
from jobs import MemoryReader, classifier, compile_for, on_ranks, target, train

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.scaling import SCALE


def plan_in(precision, mesh="data=1", **more):
    return compile_for(mesh, replace(classifier(40, **more), precision=precision))


def losses(plan, steps=6):
    results = on_ranks(plan, lambda session: train(session, steps))
    assert all(result == results[0] for result in results)
    return [row["loss"] for row in results[0]]


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("mesh", ["data=1", pytest.param("data=3", marks=pytest.mark.ranks(3))])
def test_losses_follow_those_of_float32(precision, mesh):
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
    exact = losses(plan_in("float32"))
    near = losses(plan_in(precision, mesh))
    np.testing.assert_allclose(near, exact, rtol=2e-2)
    assert near != exact


def test_products_are_narrow_and_variables_and_updates_are_not():
    plan = plan_in("float16", "data=2")
    program = plan.program("train")
    dtypes = {name: r.dtype for name, r in plan.tensors(program).items()}
    assert {v.dtype for v in plan.variables} == {"float32"}
    for task in program.tasks:
        if task.op in ("Linear", "RowProduct"):
            assert {dtypes[name] for name in (*task.inputs, *task.outputs)} == {"float16"}
        if task.kind == "collective" or task.op == "SgdUpdate":
            assert "float16" not in {dtypes[name] for name in task.inputs}
    assert any(task.op == "Cast" for task in program.tasks)


def test_what_scales_the_loss_names_the_line_of_the_loss():
    """Not a line of the program that was started, by which plans of one job would differ."""
    plan = plan_in("float16")
    scaling = [v for v in plan.variables if v.name.startswith(SCALE)]
    scaling += [t for t in plan.program("train").tasks if t.name.startswith(SCALE)]
    text = Path(jobs.__file__).read_text().splitlines()
    lines = {text[int(x.where.rpartition(":")[2]) - 1].strip() for x in scaling if x.where}
    assert lines == {'"loss": mf.mean(mf.cross_entropy(logits, batch["label"])),'}


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_batch_norm_and_its_gradients_are_not_narrow(precision):
    """Its sums are float64, and so no reason to leave what they are combined with in 16 bits."""

    def model(batch):
        x = nn.Dense(8, bias=False, name="fc")(mf.cast(batch["image"], "float32") / 16)
        logits = nn.Dense(5, name="out")(mf.relu(nn.BatchNorm(name="norm")(x)))
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    plan = compile_for("data=2", replace(classifier(40), model=model, precision=precision))
    program = plan.program("train")
    dtypes = {name: r.dtype for name, r in plan.tensors(program).items()}
    ops = ("BatchSums", "BatchNorm", "BatchNormSlopes", "BatchNormGrad", "SlopeTotals")
    found = {task.op: (*task.inputs, *task.outputs) for task in program.tasks if task.op in ops}
    assert set(found) == set(ops)
    for op, names in found.items():
        assert precision not in {dtypes[name] for name in names}, op


@pytest.mark.ranks(2)
def test_an_infinity_skips_exactly_one_step_on_all_ranks_and_halves_the_scale():
    """Features are images over 16, so an infinite weight of one step gives infinite gradients."""
    plan = plan_in("float16", "data=2")

    def work(session):
        rows = []
        session.expect("train", range(5))
        for step in range(5):
            before = {name: array.copy() for name, array in session.variables.items()}
            if step == 2:
                session.variables[SCALE][...] = np.inf
            outputs = session.run("train", step)
            if step == 2:
                session.variables[SCALE][...] = before[SCALE] / 2  # half of infinity is infinity
            same = all(
                np.array_equal(array, before[name])
                for name, array in session.variables.items()
                if name.startswith(("fc1", "out"))
            )
            rows.append((outputs["skipped"], same, float(session.variables[SCALE])))
        return rows

    for rows in on_ranks(plan, work):
        assert [skipped for skipped, _, _ in rows] == [0, 0, 1, 0, 0]
        assert [same for _, same, _ in rows] == [False, False, True, False, False]
        assert [scale for _, _, scale in rows] == [2.0**16] * 2 + [2.0**15] * 3


@pytest.mark.ranks(2)
def test_a_float_input_that_overflows_is_one_skipped_step():
    from mpiflow.compiler.driver import compile_job
    from mpiflow.plan.records import DataSet, Field

    def model(batch):
        return {"loss": mf.mean(mf.square(nn.Dense(3, name="d")(batch["x"])))}

    job = mf.Job("f", model, train=mf.Dataset("x", batch=8), optimizer=mf.Adam(lr=0.01),
                 precision="float16")  # fmt: skip
    record = DataSet("train", "x", (Field("x", (4,), "float32"),), (), 64, 8, False, 0, 1, 1, "")
    plan = compile_job(job, {"train": record}, target("data=2"))
    x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    x[8 * 3 + 7, 1] = np.inf  # in the rows of the second rank only
    results = on_ranks(plan, lambda s: train(s, 6), {"train": MemoryReader({"x": x}, 8)})
    for rows in results:
        assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 0, 0]
        assert [row[SCALE] for row in rows] == [2.0**16] * 4 + [2.0**15] * 2
        assert np.isfinite([row["loss"] for row in rows]).tolist() == [1, 1, 1, 0, 1, 1]


def test_the_scale_doubles_after_many_good_steps():
    from mpiflow.exec.bind import Shard
    from mpiflow.ops.scaling import NextLossScale

    op = NextLossScale(3, 2.0**24)
    scale, good = np.float32(8), np.float32(0)
    seen = []
    for bad in (0, 0, 0, 0, 2, 0, 0, 0):
        out = np.empty((), np.float32), np.empty((), np.float32)
        arrays = [np.array(v, np.float32) for v in (bad, scale, good)]
        op.kernel(Shard(np, None, {}, True), out, *arrays)
        scale, good = float(out[0]), float(out[1])
        seen.append(scale)
    assert seen == [8, 8, 16, 16, 8, 8, 8, 16]


def test_float32_jobs_are_left_alone():
    assert not any(t.op == "Cast" and t.attributes.get("dtype") != "float32"
                   for t in plan_in("float32").program("train").tasks)  # fmt: skip
