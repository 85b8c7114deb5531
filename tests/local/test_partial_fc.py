"""Sampled classes (Partial FC): against NumPy, and on any ranks, which send no weights."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from jobs import MemoryReader, on_ranks, target, train
from op_harness import whole

import mpiflow as mf
from mpiflow.compiler.driver import compile_job
from mpiflow.graph.graph import current
from mpiflow.graph.op import build_op
from mpiflow.graph.sbp import S
from mpiflow.models.faces import Faces
from mpiflow.plan.records import DataSet, Field

BATCH, CLASSES, WIDTH, BLOCKS, STEPS = 6, 120, 5, 4, 7
SCALE, MARGIN, RATE, MOMENTUM, DECAY = 8.0, 0.2, 0.3, 0.9, 0.01


@cache
def arrays():
    draw = np.random.default_rng(1)
    x = draw.standard_normal((BATCH * STEPS, WIDTH))
    label = draw.integers(0, CLASSES, BATCH * STEPS).astype(np.int32)
    return {"x": x / np.linalg.norm(x, axis=1, keepdims=True), "label": label}


def plan_of(
    mesh="data=1", *, classes=CLASSES, width=WIDTH, sampled=0.3, dtype="float64", split=False, **job
):
    """`split` asks for an axis `model` to split the classes, which for few would not be chosen."""
    faces = Faces(None, classes, width, "cos", MARGIN, SCALE, sampled, BLOCKS)

    def model(batch):
        cosines, column = faces.compared(mf.cast(batch["x"], dtype), batch["label"])
        if split:
            variables = current().variables
            hint = {"model": S(0, classes // BLOCKS)}
            variables["classes.weight"] = replace(variables["classes.weight"], hint=hint)
        return {"loss": faces.loss(cosines, column)}

    optimizer = mf.SGD(RATE, momentum=MOMENTUM, weight_decay=DECAY)
    job = mf.Job("faces", model, train=mf.Dataset("x", batch=BATCH), optimizer=optimizer, **job)
    fields = (Field("x", (width,), "float64"), Field("label", (), "int32"))
    data = DataSet("train", "x", fields, (), BATCH * STEPS, BATCH, False, 0, 1, 1, "")
    return compile_job(job, {"train": data}, target(mesh))


def run(plan, work):
    return on_ranks(plan, work, {"train": MemoryReader(arrays(), BATCH)})


def losses(plan):
    found = run(plan, lambda session: [row["loss"] for row in train(session, STEPS)])
    assert all(other == found[0] for other in found)
    return found[0]


def reference(w, m, sample_of):
    """The losses of all steps in NumPy; `w` and `m` are updated."""
    found = []
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        x, label = arrays()["x"][rows], arrays()["label"][rows]
        chosen = sample_of(label, step).reshape(-1)
        length = np.linalg.norm(w[chosen], axis=1, keepdims=True)
        unit = w[chosen] / length
        hit = chosen == label[:, None]
        z = SCALE * (x @ unit.T - MARGIN * hit)
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        found.append(-np.log(p[hit]).mean())
        du = SCALE / BATCH * (p - hit).T @ x
        g = (du - unit * (du * unit).sum(1, keepdims=True)) / length + DECAY * w[chosen]
        m[chosen] = MOMENTUM * m[chosen] + g
        w[chosen] -= RATE * m[chosen]
    return found


def test_losses_and_weights_are_those_of_numpy():
    plan = plan_of()
    (task,) = (t for t in plan.program("train").tasks if t.op == "SampleClasses")
    op = build_op(task.op, task.attributes)
    assert op.count == 9

    def work(session):
        w, m = (session.variables[f"classes.weight{end}"] for end in ("", ".momentum"))
        start = w.copy(), m.copy()
        return start, [row["loss"] for row in train(session, STEPS)], (w.copy(), m.copy())

    ((start, found, after),) = run(plan, work)
    w, m = start
    expected = reference(w, m, lambda label, step: whole(op, [label, np.asarray(step)])[0])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(after[0], w, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(after[1], m, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=pytest.mark.ranks(ranks))
        for mesh, ranks in (
            ("data=2", 2), ("model=2", 2), ("model=3", 3), ("model=4", 4), ("data=2,model=2", 4)
        )
    ],
)  # fmt: skip
def test_the_sample_does_not_depend_on_the_ranks(mesh):
    plan = plan_of(mesh, split=True)
    if "model" in mesh:
        weight = next(v for v in plan.variables if v.name == "classes.weight")
        assert isinstance(weight.layout[-1], S)
    np.testing.assert_allclose(losses(plan), losses(plan_of()), rtol=1e-10)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["data=1", "data=2,model=2"])
def test_micro_batches_share_the_sample_of_the_step(mesh):
    plan = plan_of(mesh, micro_batches=3)
    np.testing.assert_allclose(losses(plan), losses(plan_of()), rtol=1e-10)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["model=2", "model=4"])
def test_ranks_send_no_weights_and_touch_none_that_are_not_sampled(mesh):
    classes, width, count = 40_000, 32, 3000
    plan = plan_of(mesh, classes=classes, width=width)
    program = plan.program("train")
    tensors = plan.tensors(program)
    rows = {(BLOCKS, count, width), (BLOCKS * count, width)}
    assert rows <= {register.shape for register in program.registers}
    for task in program.tasks:
        if task.kind == "collective":
            assert rows.isdisjoint({tensors[name].shape for name in task.inputs}), task.name
    assert (classes, width) not in {register.shape for register in program.registers}


@pytest.mark.ranks(2)
def test_an_evaluation_and_a_full_step_compare_with_all_classes():
    ops = {task.op for task in plan_of("model=2", sampled=1.0).program("train").tasks}
    assert "SampleClasses" not in ops
    assert "SgdUpdate" in ops


@pytest.mark.ranks(2)
def test_sampled_classes_train_in_16_bits():
    exact = losses(plan_of(dtype="float32"))
    near = losses(plan_of("model=2", dtype="float32", precision="float16"))
    assert np.isfinite(near).all()
    np.testing.assert_allclose(near[:2], exact[:2], rtol=2e-2)
