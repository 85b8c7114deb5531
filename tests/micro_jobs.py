"""Jobs that are cut into micro-batches, and the same rows for them in memory."""

from dataclasses import replace
from functools import cache

import numpy as np
from jobs import CLASSES, FEATURES, MemoryReader, compile_arrays, on_ranks, train

import mpiflow as mf
from mpiflow import nn
from mpiflow.graph.sbp import S

STEPS, LENGTH, WORDS = 6, 4, 13


@cache
def arrays(batch, steps=STEPS):
    """Features, labels of which some are -1, weights, and words of which some are 0."""
    draw = np.random.default_rng(batch)
    rows = batch * steps
    return {
        "x": draw.standard_normal((rows, FEATURES)),
        "label": np.where(draw.random(rows) < 0.3, -1, draw.integers(0, CLASSES, rows)),
        "weight": draw.random(rows),
        "ids": draw.integers(0, WORDS, (rows, LENGTH)),
    }


def masked(batch, dtype):
    """Dropout, and a mean over the rows with a label: their count takes a loop of its own."""
    x = mf.relu(nn.Dense(7, name="in", sbp={"model": S(1)})(mf.cast(batch["x"], dtype)))
    logits = nn.Dense(CLASSES, name="out")(mf.dropout(x, 0.2))
    return {"loss": mf.mean_cross_entropy(logits, batch["label"], ignore=-1)}


def job(model, batch, micro_batches, optimizer=None, **more):
    """A job of a model(batch)."""
    return mf.Job(
        "cut",
        model,
        train=mf.Dataset("rows-*.h5", batch=batch),
        optimizer=optimizer or mf.SGD(lr=0.1, momentum=0.9),
        micro_batches=micro_batches,
        **more,
    )


@cache
def masked_plan(mesh, batch=24, micro_batches=4, dtype="float32", optimizer=None):
    made = job(lambda rows: masked(rows, dtype), batch, micro_batches, optimizer)
    return compile_arrays(mesh, made, arrays(batch))


def run(plan, work=train, steps=STEPS, rows=None):
    """What `work(session, steps)` gives on each rank."""
    batch = plan.dataset("train").batch
    readers = {"train": MemoryReader(rows or arrays(batch), batch)}
    return on_ranks(plan, lambda session: work(session, steps), readers)


def with_train(plan, change, **changes):
    """The plan with its training program as `change` makes it."""
    program = plan.program("train")
    new = replace(change(program) if change else program, **changes)
    return replace(plan, programs=tuple(new if p is program else p for p in plan.programs))
