"""Whole small models, trained as the examples train theirs, against PyTorch from the same weights.

Optimizer, schedule and clipping are those of the examples. What a step makes of the weights goes
through the compiler and a session; PyTorch computes in float64.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import pytest
from jobs import EXAMPLES, MemoryReader, compile_arrays, on_ranks

import mpiflow as mf
from mpiflow.jobfile import load_job

torch = pytest.importorskip("torch")
import torch_models  # noqa: E402  (it needs PyTorch)

STEPS, BATCH, ROWS, WARMUP = 20, 7, 28, 5
GRADIENTS = {"moment1": "exp_avg", "momentum": "momentum_buffer"}
"""What an optimizer keeps of the gradients, by our name and by PyTorch's."""
RUNNING = (".running_mean", ".running_variance")


@dataclass(frozen=True)
class Run:
    """`first` is what is kept of the first gradients; it, `start` and `end` are arrays by name."""

    losses: list
    first: dict
    start: dict
    end: dict


@cache
def trained_like(example):
    job, _ = load_job(str(EXAMPLES / f"{example}.py"), (f"warmup={WARMUP}",))
    return job.optimizer.over(STEPS)


def start_of(name, index, shape):
    """A variable at the start, exact in float32."""
    fan = max(shape[0], prod(shape[1:])) if shape else 1
    value = np.random.default_rng([index, *shape]).standard_normal(shape) / np.sqrt(fan)
    if name.endswith((".scale", ".running_variance")):
        value = 1 + 0.1 * value
    return value.astype("float32").astype("float64")


def ours(make, dtype, mesh="data=1", steps=STEPS):
    """What mpiflow makes of a case."""
    case = make(dtype)
    arrays = case.draw(ROWS)
    job = mf.Job(
        "model",
        lambda batch: {"loss": case.model(batch)},
        train=mf.Dataset("rows-*.h5", batch=BATCH),
        optimizer=trained_like(case.example),
        epochs=STEPS * BATCH // ROWS,
    )
    plan = compile_arrays(mesh, job, arrays)
    kept = {v.name: v.name.rpartition(".") for v in plan.variables}
    weights = {name for name, _, what in kept.values() if what in GRADIENTS}
    start = {
        v.name: start_of(v.name, i, v.shape)
        for i, v in enumerate(plan.variables)
        if v.name in weights or v.name.endswith(RUNNING)
    }

    def work(session):
        boxes = session.boxes()
        for name, value in start.items():
            assert session.variables[name].dtype == dtype
            session.variables[name][...] = value[tuple(slice(*span) for span in boxes[name])]
        session.expect("train", range(steps))
        losses = [session.run("train", 0)["loss"]]
        first = {
            name: session.variables[full].copy()
            for full, (name, _, what) in kept.items()
            if what in GRADIENTS
        }
        losses += [session.run("train", step)["loss"] for step in range(1, steps)]
        return Run(losses, first, start, {name: session.variables[name].copy() for name in start})

    return on_ranks(plan, work, {"train": MemoryReader(arrays, BATCH)})[0]


@cache
def ours_in_float64(make):
    return ours(make, "float64")


def optimizer_like(optimizer, weights):
    """PyTorch's optimizer and schedule with the settings of ours."""
    few = 0.0 if mf.NO_DECAY in optimizer.groups else optimizer.weight_decay
    assert set(optimizer.groups) <= {mf.NO_DECAY}
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": few},
    ]
    settings = {"lr": optimizer.lr.lr}
    if isinstance(optimizer, mf.SGD):
        settings |= {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
    else:
        settings |= {"betas": optimizer.betas, "eps": optimizer.eps}
    made = getattr(torch.optim, type(optimizer).__name__)(groups, **settings)

    schedules, left = torch.optim.lr_scheduler, STEPS - WARMUP
    warm = schedules.LinearLR(made, 1 / WARMUP, total_iters=WARMUP - 1)
    decay = {
        mf.Cosine: lambda: schedules.CosineAnnealingLR(made, left),
        mf.LinearDecay: lambda: schedules.PolynomialLR(made, left, 1.0),
    }[type(optimizer.lr)]()
    assert (optimizer.lr.warmup, optimizer.lr.steps, optimizer.lr.end) == (WARMUP, STEPS, 0.0)
    return made, schedules.SequentialLR(made, [warm, decay], [WARMUP])


@cache
def theirs(make):
    """What PyTorch makes of a case in float64, from the same start."""
    case = make("float64")
    arrays = case.draw(ROWS)
    start = ours_in_float64(make).start
    values = {name: torch.tensor(value) for name, value in start.items()}
    weights = {n: v.requires_grad_() for n, v in values.items() if not n.endswith(RUNNING)}
    optimizer = trained_like(case.example)
    stepped, schedule = optimizer_like(optimizer, list(weights.values()))
    losses, first = [], {}
    for step in range(STEPS):
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % ROWS
        stepped.zero_grad()
        loss = case.theirs(values, **{name: torch.tensor(a[rows]) for name, a in arrays.items()})
        loss.backward()
        losses.append(loss.item())
        if optimizer.clip:
            torch.nn.utils.clip_grad_norm_(list(weights.values()), optimizer.clip)
        stepped.step()
        schedule.step()
        if not step:
            kept = {name: stepped.state[weight] for name, weight in weights.items()}
            first = {
                name: next(state[key] for key in GRADIENTS.values() if key in state).numpy().copy()
                for name, state in kept.items()
            }
    return Run(losses, first, start, {name: v.detach().numpy() for name, v in values.items()})


def close(found, wanted, tolerance):
    """Arrays by name agree, relative to the largest number of each."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * scale, err_msg=name)


cases = pytest.mark.parametrize("make", torch_models.CASES, ids=lambda make: make.__name__)
# SequentialLR calls its schedules in a way that PyTorch itself warns about.
quiet = pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")


@quiet
@cases
def test_twenty_steps_in_float64(make):
    found, wanted = ours_in_float64(make), theirs(make)
    assert np.isfinite(wanted.losses).all()
    close(found.first, wanted.first, 1e-8)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-8)
    close(found.end, wanted.end, 1e-8)


@quiet
@cases
def test_five_steps_in_float32(make):
    found, wanted = ours(make, "float32", steps=5), theirs(make)
    close(found.first, wanted.first, 1e-3)
    np.testing.assert_allclose(found.losses, wanted.losses[:5], rtol=1e-3)


@quiet
@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [torch_models.bert, torch_models.resnet])
def test_twenty_steps_on_two_ranks(make):
    found = ours(make, "float64", "data=2")
    np.testing.assert_allclose(found.losses, theirs(make).losses, rtol=1e-8)
