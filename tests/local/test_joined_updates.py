"""Updates joined over what lies side by side: every bit is that of updates for themselves."""

import numpy as np
import pytest
from jobs import CLASSES, MemoryReader, compile_arrays, on_ranks, train
from micro_jobs import arrays, job

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler import arrange
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.graph.op import build_op
from mpiflow.graph.sbp import S

STEPS = 4
OPTIMIZERS = {
    "sgd": mf.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": mf.SGD(lr=0.1),
    "adagrad": mf.Adagrad(lr=0.1),
    "adamw": mf.AdamW(lr=0.01, clip=1.0, ema=0.9, groups=(mf.NO_DECAY,)),
    "lamb": mf.LAMB(lr=0.01, groups=(mf.NO_DECAY,)),
    "lars": mf.LARS(lr=0.1, groups=(mf.Group("out.*", lr_scale=0.5, adapt=False), mf.NO_DECAY)),
}


def layers(batch):
    """Odd sizes, which divide evenly over no ranks; one bias is added twice, with one gradient."""
    x = mf.cast(batch["x"], "float32")
    for i, width in enumerate((7, 11, 9)):
        sbp = {"model": S(i % 2)}
        x = nn.LayerNorm(name=f"norm{i}")(mf.relu(nn.Dense(width, name=f"fc{i}", sbp=sbp)(x)))
    more = nn.variable("more", (CLASSES,), nn.constant(0.0))
    logits = nn.Dense(CLASSES, name="out")(mf.dropout(x, 0.1)) + more
    return {"loss": mf.mean_cross_entropy(logits, batch["label"], ignore=-1)}


CASES = [
    ("data=1", "plain", {}), ("data=1", "adamw", {}), ("data=1", "lamb", {}),
    ("data=1", "lars", {}), ("data=1", "adagrad", {}),
    ("data=2", "sgd", {"micro_batches": 3}), ("data=3", "adamw", {"zero": 1}),
    ("data=3", "adamw", {"zero": 2, "micro_batches": 2}), ("data=3", "sgd", {"zero": 3}),
    ("data=2,model=2", "lamb", {"zero": 1}), ("data=2,model=2", "adamw", {}),
    ("stage=2,data=2", "adamw", {"micro_batches": 2}), ("stage=3", "sgd", {"micro_batches": 4}),
    ("data=2", "adamw", {"precision": "float16"}), ("data=2", "sgd", {"route": "staged"}),
    ("data=1", "adamw", {"route": "nccl"}),
]  # fmt: skip


def plan_of(mesh, optimizer, *, micro_batches=1, zero=0, precision="float32", route=""):
    made = job(layers, 24, micro_batches, OPTIMIZERS[optimizer], precision=precision)
    return compile_arrays(mesh, made, arrays(24), zero=zero, pipeline=Pipeline(), route=route)


def apart(monkeypatch, *case, **more):
    """The plan in which every variable has an update of its own."""
    with monkeypatch.context() as change:
        change.setattr(arrange, "join_updates", lambda program, *rest: program)
        return plan_of(*case, **more)


def trained(plan):
    """By rank, the losses and all variables after some steps."""

    def work(session):
        losses = [outputs["loss"] for outputs in train(session, STEPS)]
        return losses, {name: v.copy() for name, v in session.variables.items()}

    return on_ranks(plan, work, {"train": MemoryReader(arrays(24), 24)})


def updates(plan):
    """The updates of all stages, each with how many variables it is for."""
    tasks = [task for p in plan.programs if p.name == "train" for task in p.tasks]
    found = []
    for task in tasks:
        given = task.kind == "compute" and build_op(task.op, task.attributes).abreast()[0]
        if given:
            found.append((task, len(given[0])))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("mesh", "optimizer", "more"), CASES, ids=str)
def test_joined_updates_change_no_bit(mesh, optimizer, more, monkeypatch):
    plan, other = plan_of(mesh, optimizer, **more), apart(monkeypatch, mesh, optimizer, **more)
    assert len(updates(plan)) < len(updates(other))
    assert sum(count for _, count in updates(plan)) == len(updates(other))
    for (losses, ours), (expected, theirs) in zip(trained(plan), trained(other), strict=True):
        assert losses == expected
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


def stretches(plan, task):
    """Of each operand of an update, whether the members' tensors lie side by side."""
    program = plan.program("train")
    tensors = plan.tensors(program)
    found = []
    for ranges, names in zip(
        build_op(task.op, task.attributes).abreast(), (task.inputs, task.outputs), strict=True
    ):
        for each in ranges:
            members = [tensors[names[i]] for i in each]
            ends = [m.offset + m.nbytes for m in members]
            found.append(ends[:-1] == [m.offset for m in members[1:]])
    return found


@pytest.mark.parametrize(
    ("mesh", "optimizer", "more"),
    [case for case in CASES if "stage" not in case[0] and "precision" not in case[2]],
    ids=str,
)
def test_what_a_joined_update_goes_over_lies_side_by_side(mesh, optimizer, more):
    plan = plan_of(mesh, optimizer, **more)
    for task, count in updates(plan):
        assert count == 1 or all(stretches(plan, task)), task.name


def test_updates_with_other_settings_or_rates_are_not_joined():
    joined = [task for task, count in updates(plan_of("data=1", "lars")) if count > 1]
    for task in joined:
        kinds = {name.rstrip("0123456789").split(".")[0] for name in task.outputs}
        weights = [name for name in task.outputs if name.endswith("weight")]
        assert "out" not in kinds or kinds == {"out"}
        assert "out" in kinds or not weights  # LARS has a rate for each
    assert joined


def test_updates_of_one_gradient_are_not_joined():
    plan = plan_of("data=1", "plain")
    for task, count in updates(plan):
        assert len(set(task.inputs)) == len(task.inputs), count
