"""A convolutional network with every norm trains alike on any number of ranks, and is evaluated."""

from functools import cache

import numpy as np
import pytest
from jobs import CLASSES, FEATURES, compile_for, evaluate, on_ranks, train

import mpiflow as mf
from mpiflow import nn


def model(group):
    def build(batch):
        x = mf.reshape(mf.cast(batch["image"], "float64") / 16, (-1, 1, 2, FEATURES // 2))
        x = nn.Conv(6, (1, 3), padding="same", bias=False)(x)
        x = mf.relu(nn.BatchNorm(group=group)(x))
        x = nn.Conv(8, 2, padding=1, groups=2)(x)
        x = mf.relu(nn.GroupNorm(4)(x))
        x = nn.MaxPool(2, stride=1)(x)
        x = nn.MeanPool((1, 2), stride=1, padding=(0, 1))(x)
        x = nn.RMSNorm()(nn.LayerNorm()(nn.GlobalMeanPool()(x)))
        logits = nn.Dense(CLASSES)(x)
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    return build


@cache
def plan_of(mesh, group=None):
    job = mf.Job(
        "convnet",
        model(group),
        train=mf.Dataset("train-*.h5", batch=24),
        evaluate=mf.Dataset("test-*.h5", batch=24),
        optimizer=mf.SGD(lr=0.1, momentum=0.9),
    )
    return compile_for(mesh, job, test_rows=53)


def results(mesh, group=None):
    """Losses of 6 steps, and the losses of an evaluation that follows."""

    def work(session):
        losses = [outputs["loss"] for outputs in train(session, 6)]
        return np.array(losses + [values["loss"] for _, values in evaluate(session)])

    return on_ranks(plan_of(mesh, group), work)[0]


CASES = [
    pytest.param(mesh, group, marks=pytest.mark.ranks(int(mesh[-1])))
    for mesh, group in [
        ("data=2", None),
        ("data=5", None),
        ("data=3", 8),
        ("model=2", None),
        ("model=3", 8),
    ]
]


@pytest.mark.parametrize(("mesh", "group"), CASES)
def test_a_convnet_does_not_depend_on_the_ranks(mesh, group):
    alone = results("data=1", group)
    np.testing.assert_allclose(results(mesh, group), alone, rtol=1e-8)
    assert alone[5] < alone[0]


def test_groups_of_rows_are_a_choice_of_the_model():
    assert not np.allclose(results("data=1", 8), results("data=1"), rtol=1e-3)
