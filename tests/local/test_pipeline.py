"""Pipeline stages do what one rank does, in the memory and with the bytes that the plan says."""

import tracemalloc

import numpy as np
import pytest
from jobs import MemoryReader, compile_arrays, on_ranks
from micro_jobs import arrays, job
from pipeline_jobs import (
    BATCH,
    Case,
    branches,
    layers,
    of_stages,
    penalised,
    plan_of,
    predicted,
    ran,
    tied,
    weighted,
)

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.compiler.scaling import SCALE

CASES = [
    Case(layers, "stage=2", 1, optimizer="lamb", dtype="float32"),
    Case(layers, "stage=6", 12, optimizer="sgd"),
    Case(layers, "stage=2,data=2", 4, "gpipe", zero=1),
    Case(layers, "stage=3,model=2", 6, "zero-bubble", optimizer="lamb", forced=255),
    Case(layers, "stage=2,data=2", 4, "zero-bubble", zero=2, dtype="float32", precision="float16"),
    Case(tied, "stage=2,data=2", 2, "gpipe", zero=3),
    Case(tied, "data=3,stage=2", 1, forced=7),
    Case(tied, "data=3,stage=2", 4, "interleaved", 3, zero=1, optimizer="sgd", forced=280),
    Case(tied, "stage=4", 3, optimizer="lamb"),
    Case(branches, "stage=2,data=2,model=2", 8, optimizer="sgd"),
    Case(branches, "stage=2", 4, "zero-bubble", zero=3, optimizer="lamb"),
    Case(branches, "stage=2,data=3", 4, "interleaved", 2, zero=2),
    Case(branches, "stage=5", 1, zero=2, optimizer="lamb", dtype="float32", precision="float16"),
    Case(weighted, "stage=4", 3, zero=3, dtype="float32", precision="float16"),
    Case(weighted, "model=2,stage=2", 6, "gpipe", optimizer="sgd"),
    Case(weighted, "stage=5", zero=3, optimizer="sgd", dtype="float32", precision="float16",
         forced=337),
    Case(penalised, "stage=3", 4, optimizer="sgd"),
    Case(penalised, "stage=2,data=2", 2, "interleaved", 2, zero=1),
    Case(layers, "stage=2,data=3+1", 4),
    Case(layers, "stage=2,data=1+3", 4, "gpipe", zero=1, optimizer="sgd"),
    Case(layers, "stage=2,data=2+1", 2, optimizer="lamb", dtype="float32", precision="float16"),
    Case(tied, "stage=2,data=2,model=1+2", 4, "zero-bubble", optimizer="lamb"),
    Case(tied, "stage=2,data=2+3", 2, "1f1b", zero=1, forced=11),
    Case(branches, "stage=3,data=1+2+1", 1, zero=1),
    Case(branches, "stage=2,data=1+2,model=2+1", 4, "interleaved", 2, optimizer="sgd"),
    Case(weighted, "stage=2,data=4+2", 6, "gpipe", zero=1, optimizer="sgd", forced=12),
]  # fmt: skip
"""Every schedule, every level of ZeRO, stages of equal and of different ranks.

Each of `forced` between equal stages is one that a fault was found with.
"""
every_case = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.ranks(c.ranks), id=str(c)) for c in CASES]
)


