"""Twenty steps of every optimizer and schedule against PyTorch; LAMB and LARS against NumPy."""

from math import sqrt

import numpy as np
import pytest
from jobs import on_ranks, train
from optim_jobs import SHAPES, STEPS, batches, regression_plan

import mpiflow as mf

torch = pytest.importorskip("torch")
SCHEDULES = torch.optim.lr_scheduler


def ours(optimizer):
    """(weights at the start, losses, weights at the end)."""
    plan = regression_plan(optimizer)

    def work(session):
        start = {name: session.variables[name].copy() for name in SHAPES}
        outputs = train(session, STEPS)
        return start, outputs, {name: value.copy() for name, value in session.variables.items()}

    return on_ranks(plan, work)[0]


def loss_of(w, x, y):
    hidden = torch.tanh(torch.from_numpy(x) @ w["in.weight"] + w["in.bias"])
    output = (hidden @ w["out.weight"]).reshape(-1) * w["gain"]
    return ((output - torch.from_numpy(y)) ** 2).mean()


def theirs(start, make, *, scheduler=None, clip=0.0, ema=0.0):
    """(losses, norms of gradients, weights, averages) of PyTorch from the same start."""
    w = {n: torch.from_numpy(v.copy()).requires_grad_() for n, v in start.items()}
    average = {n: v.copy() for n, v in start.items()}
    optimizer = make(w)
    schedule = scheduler(optimizer) if scheduler else None
    losses, norms = [], []
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(w, x, y)
        loss.backward()
        losses.append(loss.item())
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(w.values(), clip).item())
        optimizer.step()
        if schedule:
            schedule.step()
        for name, value in w.items():
            average[name] = ema * average[name] + (1 - ema) * value.detach().numpy()
    return losses, norms, {n: v.detach().numpy() for n, v in w.items()}, average


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-13)


def check(optimizer, make, **settings):
    start, outputs, after = ours(optimizer)
    losses, norms, weights, average = theirs(start, make, **settings)
    close([o["loss"] for o in outputs], losses)
    assert losses[-1] < losses[0]
    for name, value in weights.items():
        close(after[name], value)
        if settings.get("ema"):
            close(after[f"{name}.average"], average[name])
    if settings.get("clip"):
        close([o["gradient_norm"] for o in outputs], norms)
        assert min(norms) > 0
    return norms


def plain(kind, **settings):
    return lambda w: getattr(torch.optim, kind)(w.values(), **settings)


OPTIMIZERS = [
    (mf.SGD(0.05), plain("SGD", lr=0.05)),
    (mf.SGD(0.02, 0.9), plain("SGD", lr=0.02, momentum=0.9)),
    (mf.SGD(0.02, momentum=0.9, weight_decay=0.1, nesterov=True),
     plain("SGD", lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True)),
    (mf.Adam(0.05), plain("Adam", lr=0.05)),
    (mf.Adam(0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
     plain("Adam", lr=0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)),
    (mf.AdamW(0.05), plain("AdamW", lr=0.05)),
    (mf.AdamW(0.05, weight_decay=0.3), plain("AdamW", lr=0.05, weight_decay=0.3)),
    (mf.Adagrad(0.2), plain("Adagrad", lr=0.2)),
    (mf.Adagrad(0.2, weight_decay=0.1, start=0.5, eps=1e-6),
     plain("Adagrad", lr=0.2, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-6)),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "make"), OPTIMIZERS, ids=lambda x: "" if callable(x) else x)
def test_an_optimizer_takes_the_steps_of_pytorch(optimizer, make):
    check(optimizer, make)


@pytest.mark.parametrize("limit", [0.5, 3.0])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_clipping_bounds_the_norm_over_all_gradients(kind, limit):
    norms = check(getattr(mf, kind)(0.05, clip=limit), plain(kind, lr=0.05), clip=limit)
    assert max(norms) > limit


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_averages_follow_the_weights(kind):
    check(getattr(mf, kind)(0.05, ema=0.8), plain(kind, lr=0.05), ema=0.8)


def test_groups_have_their_own_rate_and_decay():
    def make(w):
        few = [w["in.bias"], w["gain"]]
        return torch.optim.AdamW([
            {"params": [w["out.weight"]], "weight_decay": 0.5, "lr": 0.01},
            {"params": few, "weight_decay": 0.0, "lr": 0.1},
            {"params": [w["in.weight"]], "weight_decay": 0.2, "lr": 0.1},
        ])  # fmt: skip

    groups = (mf.Group("out.*", weight_decay=0.5, lr_scale=0.1), mf.NO_DECAY)
    check(mf.AdamW(0.1, weight_decay=0.2, groups=groups), make)


def warm(steps, then):
    """A linear warm-up, then what `then` makes for the optimizer."""

    def make(optimizer):
        first = SCHEDULES.LinearLR(optimizer, 1 / steps, total_iters=steps - 1)
        return SCHEDULES.SequentialLR(optimizer, [first, then(optimizer)], [steps])

    return make


