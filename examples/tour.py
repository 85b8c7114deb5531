"""The smallest job: fit a line to five points. docs/tour.md follows its plan by hand."""

import numpy as np

import mpiflow as mf
from mpiflow import nn


def rows():
    x = np.array([[1, 0], [0, 1], [1, 1], [2, 1], [1, 2]], np.float32)
    return {"x": x, "y": x @ np.array([3, -2], np.float32) + 1}


def job(batch: int = 5, lr: float = 0.1) -> mf.Job:
    def model(batch):
        prediction = nn.Dense(1, name="line")(batch["x"])
        error = mf.reshape(prediction, (-1,)) - batch["y"]
        return {"loss": mf.mean(mf.square(error))}

    data = mf.Dataset("tour/rows.h5", batch=batch)
    return mf.Job("tour", model, train=data, optimizer=mf.SGD(lr=lr), epochs=100)
