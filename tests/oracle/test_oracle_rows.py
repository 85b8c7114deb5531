"""Updates of rows against PyTorch's optimizers on sparse gradients, and NumPy where it has none."""

import numpy as np
import pytest
from table_jobs import BATCH, STEPS, TABLES, WIDTH, plan_of, rows, run, states

import mpiflow as mf

torch = pytest.importorskip("torch")
F = torch.nn.functional


def loss_of(w, step, sparse):
    batch = {n: torch.from_numpy(a[step * BATCH :][:BATCH]).clone() for n, a in rows().items()}

    def look_up(name, ids):
        return F.embedding(batch[ids].long(), w[f"{name}.weight"], sparse=sparse)

    parts = look_up("words", "words"), look_up("words", "more").sum(1), look_up("users", "user")
    x = torch.cat([parts[0].reshape(BATCH, 3 * WIDTH), *parts[1:]], 1)
    y = torch.tanh(x) @ w["out.weight"] + w["out.bias"]
    return ((y.reshape(-1) - batch["y"]) ** 2).mean()


def check(optimizer, make):
    """Ours with sparse=True, and theirs: `make` gives optimizers for (tables, others)."""
    start, outputs, found = run(plan_of(optimizer, sparse=True), work=states)
    w = {n: torch.from_numpy(start[n].copy()).requires_grad_()
         for n in (*TABLES, "out.weight", "out.bias")}  # fmt: skip
    optimizers = make([w[n] for n in TABLES], [w["out.weight"], w["out.bias"]])
    for step in range(STEPS):
        for one in optimizers:
            one.zero_grad()
        loss = loss_of(w, step, sparse=True)
        loss.backward()
        assert w["words.weight"].grad.is_sparse
        assert outputs[step]["loss"] == pytest.approx(loss.item(), rel=1e-10)
        with torch.sparse.check_sparse_tensor_invariants(True):
            for one in optimizers:
                one.step()
    for name, value in w.items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=1e-10, atol=1e-13)


def test_lazy_adam_is_sparse_adam():
    # PyTorch's form adds eps before the correction of v; of no eps it cannot tell.
    eps = 1e-300
    check(
        mf.Adam(0.05, betas=(0.8, 0.99), eps=eps),
        lambda tables, others: [
            torch.optim.SparseAdam(tables, lr=0.05, betas=(0.8, 0.99), eps=eps),
            torch.optim.Adam(others, lr=0.05, betas=(0.8, 0.99), eps=eps),
        ],
    )


def test_adagrad_by_rows():
    check(
        mf.Adagrad(0.1, start=0.1),
        lambda tables, others: [
            torch.optim.Adagrad([*tables, *others], lr=0.1, initial_accumulator_value=0.1)
        ],
    )


def test_sgd_by_rows():
    check(mf.SGD(0.1), lambda tables, others: [torch.optim.SGD([*tables, *others], lr=0.1)])


def lazily(step_of):
    """Weights of the tables after all steps, gradients of which are PyTorch's: a row at a time."""

    def train(start):
        w = {n: v.copy() for n, v in start.items() if n in (*TABLES, "out.weight", "out.bias")}
        kept = {n: [np.zeros_like(v), np.zeros_like(v)] for n, v in w.items()}
        for step in range(STEPS):
            tensors = {n: torch.from_numpy(v.copy()).requires_grad_() for n, v in w.items()}
            loss_of(tensors, step, sparse=False).backward()
            for name, tensor in tensors.items():
                g = tensor.grad.numpy()
                some = g.any(1) if name in TABLES else slice(None)
                parts = [w[name][some], g[some], *(k[some] for k in kept[name])]
                w[name][some], *new = step_of(step + 1, *parts)
                for k, value in zip(kept[name], new, strict=True):
                    k[some] = value
        return w

    return train


def adamw(step, w, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    u = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return w - 0.05 * (u + 0.1 * w), m, v


def momentum(step, w, g, m, unused):
    m = 0.9 * m + g + 0.1 * w
    return w - 0.05 * m, m, unused


@pytest.mark.parametrize(
    ("optimizer", "step_of"),
    [(mf.AdamW(0.05, weight_decay=0.1), adamw),
     (mf.SGD(0.05, momentum=0.9, weight_decay=0.1), momentum)],
)  # fmt: skip
def test_other_lazy_forms_are_those_of_a_row_at_a_time(optimizer, step_of):
    start, _, found = run(plan_of(optimizer, sparse=True), work=states)
    for name, value in lazily(step_of)(start).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-13, err_msg=name)
