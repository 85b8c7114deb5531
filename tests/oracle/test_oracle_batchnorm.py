"""A BatchNorm layer that is called twice in a step: training, then evaluations, beside PyTorch."""

import numpy as np
import pytest
from jobs import CLASSES, TEST_ROWS, compile_for, data, evaluate, on_ranks, train

import mpiflow as mf
from mpiflow import nn

torch = pytest.importorskip("torch")

BATCH, STEPS, WIDTH, ROWS, MOMENTUM = 9, 6, 5, 54, 0.3
LAYERS = ("first", "second", "out")


def model(batch):
    norm = nn.BatchNorm(momentum=MOMENTUM, name="norm")
    x = mf.cast(batch["image"], "float64") / 16
    x = mf.tanh(norm(nn.Dense(WIDTH, name="first")(x)))
    x = mf.tanh(norm(nn.Dense(WIDTH, name="second")(x)))
    logits = nn.Dense(CLASSES, name="out")(x)
    return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}


def ours(mesh):
    """(variables at the start, losses, mean loss of an evaluation, variables at the end)."""
    job = mf.Job(
        "norms",
        model,
        train=mf.Dataset("train-*.h5", batch=BATCH),
        evaluate=mf.Dataset("test-*.h5", batch=BATCH),
        optimizer=mf.SGD(lr=0.3, momentum=0.9),
    )

    def work(session):
        start = {name: value.copy() for name, value in session.variables.items()}
        losses = [outputs["loss"] for outputs in train(session, STEPS)]
        found = sum(rows * outputs["loss"] for rows, outputs in evaluate(session)) / TEST_ROWS
        return start, losses, found, dict(session.variables)

    return on_ranks(compile_for(mesh, job, rows=ROWS), work)[0]


class Network(torch.nn.Module):
    def __init__(self, start):
        super().__init__()
        for name in LAYERS:
            weight = torch.tensor(start[f"{name}.weight"].T)
            layer = torch.nn.Linear(*weight.T.shape, dtype=torch.float64)
            layer.weight.data, layer.bias.data = weight, torch.tensor(start[f"{name}.bias"])
            setattr(self, name, layer)
        self.norm = torch.nn.BatchNorm1d(WIDTH, momentum=MOMENTUM, dtype=torch.float64)

    def loss(self, image, label):
        x = torch.tanh(self.norm(self.first(torch.tensor(image / 16))))
        x = torch.tanh(self.norm(self.second(x)))
        return torch.nn.functional.cross_entropy(self.out(x), torch.tensor(label))


def theirs(start):
    """(losses, the loss in the mode of evaluation, running mean, running variance)."""
    network, rows, test = Network(start), data(ROWS), data(TEST_ROWS, seed=1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        loss = network.loss(rows["image"][part], rows["label"][part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = network.eval().loss(test["image"], test["label"]).item()
    return losses, found, network.norm.running_mean, network.norm.running_var


@pytest.mark.parametrize(
    "mesh", ["data=1", pytest.param("data=2", marks=pytest.mark.ranks(2)),
             pytest.param("model=2", marks=pytest.mark.ranks(2))],
)  # fmt: skip
def test_each_call_moves_the_running_statistics_that_evaluations_use(mesh):
    start, losses, found, end = ours(mesh)
    expected_losses, expected, mean, variance = theirs(start)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-8)
    assert found == pytest.approx(expected, rel=1e-8)
    np.testing.assert_allclose(end["norm.running_mean"], mean, rtol=1e-8)
    np.testing.assert_allclose(end["norm.running_variance"], variance, rtol=1e-8)