RATE = 0.05
DECAYS = [
    (mf.Constant(RATE), lambda o: SCHEDULES.ConstantLR(o, 1.0)),
    (mf.Constant(RATE, warmup=6), lambda o: SCHEDULES.LinearLR(o, 1 / 6, total_iters=5)),
    (mf.StepDecay(RATE, 4, 0.7), lambda o: SCHEDULES.StepLR(o, 4, 0.7)),
    (mf.StepDecay(RATE, 8, 0.7, warmup=6),
     lambda o: SCHEDULES.ChainedScheduler(
         [SCHEDULES.LinearLR(o, 1 / 6, total_iters=5), SCHEDULES.StepLR(o, 8, 0.7)])),
    (mf.Cosine(RATE, 20), lambda o: SCHEDULES.CosineAnnealingLR(o, 20)),
    (mf.Cosine(RATE, end=0.01, warmup=6),  # the run has 20 steps, 14 of them after the warm-up
     warm(6, lambda o: SCHEDULES.CosineAnnealingLR(o, 14, 0.01))),
    (mf.LinearDecay(RATE, 15), lambda o: SCHEDULES.PolynomialLR(o, 15, 1.0)),
    (mf.LinearDecay(RATE, 15, end=0.02, warmup=5),
     warm(5, lambda o: SCHEDULES.LinearLR(o, 1.0, 0.4, total_iters=10))),
    (mf.Polynomial(RATE, 15, 2.5), lambda o: SCHEDULES.PolynomialLR(o, 15, 2.5)),
    (mf.Polynomial(RATE, end=0.01, warmup=5),  # 0.01 + 0.04 left^2, 15 steps after the warm-up
     warm(5, lambda o: SCHEDULES.LambdaLR(o, lambda t: 0.2 + 0.8 * (1 - t / 15) ** 2))),
    (mf.InverseSqrt(RATE, 5),
     lambda o: SCHEDULES.LambdaLR(o, lambda t: min((t + 1) / 5, sqrt(5 / (t + 1))))),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize(("schedule", "scheduler"), DECAYS, ids=lambda x: "" if callable(x) else x)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_schedule_gives_the_rates_of_pytorch(kind, schedule, scheduler):
    check(getattr(mf, kind)(schedule), plain(kind, lr=RATE), scheduler=scheduler)


def norm(x):
    return sqrt((x**2).sum())


def layerwise(start, update, clip):
    """The losses and weights where `update(name, step, w, g)` gives the next weight."""
    w = {n: v.copy() for n, v in start.items()}
    losses = []
    for step, (x, y) in enumerate(batches(STEPS), 1):
        tensors = {n: torch.from_numpy(v).requires_grad_() for n, v in w.items()}
        loss = loss_of(tensors, x, y)
        loss.backward()
        losses.append(loss.item())
        gradients = {n: t.grad.numpy() for n, t in tensors.items()}
        total = sqrt(sum(norm(g) ** 2 for g in gradients.values()))
        factor = min(1.0, clip / (total + 1e-6)) if clip else 1.0
        w = {n: np.asarray(update(n, step, w[n], gradients[n] * factor)) for n in w}
    return losses, w


def check_layerwise(optimizer, update):
    start, outputs, after = ours(optimizer)
    losses, weights = layerwise(start, update, optimizer.clip)
    close([o["loss"] for o in outputs], losses)
    assert losses[-1] < losses[0]
    for name, value in weights.items():
        close(after[name], value)


def lars(rate_of, momentum, trust, decay, plain_names=()):
    kept = {}

    def update(name, step, w, g):
        beta = 0.0 if name in plain_names else decay
        rate = rate_of(step)
        if name not in plain_names:
            rate = rate * trust * norm(w) / (norm(g) + beta * norm(w))
        kept[name] = momentum * kept.get(name, 0.0) + rate * (g + beta * w)
        return w - kept[name]

    return update


def lamb(rate_of, decay, plain_names=(), betas=(0.9, 0.999), eps=1e-6):
    m, v = {}, {}

    def update(name, step, w, g):
        m[name] = betas[0] * m.get(name, 0.0) + (1 - betas[0]) * g
        v[name] = betas[1] * v.get(name, 0.0) + (1 - betas[1]) * g * g
        first, second = (x[name] / (1 - b**step) for x, b in zip((m, v), betas, strict=True))
        direction = first / (np.sqrt(second) + eps)
        lr = rate_of(step)
        if name in plain_names:
            return w - lr * direction
        direction = direction + decay * w
        start = norm(w) * norm(direction) == 0
        return w - lr * (1.0 if start else norm(w) / norm(direction)) * direction

    return update


FEW = ("in.bias", "gain")
RATES = {
    "constant": (lambda lr: lr, lambda lr: lambda step: lr),
    "linear": (lambda lr: mf.LinearDecay(lr, 25), lambda lr: lambda step: lr * (26 - step) / 25),
}
"""Ours and theirs, where the first step is 1."""


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("groups", [(), (mf.NO_DECAY,)], ids=["all", "matrices"])
def test_lars_is_that_of_its_paper(groups, clip, rate):
    ours, theirs = RATES[rate]
    optimizer = mf.LARS(ours(0.1), trust=0.2, weight_decay=0.1, groups=groups, clip=clip)
    check_layerwise(optimizer, lars(theirs(0.1), 0.9, 0.2, 0.1, FEW if groups else ()))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("groups", [(), (mf.NO_DECAY,)], ids=["all", "matrices"])
def test_lamb_is_that_of_its_paper(groups, clip, rate):
    ours, theirs = RATES[rate]
    optimizer = mf.LAMB(ours(0.05), weight_decay=0.1, groups=groups, clip=clip)
    check_layerwise(optimizer, lamb(theirs(0.05), 0.1, FEW if groups else ()))
