"""Predictions: rows in order, the same on any ranks and layout, and no file before it is whole."""

from dataclasses import replace
from pathlib import Path

import h5py
import jobs
import numpy as np
import pytest

import mpiflow as mf
from mpiflow import nn
from mpiflow.errors import CheckpointError, CompileError, DataError, UsageError, VerifyError
from mpiflow.exec.failure import Failure
from mpiflow.exec.local import run_local
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import P
from mpiflow.io.dataset import DatasetReader
from mpiflow.io.pack import pack
from mpiflow.io.weights import safetensors
from mpiflow.io.weights.tensors import TensorInfo
from mpiflow.plan import store
from mpiflow.plan.records import WRITE
from mpiflow.plan.verify_run import verify_predict
from mpiflow.predict import Options, Request, prediction_plan, run

ROWS, BATCH = 83, 32
IMAGES = jobs.data(ROWS)["image"]


def model(batch):
    x = mf.cast(batch["image"], "float32") / 16
    hint = {"model": mf.S(1)}
    logits = nn.Dense(jobs.CLASSES, name="out", sbp=hint)(mf.relu(nn.Dense(7, name="fc1")(x)))
    return {
        "loss": mf.mean(mf.cross_entropy(logits, batch["label"])),
        "logits": logits,
        "best": mf.argmax(logits),
        "pair": mf.stack([logits, mf.softmax(logits)], 1),
    }


