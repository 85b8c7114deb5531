"""A small regression in float64 for tests of optimizers, with matrices, a vector and a scalar."""

import numpy as np
from jobs import FEATURES, compile_for, data

import mpiflow as mf
from mpiflow import nn

BATCH, WIDTH, STEPS = 9, 5, 20
ROWS = BATCH * STEPS
SHAPES = {
    "in.weight": (FEATURES, WIDTH), "in.bias": (WIDTH,), "out.weight": (WIDTH, 1), "gain": (),
}  # fmt: skip


def regression(optimizer, *, epochs=1, evaluate=False, split=None):
    """mean (gain (tanh(x W + b) w) - y)^2; the first matrix may be split over an axis `model`."""

    def variable(name, start=0.5):
        init = nn.constant(start) if not SHAPES[name] else nn.uniform(start)
        sbp = {"model": split} if split and name == "in.weight" else None
        return nn.variable(name, SHAPES[name], init, dtype="float64", sbp=sbp)

    def model(batch):
        x = mf.cast(batch["image"], "float64") / 16
        hidden = mf.tanh(x @ variable("in.weight") + variable("in.bias"))
        y = mf.reshape(hidden @ variable("out.weight"), (-1,)) * variable("gain", 1.5)
        return {"loss": mf.mean(mf.square(y - mf.cast(batch["label"], "float64")))}

    train = mf.Dataset("train-*.h5", batch=BATCH)
    test = mf.Dataset("test-*.h5", batch=BATCH) if evaluate else None
    return mf.Job(
        "regression", model, train=train, evaluate=test, optimizer=optimizer, epochs=epochs
    )


def regression_plan(optimizer, mesh="data=1", **job):
    return compile_for(mesh, regression(optimizer, **job), rows=ROWS)


def batches(steps):
    """What the first steps read: (inputs, targets) each."""
    rows = data(ROWS)
    for step in range(steps):
        chosen = np.arange(step * BATCH, (step + 1) * BATCH) % ROWS
        yield rows["image"][chosen] / 16, rows["label"][chosen].astype(float)
