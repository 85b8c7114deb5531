"""A run that begins with weights: on any ranks the same; what is frozen stays."""

import json
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest

import mpiflow as mf
from mpiflow.errors import CheckpointError, JobError, VerifyError
from mpiflow.io.weights import npz, safetensors
from mpiflow.io.weights.first import is_of_model
from mpiflow.io.weights.source import open_tensors
from mpiflow.io.weights.tensors import TensorInfo
from mpiflow.plan import store
from mpiflow.plan.verify_run import verify_run
from mpiflow.weights import check_first, import_weights, load_first, with_first_values

MESHES = ["data=1", "data=3", "data=2,model=2", "stage=2"]
TURNED = {
    "fc1.weight": {"from": "hidden.weight", "as": "o i -> i o"},
    "fc1.bias": "hidden.bias",
    "out.*": "head.*",
}


def draw(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


WEIGHTS = {
    "hidden.weight": draw(jobs.WIDTH, jobs.FEATURES),
    "hidden.bias": draw(jobs.WIDTH),
    "head.weight": draw(jobs.WIDTH, jobs.CLASSES),
    "head.bias": draw(jobs.CLASSES),
}
OURS = {
    "fc1.weight": WEIGHTS["hidden.weight"].T,
    "fc1.bias": WEIGHTS["hidden.bias"],
    "out.weight": WEIGHTS["head.weight"],
    "out.bias": WEIGHTS["head.bias"],
}


@pytest.fixture
def folder(tmp_path):
    infos = [TensorInfo(n, a.shape, a.dtype.name) for n, a in WEIGHTS.items()]
    safetensors.write(tmp_path / "w.safetensors", infos, iter(WEIGHTS.values()), {})
    npz.write(tmp_path / "w.npz", infos, iter(WEIGHTS.values()))
    (tmp_path / "names.json").write_text(json.dumps({"names": TURNED}))
    return tmp_path


def weights(path="w.safetensors", **more):
    return mf.Weights(path, names="names.json", **more)


def begun(plan, folder, steps=0):
    """The variables of each rank after `steps`, and which part of the whole each is."""

    def work(session):
        load_first(plan.first, folder, session.boxes(), session.variables)
        jobs.train(session, steps)
        return session.boxes(), {name: array.copy() for name, array in session.variables.items()}

    return jobs.on_ranks(plan, work)


def part(array, box):
    return array[tuple(slice(*span) for span in box)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("path", ["w.safetensors", "w.npz"])
def test_every_rank_begins_with_its_part_of_the_file(folder, mesh, path):
    job = jobs.classifier(optimizer=mf.SGD(lr=0.1, momentum=0.9, ema=0.9))
    plan = with_first_values(jobs.compile_for(mesh, job), weights(path), folder)
    for boxes, arrays in begun(plan, folder):
        for name, array in arrays.items():
            base = name.removesuffix(".average")
            expected = OURS[base] if base in OURS else np.zeros(plan_shape(plan, name))
            np.testing.assert_array_equal(array, part(expected, boxes[name]), err_msg=name)


def plan_shape(plan, name):
    return next(v.shape for v in plan.variables if v.name == name)


def test_what_is_left_out_begins_as_the_model_says(folder):
    job = jobs.classifier()
    plain = jobs.compile_for("data=1", job)
    plan = with_first_values(plain, weights(without=("out.*",)), folder)
    ((_, arrays),) = begun(plan, folder)
    ((_, fresh),) = jobs.on_ranks(
        plain, lambda s: (0, {n: a.copy() for n, a in s.variables.items()})
    )
    np.testing.assert_array_equal(arrays["fc1.weight"], OURS["fc1.weight"])
    np.testing.assert_array_equal(arrays["out.weight"], fresh["out.weight"])


def test_a_head_of_another_size_is_told_or_left_out(folder):
    plan = jobs.compile_for("data=1", jobs.classifier(width=8))
    with pytest.raises(CheckpointError) as caught:
        with_first_values(plan, weights(), folder)
    assert "fc1.weight: float32 (6, 8) in the job, float32 (7, 6) in hidden.weight" in str(
        caught.value
    )
    assert "out.weight: float32 (8, 5) in the job, float32 (7, 5) in head.weight" in str(
        caught.value
    )


def test_the_weights_are_part_of_what_is_computed_and_of_the_plan(folder):
    plain = jobs.classifier_plan("data=1")
    plan = with_first_values(plain, weights(), folder)
    assert store.loads(store.dumps(plan)) == plan
    assert store.program_digest(plan) != store.program_digest(plain)
    moved = replace(weights(), path=str(folder / "moved.safetensors"))
    (folder / "w.safetensors").rename(folder / "moved.safetensors")
    again = with_first_values(plain, moved, folder)
    assert store.program_digest(again) == store.program_digest(plan)
    with pytest.raises(CheckpointError, match=r"w\.safetensors: no such file"):
        check_first(plan.first, folder)
    npz.write(folder / "w.npz", [TensorInfo("a", (1,), "float32")], iter([draw(1)]))
    with pytest.raises(CheckpointError, match="made with other weights"):
        check_first(replace(plan.first, path="w.npz"), folder)


def test_a_plan_that_fills_no_variable_is_refused(folder):
    plan = with_first_values(jobs.classifier_plan("data=1"), weights(), folder)
    verify_run(plan)
    wrong = replace(plan.first.filled[0], variable="nothing")
    with pytest.raises(VerifyError, match="first values fill 'nothing'"):
        verify_run(replace(plan, first=replace(plan.first, filled=(wrong,))))


@pytest.mark.ranks(3)
def test_frozen_variables_have_no_gradient_no_state_and_stay(folder):
    job = replace(jobs.classifier(), frozen=("fc1.*",))
    plan = with_first_values(jobs.compile_for("data=3", job), weights(), folder)
    names = {v.name: v.trainable for v in plan.variables}
    assert names == {
        "fc1.weight": False, "fc1.bias": False, "out.weight": True, "out.bias": True,
        "out.weight.momentum": False, "out.bias.momentum": False,
    }  # fmt: skip
    assert not [t.name for t in plan.program("train").tasks if "grad/fc1" in t.name]
    for boxes, arrays in begun(plan, folder, steps=2):
        np.testing.assert_array_equal(
            arrays["fc1.weight"], part(OURS["fc1.weight"], boxes["fc1.weight"])
        )
        assert (arrays["out.weight"] != part(OURS["out.weight"], boxes["out.weight"])).any()


def test_frozen_names_are_of_variables():
    job = replace(jobs.classifier(), frozen=("fc2.*",))
    with pytest.raises(JobError, match=r"frozen 'fc2\.\*' fits no variable; there are fc1\.weight"):
        jobs.compile_for("data=1", job)
    job = replace(job, frozen=("*",))
    with pytest.raises(JobError, match="no trainable variable"):
        jobs.compile_for("data=1", job)
    with pytest.raises(JobError, match="frozen is a tuple of name patterns"):
        replace(job, frozen="fc1")
    with pytest.raises(JobError, match="without is a tuple of name patterns"):
        mf.Weights("w.npz", without="out.*")
    with pytest.raises(JobError, match=r"init must be of Weights, it is 3"):
        replace(job, init=3)


def test_frozen_batch_norm_keeps_its_statistics():
    def model(batch):
        x = mf.cast(batch["image"], "float32")
        x = mf.nn.BatchNorm(name="norm")(mf.nn.Dense(4, name="fc1")(x))
        logits = mf.nn.Dense(jobs.CLASSES, name="out")(x)
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    job = replace(jobs.classifier(), model=model, evaluate=None, frozen=("norm.*",))
    plan = jobs.compile_for("data=1", job)
    written = {name for task in plan.program("train").tasks for name in task.outputs}
    assert not written & {"norm.running_mean", "norm.running_variance", "norm.scale"}
    assert "fc1.weight" in written


def test_an_import_is_the_checkpoint_of_a_run_that_begins_so(folder):
    job = jobs.classifier(optimizer=mf.SGD(lr=0.1, momentum=0.9, ema=0.9))
    plan = jobs.compile_for("data=1", job)
    path, remarks = import_weights(plan, weights(without=("out.bias",)), folder / "run", folder)
    assert remarks == []
    assert path == folder / "run" / "checkpoints" / "step-00000000"
    given = with_first_values(plan, weights(without=("out.bias",)), folder)
    ((boxes, arrays),) = begun(given, folder)
    with open_tensors(folder / "run") as saved:
        assert saved.checkpoint.program == store.program_digest(plan)
        for name, array in arrays.items():
            np.testing.assert_array_equal(saved.read(name, boxes[name]), array, err_msg=name)
    with pytest.raises(CheckpointError, match="has checkpoints already"):
        import_weights(plan, weights(), folder / "run", folder)


def test_large_variables_are_imported_in_blocks(folder, monkeypatch):
    monkeypatch.setattr("mpiflow.weights._BLOCK_BYTES", 64)
    plan = jobs.classifier_plan("data=1")
    path, _ = import_weights(
        plan, weights(without=("fc1.bias", "out.weight")), folder, Path(folder)
    )
    monkeypatch.undo()
    whole, _ = import_weights(
        plan, weights(without=("fc1.bias", "out.weight")), folder / "whole", folder
    )
    with open_tensors(path) as blocks, open_tensors(whole) as one:
        assert len(blocks.checkpoint.slices) > len(one.checkpoint.slices)
        for name, info in one.tensors.items():
            box = tuple((0, n) for n in info.shape)
            np.testing.assert_array_equal(blocks.read(name, box), one.read(name, box))


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (mf.SGD(lr=0.1, momentum=0.9, ema=0.9), "float32"), (mf.AdamW(lr=0.1, clip=1.0), "float16"),
        (mf.Adagrad(lr=0.1), "float32"), (mf.LAMB(lr=mf.Cosine(0.1)), "float32"),
        (mf.LARS(lr=0.1), "float32"),
    ],
)  # fmt: skip
def test_what_optimizers_and_loss_scaling_keep_is_not_of_the_model(optimizer, precision):
    job = replace(jobs.classifier(optimizer=optimizer), precision=precision)
    names = [v.name for v in jobs.compile_for("data=1", job).variables]
    assert sorted(n for n in names if is_of_model(n, names)) == sorted(OURS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_weights_fill_a_run_of_micro_batches_and_of_16_bits(folder, precision):
    job = replace(jobs.classifier(), precision=precision, micro_batches=4, frozen=("out.*",))
    plan = with_first_values(jobs.compile_for("data=2", job), weights(), folder)
    for boxes, arrays in begun(plan, folder, steps=1):
        np.testing.assert_array_equal(
            arrays["out.weight"], part(OURS["out.weight"], boxes["out.weight"])
        )
        assert arrays["fc1.weight"].dtype == np.float32
        difference = arrays["fc1.weight"] - part(OURS["fc1.weight"], boxes["fc1.weight"])
        assert 0 < np.abs(difference).max() < 1