@every_case
def test_outputs_are_those_of_one_rank(case):
    (alone,), found = ran(case.alone), ran(case)
    tolerance = 2e-2 if case.precision == "float16" else 1e-9 if case.dtype == "float64" else 1e-5
    for rank in found:
        assert (rank.outputs, rank.evaluated) == (found[0].outputs, found[0].evaluated)
    for ours, theirs in zip(found[0].outputs, alone.outputs, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    for (rows, ours), (expected, theirs) in zip(found[0].evaluated, alone.evaluated, strict=True):
        assert rows == expected
        assert ours == pytest.approx(theirs, rel=tolerance)


@every_case
def test_memory_and_traffic_of_each_stage_are_predicted_exactly(case):
    for stage, found in of_stages(plan_of(case), ran(case)):
        arena, sent = predicted(stage)
        assert max(rank.peak for rank in found) == arena
        assert {max(step) for step in zip(*(rank.sent for rank in found), strict=True)} == {sent}


@pytest.mark.ranks(4)
def test_a_penalty_on_weights_sends_scalars_and_leaves_each_weight_to_one_stage():
    plan = plan_of(Case(penalised, "stage=3", 4, optimizer="sgd"))
    held = [name for stage in plan.stages() for name in {v.name for v in stage.variables}]
    weights = [name for name in held if name.startswith(("weight", "in"))]
    assert len(set(weights)) == len(weights)
    sent = [
        t.nbytes for s in plan.stages() for t in s.program("train").tasks
        if t.kind == "send" and t.phase % 2 == 0
    ]  # fmt: skip
    assert max(sent) == 8


def test_an_infinity_in_one_micro_batch_skips_the_step_on_all_stages():
    def build(batch):
        x = mf.tanh(nn.Dense(4, name="in")(mf.cast(batch["x"], "float32")))
        weight = mf.reshape(mf.cast(batch["weight"], "float32"), (-1, 1))
        x = nn.Dense(3, name="out")(mf.tanh(nn.Dense(4, name="middle")(x)))
        return {"loss": mf.mean(mf.square(x) * weight)}

    rows = {name: array.copy() for name, array in arrays(BATCH).items()}
    rows["weight"][3 * BATCH + 16] = np.inf  # in the third micro-batch of the fourth step
    made = job(build, BATCH, 4, mf.Adam(lr=0.01, clip=1.0), precision="float16")
    plan = compile_arrays("stage=2,data=2", made, rows)

    def work(session):
        found = []
        session.expect("train", range(6))
        for step in range(6):
            before = {n: v.copy() for n, v in session.variables.items() if n.endswith(".weight")}
            outputs = session.run("train", step)
            same = {np.array_equal(session.variables[n], v) for n, v in before.items()}
            found.append((outputs["skipped"], same, outputs[SCALE]))
        return found

    for found in on_ranks(plan, work, {"train": MemoryReader(rows, BATCH)}):
        assert [skipped for skipped, _, _ in found] == [0, 0, 0, 1, 0, 0]
        assert [same for _, same, _ in found] == [{step == 3} for step in range(6)]
        assert [scale for _, _, scale in found] == [2.0**16] * 4 + [2.0**15] * 2


@pytest.mark.host  # the fake device writes down every use
@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_steady_steps_of_stages_allocate_no_array(schedule):
    """Of activations of 256 KB each; NumPy has buffers of 32 KB, for each of the two ranks here."""

    def build(batch):
        x = mf.cast(batch["x"], "float32")
        for i in range(4):
            x = mf.tanh(nn.Dense(128, name=f"layer{i}")(x))
        return {"loss": mf.mean(mf.square(nn.Dense(1, name="out")(x)))}

    made, rows = job(build, 2048, 4), arrays(2048, 2)
    plan = compile_arrays("stage=2", made, rows, pipeline=Pipeline(schedule))
    window, warm = 10, 20

    def work(session):
        """Bytes that are kept after some steps, and the most that were in use, by window."""
        session.expect("train", range(warm + 3 * window))
        for step in range(warm):
            session.run("train", step)
        found = []
        for first in range(warm, warm + 3 * window, window):
            begin = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for step in range(first, first + window):
                session.run("train", step)
            now, peak = tracemalloc.get_traced_memory()
            found.append((now - begin, peak - begin))
        return found

    tracemalloc.start()
    try:
        for found in on_ranks(plan, work, {"train": MemoryReader(rows, 2048)}):
            grown, peaks = zip(*found, strict=True)
            assert min(grown) < 100 * window
            assert min(peaks) < 150_000
    finally:
        tracemalloc.stop()
