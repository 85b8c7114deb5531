"""A small regression in float64 on rows of tables, for tests of updates by rows."""

import numpy as np
from jobs import MemoryReader, on_ranks, target, train

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.driver import compile_job
from mpiflow.plan.records import DataSet, Field

BATCH, STEPS, WORDS, USERS, WIDTH = 6, 8, 41, 23, 4
TABLES = {"words.weight": WORDS, "users.weight": USERS}


def rows(words=WORDS, users=USERS, steps=STEPS, seed=0):
    """Three words and a user a row, some of them often, and a number."""
    draw = np.random.default_rng(seed)
    count = BATCH * steps
    return {
        "words": (words * draw.random((count, 3)) ** 3).astype(np.int32),
        "more": (words * draw.random((count, 2))).astype(np.int64),
        "user": (users * draw.random(count) ** 2).astype(np.int64),
        "y": draw.standard_normal(count),
    }


def regression(optimizer, *, sparse=None, split=None, axis="model", tied=False, dtype="float64",
               sizes=TABLES, width=WIDTH, **job):  # fmt: skip
    """A table that is looked up twice, another once, and a dense layer on top."""
    sbp = {axis: split} if split else None
    words, users = (
        nn.Embedding(rows, width, name=name.partition(".")[0], dtype=dtype, sbp=sbp, sparse=sparse,
                     init=nn.uniform(1.0))
        for name, rows in sizes.items()
    )  # fmt: skip

    def model(batch):
        x = mf.reshape(words(batch["words"]), (BATCH, 3 * width))
        x = mf.concat([x, mf.reduce_sum(words(batch["more"]), 1), users(batch["user"])])
        y = nn.Dense(1, name="out")(mf.tanh(x))
        loss = mf.mean(mf.square(mf.reshape(y, (-1,)) - mf.cast(batch["y"], dtype)))
        if tied:
            loss = loss + mf.mean(words.as_logits(users(batch["user"]))) * 0.1
        return {"loss": loss}

    train_data = mf.Dataset("rows-*.h5", batch=BATCH)
    return mf.Job("tables", model, train=train_data, optimizer=optimizer, **job)


def plan_of(optimizer, mesh="data=1", *, arrays=None, **job):
    arrays = arrays or rows()
    fields = tuple(Field(n, a.shape[1:], a.dtype.name) for n, a in arrays.items())
    data = DataSet("train", "rows-*.h5", fields, (), len(arrays["y"]), BATCH, False, 0, 4, 4, "")
    return compile_job(regression(optimizer, **job), {"train": data}, target(mesh))


def run(plan, steps=STEPS, arrays=None, work=train):
    """What `work(session, steps)` gives on the first rank."""
    readers = {"train": MemoryReader(arrays or rows(), BATCH)}
    return on_ranks(plan, lambda session: work(session, steps), readers)[0]


def whole(session, name):
    """A variable from what the rank holds; only of ranks that hold all of it."""
    return session.variables[name].copy()


def states(session, steps):
    """(variables before, outputs, variables after)."""
    before = {name: value.copy() for name, value in session.variables.items()}
    outputs = train(session, steps)
    return before, outputs, {name: value.copy() for name, value in session.variables.items()}


def ops(plan):
    """How many tasks of a training step there are of each op."""
    found = {}
    for task in plan.program("train").tasks:
        found[task.op] = found.get(task.op, 0) + 1
    return found
