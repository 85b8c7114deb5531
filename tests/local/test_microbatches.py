"""A step in micro-batches is the step of the whole batch, on any number of ranks."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from jobs import (
    CLASSES,
    FEATURES,
    classifier,
    compile_arrays,
    compile_for,
    evaluate,
    on_ranks,
    plant,
    train,
)
from micro_jobs import WORDS, arrays, job, masked, run

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.scaling import SCALE
from mpiflow.errors import DataError, TaskError
from mpiflow.plan.traffic import bytes_sent


def weighted(batch, dtype):
    """Rows with weights, whose sum is of the whole batch, as is the mean of the inputs."""
    x = mf.cast(batch["x"], dtype)
    weight = mf.cast(batch["weight"], dtype)
    x = x - mf.reduce_sum(x, 0) * (1 / x.shape[0])
    y = nn.Dense(1, name="out")(mf.tanh(nn.Dense(5, name="in")(x)))
    rows = mf.square(mf.reshape(y, (-1,)) - weight)
    loss = mf.reduce_sum(rows * weight) / mf.reduce_sum(weight)
    return {"loss": loss, "worst": mf.reduce_max(rows), "sum": mf.total(rows)}


def words(batch, dtype):
    """A transformer with a tied embedding, a mask and dropout."""
    table = nn.Embedding(WORDS, 8, name="words", dtype=dtype)
    x = table(batch["ids"])
    attention = nn.MultiHeadAttention(8, 4, causal=True, dropout=0.1, axis="model", name="attend")
    mask = mf.not_equal(batch["ids"], 0)
    x = x + mf.dropout(attention(nn.LayerNorm(name="norm")(x), mask=mask), 0.2)
    logits = table.as_logits(x)
    label = mf.where(mask, batch["ids"], mf.cast(mask, "int64") - 1)
    return {"loss": mf.mean_cross_entropy(logits, label, smoothing=0.1, ignore=-1)}


def convolved(batch, dtype):
    x = mf.reshape(mf.cast(batch["x"], dtype), (-1, 1, 2, FEATURES // 2))
    x = mf.relu(nn.GroupNorm(2, name="norm")(nn.Conv(4, (1, 3), padding="same", name="conv")(x)))
    y = nn.Dense(1, name="out")(nn.GlobalMeanPool()(nn.MaxPool(2, stride=1)(x)))
    return {"loss": mf.mean(mf.square(mf.reshape(y, (-1,)) - mf.cast(batch["weight"], dtype)))}


OPTIMIZERS = {
    masked: mf.SGD(lr=0.1, momentum=0.9, nesterov=True),
    weighted: mf.AdamW(mf.Cosine(0.05, warmup=3, steps=6), clip=0.5, ema=0.9),
    words: mf.LAMB(mf.LinearDecay(0.05, steps=6), weight_decay=0.1),
    convolved: mf.SGD(lr=0.1, momentum=0.9, clip=1.0, weight_decay=0.01),
}


@cache
def plan_of(model, mesh, batch, micro_batches, dtype):
    def build(rows):
        return model(rows, dtype)

    made = job(build, batch, micro_batches, OPTIMIZERS[model])
    return compile_arrays(mesh, made, arrays(batch))


@cache
def whole(model, batch, dtype):
    """The outputs of each step of the whole batch on one rank."""
    return run(plan_of(model, "data=1", batch, 1, dtype))[0]


def size_of(mesh):
    return int(np.prod([int(part.partition("=")[2]) for part in mesh.split(",")]))


def cases(*values):
    return [
        pytest.param(*v, marks=pytest.mark.ranks(size_of(v[1])), id="-".join(
            x.__name__ if callable(x) else str(x) for x in v)) for v in values
    ]  # fmt: skip


# Three ranks share 8 of 24 rows, 10 and 5 of 20, unevenly.
CASES = cases(
    (masked, "data=1", 12, 12, "float32"), (masked, "data=3", 20, 4, "float64"),
    (masked, "data=3", 24, 3, "float32"), (masked, "data=2,model=2", 24, 3, "float64"),
    (weighted, "data=1", 24, 3, "float32"), (weighted, "data=2,model=2", 24, 4, "float64"),
    (words, "model=2", 24, 2, "float64"), (convolved, "data=2", 24, 3, "float64"),
)  # fmt: skip
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


@cache
def ran(*case):
    """(outputs of each step, peak of the arena, bytes sent in each step) of each rank."""

    def work(session, steps):
        session.expect("train", range(steps))
        outputs, sent = [], [session.sent]
        for step in range(steps):
            outputs.append(session.run("train", step))
            sent.append(session.sent)
        return outputs, session.arena.peak, np.diff(sent).tolist()

    return run(plan_of(*case), work)


@pytest.mark.parametrize(("model", "mesh", "batch", "micro_batches", "dtype"), CASES)
def test_a_step_in_micro_batches_is_that_of_the_batch(model, mesh, batch, micro_batches, dtype):
    found = [outputs for outputs, _, _ in ran(model, mesh, batch, micro_batches, dtype)]
    assert all(outputs == found[0] for outputs in found)
    for outputs, expected in zip(found[0], whole(model, batch, dtype), strict=True):
        assert outputs == pytest.approx(expected, rel=TOLERANCE[dtype])


@pytest.mark.parametrize(("model", "mesh", "batch", "micro_batches", "dtype"), CASES)
def test_memory_and_traffic_are_predicted_exactly(model, mesh, batch, micro_batches, dtype):
    plan = plan_of(model, mesh, batch, micro_batches, dtype)
    _, peaks, sent = zip(*ran(model, mesh, batch, micro_batches, dtype), strict=True)
    assert max(peaks) == plan.arena()
    most = {max(step) for step in zip(*sent, strict=True)}
    assert most == {bytes_sent(plan, plan.program("train"))}


def test_gradients_are_sent_once_a_step_not_once_a_micro_batch():
    program = plan_of(convolved, "data=2", 24, 3, "float64").program("train")
    assert {t.phase for t in program.tasks if t.kind == "collective"} == {2}
    assert {t.phase for t in program.tasks if t.op == "Accumulate"} == {1}


def test_activations_are_those_of_one_micro_batch():
    def wide(rows):
        x = mf.cast(rows["x"], "float32")
        for layer in range(4):
            x = mf.tanh(nn.Dense(64, name=f"layer{layer}")(x))
        return {"loss": mf.mean(mf.square(nn.Dense(1, name="out")(x)))}

    def nbytes(micro_batches):
        made = job(wide, 2048, micro_batches)
        return compile_arrays("data=1", made, arrays(2048, 2)).arena()

    one, four, sixteen = nbytes(1), nbytes(4), nbytes(16)
    assert four < 0.4 * one
    assert sixteen < 0.5 * four


@pytest.mark.ranks(2)
@pytest.mark.parametrize("model", [masked, convolved])
def test_steps_that_were_read_in_part_can_be_forgotten_and_read_again(model):
    """With slots for two batches, and for two of 3 micro-batches: odd steps begin in the second."""
    plan = plan_of(model, "data=2", 24, 3, "float64")

    def work(session, steps):
        found = []
        for first, last, expected in [(0, 3, 6), (3, 4, 5), (4, 6, 6)]:
            session.expect("train", range(first, expected))
            found += [session.run("train", step) for step in range(first, last)]
            session.forget("train")
        return found

    assert run(plan, work)[0] == run(plan)[0]


@pytest.mark.ranks(2)
def test_a_label_out_of_range_in_a_later_micro_batch_is_named_by_its_row():
    plan = plan_of(masked, "data=2", 24, 3, "float64")
    rows = {name: array.copy() for name, array in arrays(24).items()}
    rows["label"][24 + 15] = 99  # the second micro-batch has rows 8 to 15, rank 1 the last four
    with pytest.raises(DataError) as caught:
        run(plan, rows=rows)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("rank 1")
    assert "step 2, read train: field 'label' must lie in 0..4" in first
    assert lines == ["  memory row 39: 99"]


def test_a_failing_kernel_names_the_micro_batch():
    plan = plan_of(masked, "data=1", 12, 12, "float32")

    def work(session, steps):
        plant(session, "train", "Relu", 7)
        train(session, 1)

    with pytest.raises(TaskError, match=r"step 1, micro-batch 7, task relu \(Relu\): TypeError"):
        run(plan, work)


@cache
def normed(group=None, mesh="data=1", micro_batches=1):
    def build(batch):
        x = nn.Dense(7, name="in")(batch["x"])
        x = mf.relu(nn.BatchNorm(group=group, momentum=0.3, name="norm")(x))
        return {"loss": mf.mean_cross_entropy(nn.Dense(CLASSES)(x), batch["label"], ignore=-1)}

    plan = compile_arrays(mesh, job(build, 24, micro_batches), arrays(24))

    def work(session, steps):
        outputs = train(session, steps)
        state = {n: v.copy() for n, v in session.variables.items() if n.startswith("norm")}
        return [o["loss"] for o in outputs], state

    return run(plan, work)


@pytest.mark.parametrize(
    ("mesh", "micro_batches"),
    [("data=1", 3), *(pytest.param("data=2", n, marks=pytest.mark.ranks(2)) for n in (4, 2))],
)
def test_batch_norm_by_micro_batches_is_that_by_groups_of_as_many_rows(mesh, micro_batches):
    """With 2 slots and a collective that uses what is read."""
    losses, state = normed(24 // micro_batches)[0]
    for found, kept in normed(None, mesh, micro_batches):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, value in kept.items():
            np.testing.assert_allclose(value, state[name], rtol=1e-10)
    assert losses != normed(None)[0][0]


@pytest.mark.ranks(2)
def test_an_infinity_in_one_micro_batch_skips_exactly_one_step_on_all_ranks():
    def build(batch):
        x = nn.Dense(3, name="out")(mf.cast(batch["x"], "float32"))
        return {"loss": mf.mean(mf.square(x))}

    made = job(build, 24, 4, mf.Adam(lr=0.01, clip=1.0), precision="float16")
    rows = {name: array.copy() for name, array in arrays(24).items()}
    rows["x"][3 * 24 + 16, 2] = np.inf  # in the third micro-batch of the fourth step, on rank 1
    plan = compile_arrays("data=2", made, rows)

    def work(session, steps):
        found = []
        session.expect("train", range(6))
        for step in range(6):
            before = {n: v.copy() for n, v in session.variables.items() if n.startswith("out")}
            outputs = session.run("train", step)
            same = all(np.array_equal(session.variables[n], v) for n, v in before.items())
            found.append((outputs["skipped"], same, outputs[SCALE]))
        return found

    for found in run(plan, work, rows=rows):
        assert [skipped for skipped, _, _ in found] == [0, 0, 0, 1, 0, 0]
        assert [same for _, same, _ in found] == [False, False, False, True, False, False]
        assert [scale for _, _, scale in found] == [2.0**16] * 4 + [2.0**15] * 2


@pytest.mark.ranks(2)
def test_evaluations_between_steps_lose_and_repeat_nothing():
    plan = compile_for("data=2", replace(classifier(24), micro_batches=3), test_rows=53)

    def work(often):
        def steps(session):
            session.expect("train", range(6))
            found = []
            for step in range(6):
                found.append(session.run("train", step))
                if step % 3 == often:
                    evaluate(session)
            return found

        return steps

    assert on_ranks(plan, work(1))[0] == on_ranks(plan, work(-1))[0]
