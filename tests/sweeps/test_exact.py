"""Layouts are the best that there are: on random graphs, equal to what trying everything finds."""

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np
import pytest

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler import elimination
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.domains import Domains
from mpiflow.compiler.elimination import minimise
from mpiflow.compiler.machine import Link, find_machine
from mpiflow.compiler.signature import choose, pose
from mpiflow.compiler.trace import trace
from mpiflow.graph.mesh import parse_mesh
from mpiflow.plan.records import DataSet, Field

FORWARD = ("data=2", "model=3", "data=2,model=2", "a=2,b=3", "data=3,model=2")
TRAINING = ("data=3", "model=2", "model=3")
MACHINES = [
    find_machine("cpu"),
    # Messages nearly free, and bytes dear: such prices make small tensors worth splitting.
    replace(find_machine("cpu"), inner=Link(1e-9, 1e12), outer=Link(1e-9, 1e12), launch=1e-9),
    replace(find_machine("cpu"), inner=Link(1e-9, 1e7), outer=Link(1e-9, 1e7), launch=1e-9),
]
MOST = 500_000
"""Combinations that are tried."""

UNARY = (
    mf.relu, mf.tanh, mf.exp, mf.gelu, mf.softmax, mf.stop_gradient,
    lambda x: x * 2.0,
    lambda x: mf.permute(x, (1, 0)),
    lambda x: mf.reshape(x, (x.shape[0] * x.shape[1], 1)),
    lambda x: mf.reduce_sum(x, dim=1, keep=True),
    lambda x: mf.reduce_max(x, dim=0, keep=True),
    lambda x: mf.concat([x, x], dim=1),
    lambda x: mf.cut(x, 0, 1, dim=0),
    lambda x: x @ mf.permute(x, (1, 0)),
)  # fmt: skip
BINARY = (mf.Tensor.__add__, mf.Tensor.__mul__, mf.Tensor.__sub__)


def random_model(draw, ops):
    """A function of a batch that makes about so many nodes, and the mean of the last."""

    def model(batch):
        made = [batch["x"]]
        while len(made) <= ops:
            x = made[draw.integers(len(made))]
            alike = [y for y in made if y.shape == x.shape]
            match draw.integers(5):
                case 0:
                    made.append(BINARY[draw.integers(3)](x, alike[draw.integers(len(alike))]))
                case 1 if len(x.shape) == 2:
                    made.append(nn.Dense(int(draw.integers(2, 6)), name=f"w{len(made)}")(x))
                case _:
                    made.append(UNARY[draw.integers(len(UNARY))](x))
        return {"loss": mf.mean(made[-1])}

    return model


def random_linear(draw):
    """A model with so few nodes that its training graph can be tried too."""

    def model(batch):
        weight = nn.variable("w", (batch["x"].shape[1],), nn.normal(1.0))
        y = batch["x"] * weight
        return {"loss": mf.mean(y if draw.random() < 0.5 else mf.tanh(y))}

    return model


def random_problem(seed):
    """The problem of the layouts of a random graph."""
    draw = np.random.default_rng(seed)
    training = seed % 4 == 0
    rows, width = (int(n) for n in draw.integers(3, 8, 2))
    model = random_linear(draw) if training else random_model(draw, int(draw.integers(1, 7)))
    data = DataSet(
        "train", "x", (Field("x", (width,), "float32"),), (), rows, rows, False, 0, 1, 1, ""
    )
    job = mf.Job("random", model, train=mf.Dataset("x", batch=rows), optimizer=mf.SGD(lr=0.1))
    graph = trace(job, data, name="train", rows=rows, training=training)
    if training:
        differentiate(graph, job.optimizer)
    meshes = TRAINING if training else FORWARD
    mesh = parse_mesh(meshes[draw.integers(len(meshes))])
    return pose(Domains(graph, mesh), MACHINES[draw.integers(len(MACHINES))])


def all_totals(problem):
    """What every combination of choices costs, a dim for each domain."""
    sizes = [len(domain) for domain in problem.domains]
    total = np.zeros(sizes)
    for i, cost in enumerate(problem.unary):
        total += cost.reshape([n if v == i else 1 for v, n in enumerate(sizes)])
    for pair, table in problem.pairs.items():
        total += table.reshape([n if v in pair else 1 for v, n in enumerate(sizes)])
    return total


def problems(count):
    """So many problems that are small enough to try everything."""
    seed = found = 0
    while found < count:
        problem = random_problem(seed)
        seed += 1
        if prod(len(domain) for domain in problem.domains) <= MOST:
            found += 1
            yield problem


def test_layouts_are_as_cheap_as_the_best_of_all_and_bounds_are_no_higher(monkeypatch):
    nodes = updates = splits = 0
    for problem in problems(140):
        totals = all_totals(problem)
        best = totals.min()
        with monkeypatch.context() as narrow:
            found = minimise(problem.unary, problem.pairs)
            narrow.setattr(elimination, "_DIRECT", 0)  # by way of bounds
            bounded = minimise(problem.unary, problem.pairs)
        for solution in (found, bounded):
            assert totals[solution.choice] == pytest.approx(best, rel=1e-9)
            assert solution.total == pytest.approx(best, rel=1e-9)
            assert solution.lower <= best * (1 + 1e-9)
        nodes = max(nodes, len(problem.nodes))
        updates += bool(problem.graph.updates)
        splits += any(found.choice[problem.first :])
    assert nodes >= 8
    assert updates >= 10
    assert splits >= 20


DIGEST = """
import sys
sys.path[:0] = sys.argv[1:]
from test_exact import digest
print(digest())
"""


def digest():
    """Of the layouts of some graphs, as text."""
    chosen = []
    for seed in range(12):
        problem = random_problem(seed)
        again = choose(problem.graph, problem.choices.mesh, problem.machine)
        chosen.append(str(again))
    return sha256("\n".join(chosen).encode()).hexdigest()


def test_layouts_do_not_depend_on_how_python_hashes():
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", DIGEST, str(Path(__file__).parent)],
        check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONHASHSEED": other},
    )  # fmt: skip
    assert done.stdout.strip() == digest()