def draw(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


WEIGHTS = {
    "fc1.weight": draw(6, 7), "fc1.bias": draw(7), "out.weight": draw(7, 5), "out.bias": draw(5),
}  # fmt: skip


MIDDLE = WEIGHTS | {"middle.weight": draw(7, 7), "middle.bias": draw(3, 7)[0]}


def logits_of(weights, images=IMAGES):
    hidden = np.maximum(images / 16 @ weights["fc1.weight"] + weights["fc1.bias"], 0)
    return hidden @ weights["out.weight"] + weights["out.bias"]


def job(**more):
    declared = {"image": ((6,), "uint8"), "label": ((), "int64")}
    train = mf.Dataset("train-*.h5", batch=BATCH, fields=declared, rows=100)
    settings = {"evaluate": mf.Dataset("test-*.h5", batch=BATCH), "optimizer": mf.SGD(lr=0.1)}
    return mf.Job("rows", model, train=train, **(settings | more))


@pytest.fixture
def folder(tmp_path):
    pack({"image": IMAGES}, str(tmp_path / "test-*.h5"), shards=[50, 33], chunk_rows=8)
    infos = [TensorInfo(n, a.shape, a.dtype.name) for n, a in WEIGHTS.items()]
    safetensors.write(tmp_path / "w.safetensors", infos, iter(WEIGHTS.values()), {})
    return tmp_path


def planned(folder, mesh="data=1", job=None, weights="w.safetensors", **more):
    request = Request(str(folder / weights), folder, **more)
    on = {"device": "fake", "route": jobs.ROUTE} if jobs.ROUTE else {}
    return prediction_plan(job or globals()["job"](), folder, parse_mesh(mesh), request, **on)


def run_ranks(plan, options, seed=0):
    def rank(transport):
        device = jobs.device_of(plan, transport.rank, seed)
        return run(plan, transport, Failure(transport), options, device)

    run_local(plan.mesh.size, rank)


def predicted(plan, folder, **more):
    """The arrays of the file that the ranks of a plan write."""
    out = folder / "out.h5"
    # Ranks here are threads: after a failure the watch would go on, and end the tests with itself.
    options = Options(folder, out, stall=0, **more)
    run_ranks(plan, options)
    with h5py.File(out) as file:
        return {name: dataset[:] for name, dataset in file.items()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "mesh",
    [
        "data=1",
        "data=3",
        "model=2",
        "data=2,model=2",
        "stage=2",
        "stage=2,data=2",
        "stage=2,data=2+1",
    ],
)
def test_rows_are_in_order_on_any_ranks(folder, mesh):
    found = predicted(planned(folder, mesh), folder)
    expected = logits_of(WEIGHTS)
    np.testing.assert_allclose(found["logits"], expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found["best"], expected.argmax(1))
    assert found["pair"].shape == (ROWS, 2, 5)
    np.testing.assert_allclose(found["pair"][:, 1].sum(1), np.ones(ROWS), rtol=1e-5)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("batch", [83, 200, 2])
def test_batches_of_any_size(folder, batch):
    small = job(evaluate=mf.Dataset("test-*.h5", batch=batch))
    found = predicted(planned(folder, "data=3", small, outputs=["logits"]), folder)
    assert list(found) == ["logits"]
    np.testing.assert_allclose(found["logits"], logits_of(WEIGHTS), rtol=0, atol=1e-5)


@pytest.mark.ranks(3)
def test_each_stage_writes_what_it_makes(folder):
    def with_hidden(batch):
        x = mf.cast(batch["image"], "float32") / 16
        with mf.stage(0):
            hidden = mf.relu(nn.Dense(7, name="fc1")(x))
        with mf.stage(1):
            rows = mf.reduce_sum(hidden * nn.Dense(7, name="middle")(hidden), dim=-1)
        with mf.stage(2):
            logits = nn.Dense(jobs.CLASSES, name="out")(hidden)
        return {"logits": logits, "hidden": hidden, "sum": rows, "twice": hidden + hidden}

    infos = [TensorInfo(n, a.shape, a.dtype.name) for n, a in MIDDLE.items()]
    safetensors.write(folder / "w.safetensors", infos, iter(MIDDLE.values()), {})
    staged = planned(folder, "stage=3", replace(job(), model=with_hidden))
    written = [
        {t.attributes["output"] for t in p.tasks if t.stream == WRITE}
        for p in staged.programs if p.name == "predict"
    ]  # fmt: skip
    assert written == [{"hidden"}, {"sum"}, {"logits", "twice"}]
    assert [v.name for v in staged.at_stage(2).variables] == ["out.weight", "out.bias"]
    found = predicted(staged, folder)
    alone = predicted(
        planned(folder, "data=1", replace(job(), model=with_hidden)), folder, overwrite=True
    )
    assert found.keys() == alone.keys()
    for name, rows in alone.items():
        np.testing.assert_allclose(found[name], rows, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["logits"], logits_of(WEIGHTS), rtol=0, atol=1e-5)


def test_a_model_that_does_something_else_for_few_rows_is_refused(folder):
    def uneven(batch):
        outputs = model(batch)
        if batch["image"].shape[0] < BATCH:
            outputs["logits"] = mf.sigmoid(outputs["logits"])
        return outputs

    planned(folder, "data=2", replace(job(), model=uneven))
    with pytest.raises(CompileError, match="predict_tail has sigmoid, which the model does not"):
        planned(folder, "stage=2", replace(job(), model=uneven))


@pytest.mark.host("moves what is written into the arena of another stage")
def test_two_stages_that_write_one_output_are_refused(folder):
    plan = planned(folder, "stage=2")

    second = plan.at_stage(1)

    def with_write(program):
        """The program of stage 0, which also writes an output of stage 1."""
        other = second.program(program.name)
        write = next(task for task in other.tasks if task.stream == WRITE)
        rows = next(r for r in other.registers if r.name in write.inputs)
        rows = replace(rows, offset=0)
        return replace(program, registers=(*program.registers, rows), tasks=(*program.tasks, write))

    programs = [with_write(p) if p.data and not p.stage else p for p in plan.programs]
    with pytest.raises(VerifyError, match="is written by stage 0 and stage 1"):
        verify_predict(replace(plan, programs=tuple(programs)))


def test_a_plan_has_only_what_the_outputs_need(folder):
    def with_another_head(batch):
        outputs = model(batch)
        other = nn.Dense(3, name="other")(mf.cast(batch["image"], "float32"))
        return outputs | {"other": other}

    plan = planned(folder, job=replace(job(), model=with_another_head), outputs=["logits"])
    assert sorted(v.name for v in plan.variables) == sorted(WEIGHTS)
    assert [p.name for p in plan.programs] == ["initialise", "predict", "predict_tail"]
    (read,) = [t for t in plan.programs[1].tasks if t.kind == "read"]
    assert read.attributes["fields"] == ["image"]
    assert store.loads(store.dumps(plan)) == plan


def test_what_is_not_there_is_told(folder):
    with pytest.raises(UsageError, match="--outputs loss: is a scalar of a whole batch"):
        planned(folder, outputs=["loss"])
    with pytest.raises(
        UsageError, match="none of the outputs; for each row there are logits, best"
    ):
        planned(folder, outputs=["logit"])
    scalars = replace(
        job(), model=lambda batch: {"loss": mf.mean(mf.cast(batch["image"], "float32"))}
    )
    with pytest.raises(UsageError, match="gives loss, scalars of a whole batch"):
        planned(folder, job=scalars)
    with pytest.raises(UsageError, match="name one of train, or give a pattern"):
        planned(folder, job=job(evaluate=None))
    with pytest.raises(DataError, match=r"no file matches 'none-\*\.h5'"):
        planned(folder, dataset="none-*.h5")
    with pytest.raises(CheckpointError, match=r"out\.bias: float32 \(5,\), from out\.bias"):
        infos = [TensorInfo("fc1.weight", (6, 7), "float32")]
        safetensors.write(folder / "less.safetensors", infos, iter([draw(6, 7)]), {})
        planned(folder, weights="less.safetensors")

    def by_label(batch):
        return model(batch) | {"each": mf.cross_entropy(model_logits(batch), batch["label"])}

    def model_logits(batch):
        return nn.Dense(5, name="again")(mf.cast(batch["image"], "float32"))

    with pytest.raises(DataError, match="each need the field 'label', which"):
        planned(folder, job=replace(job(), model=by_label), outputs=["each"])


def test_another_data_set_by_pattern(folder):
    pack({"image": IMAGES[:9]}, str(folder / "new-*.h5"))
    found = predicted(planned(folder, dataset="new-*.h5"), folder)
    np.testing.assert_allclose(found["logits"], logits_of(WEIGHTS)[:9], rtol=0, atol=1e-5)


def test_narrow_outputs_are_written_as_float32(folder):
    found = predicted(planned(folder, job=job(precision="float16")), folder)
    assert found["logits"].dtype == np.float32
    np.testing.assert_allclose(found["logits"], logits_of(WEIGHTS), rtol=0, atol=0.05)


def test_training_and_evaluation_pass_over_rows(folder):
    plan = jobs.compile_for("data=2", job())
    assert "output logits has a value for each row: only `mpiflow predict` gives it" in plan.notes
    for name in ("train", "evaluate"):
        assert [output.name for output in plan.program(name).outputs] == ["loss"]
    assert not [task.name for task in plan.program("train").tasks if "stack" in task.name]


@pytest.mark.ranks(2)
def test_a_rank_that_fails_leaves_no_file(folder, monkeypatch):
    plan, read = planned(folder, "data=2"), DatasetReader.read

    def failing(self, step, rows, out):
        if step == 1 and rows[0]:
            raise DataError("planted")
        read(self, step, rows, out)

    monkeypatch.setattr(DatasetReader, "read", failing)
    with pytest.raises(DataError, match="planted"):
        predicted(plan, folder)
    assert not (folder / "out.h5").exists()
    monkeypatch.undo()
    assert predicted(plan, folder)["logits"].shape == (ROWS, 5)


def test_a_file_is_not_replaced_unasked(folder):
    plan = planned(folder)
    predicted(plan, folder)
    with pytest.raises(DataError, match=r"out\.h5: exists; name another file, or give --overwrite"):
        predicted(plan, folder)
    predicted(plan, folder, overwrite=True)
    (folder / "w.safetensors").rename(folder / "gone.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        predicted(plan, folder, overwrite=True)


def changed(plan, change):
    """The plan with each write task of the full batches changed, or its register."""
    program = plan.program("predict")
    written = {name for t in program.tasks if t.stream == WRITE for name in t.inputs}
    program = change(program, written)
    return replace(
        plan, programs=tuple(program if p.name == "predict" else p for p in plan.programs)
    )


def test_a_plan_that_writes_something_else_is_refused(folder):
    plan = planned(folder, "data=2", outputs=["logits"])

    def partial(program, written):
        return replace(program, registers=tuple(
            replace(r, layout=(P,)) if r.name in written else r for r in program.registers
        ))  # fmt: skip

    def unnamed(program, written):
        return replace(program, tasks=tuple(
            replace(t, attributes={}) if t.stream == WRITE else t for t in program.tasks
        ))  # fmt: skip

    def silent(program, written):
        return replace(program, tasks=tuple(t for t in program.tasks if t.stream != WRITE))

    for change, message in (
        (partial, "a rank writes whole rows"), (unnamed, "no output or one that is written"),
        (silent, "what program predict_tail gives for a row"),
    ):  # fmt: skip
        with pytest.raises(VerifyError, match=message):
            verify_predict(changed(plan, change))
    with pytest.raises(VerifyError, match="the rows of the programs"):
        verify_predict(replace(plan, programs=plan.programs[:2]))


def test_the_folder_of_the_output_is_made(folder):
    options = Options(folder, folder / "deep" / "out.h5")
    plan = planned(folder)
    run_ranks(plan, options)
    assert [p.name for p in Path(folder / "deep").iterdir()] == ["out.h5"]
