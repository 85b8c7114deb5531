"""What layouts hold is what arenas have, and choices within a limit are the best that there are."""

from functools import reduce
from itertools import product

import numpy as np
import pytest
from brute_force import joint
from jobs import data_set
from memory_jobs import MACHINE, arena, compiled, wide

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler import fit
from mpiflow.compiler.budget import budget
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.domains import Domains
from mpiflow.compiler.fit import Limit, TooLarge, held_bytes
from mpiflow.compiler.signature import choose, pose
from mpiflow.compiler.trace import trace
from mpiflow.compiler.zero import split_variables
from mpiflow.graph.mesh import parse_mesh


def blocks(batch=16):
    """Two transformer blocks on 6 numbers a row."""

    def model(batch):
        x = mf.cast(batch["image"], "float32")
        x = mf.reshape(nn.Dense(96, name="in")(x), (x.shape[0], 6, 16))
        for i in range(2):
            x = x + nn.MultiHeadAttention(16, 4, name=f"attention{i}")(
                nn.LayerNorm(name=f"a{i}")(x)
            )
            x = x + nn.FeedForward(64, name=f"forward{i}")(nn.LayerNorm(name=f"b{i}")(x))
        logits = nn.Dense(5, name="out")(mf.reshape(x, (x.shape[0], 96)))
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    train = mf.Dataset("x", batch=batch)
    return mf.Job("blocks", model, train=train, optimizer=mf.AdamW(lr=0.01, clip=1.0))


@pytest.mark.parametrize(
    ("job", "mesh", "more"),
    [
        (wide(64), "data=3", {}),
        (wide(64), "data=2,model=2", {}),
        (wide(256), "data=4", {"zero": 1}),
        (wide(256), "data=4", {"zero": 3}),
        (wide(64, micro_batches=4), "data=2", {}),
        (wide(512, micro_batches=4), "data=2", {"zero": 2}),
        (blocks(1024), "data=2,model=2", {}),
        (blocks(1024), "data=3", {}),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_layouts_hold_is_almost_what_the_arena_has(job, mesh, more):
    plan, placed = compiled(job, mesh, **more)
    zero = more.get("zero", 0)
    held = budget(placed.problem, scatter=zero > 1, again=zero > 2)
    assert 0.9 < held.peak(placed.choice) / arena(plan) < 1.02


def small_graph(seed, rows=12):
    """Up to four ops of random kinds and sizes, with weights; no updates."""
    draw = np.random.default_rng(seed)

    def model(batch):
        x = mf.cast(batch["image"], "float32")
        for i in range(int(draw.integers(1, 3))):
            match int(draw.integers(3)):
                case 0:
                    x = nn.Dense(int(draw.integers(2, 30)), bias=False, name=f"w{i}")(x)
                case 1:
                    x = mf.relu(x)
                case 2:
                    x = x * nn.variable(f"s{i}", (x.shape[1],), mf.nn.normal(1.0))
        return {"loss": mf.mean(x)}

    job = mf.Job("small", model, train=mf.Dataset("x", batch=rows), optimizer=mf.SGD(lr=0.1))
    return trace(job, data_set("train", 100, rows), name="train", rows=rows, training=True)


def everything(problem, held):
    """What every assignment costs, and what it holds at its peak."""
    sizes = [len(domain) for domain in problem.domains]
    total = joint(
        sizes, [*(((v,), c) for v, c in enumerate(problem.unary)), *problem.pairs.items()]
    )
    alive = [
        joint(sizes, [(h.scope, h.nbytes) for h in held.held if h.start <= at <= h.stop])
        for at in range(len(held.nodes))
    ]
    return total, reduce(np.maximum, alive)


@pytest.mark.parametrize("mesh", ["model=2", "data=3", "data=2,model=2"])
def test_choices_under_a_limit_are_those_that_trying_everything_finds(mesh):
    tried = limited = 0
    for seed in range(10):
        graph, mesh_ = small_graph(seed), parse_mesh(mesh)
        problem = pose(Domains(graph, mesh_, free=split_variables(graph, 3)), MACHINE)
        if np.prod([float(len(domain)) for domain in problem.domains]) > 1e5:
            continue
        total, peak = everything(problem, budget(problem, again=True))
        free = peak.flat[total.argmin()]
        for limit in {free, (free + peak.min()) // 2, peak.min()}:
            best = total[peak <= limit].min()
            found = choose(graph, mesh_, MACHINE, limit=Limit(float(limit), True, 3))
            assert found.seconds == pytest.approx(best)
            assert found.lower <= best * (1 + 1e-9)
            assert held_bytes(found) <= limit
            limited += best > total.min()
        with pytest.raises(TooLarge) as raised:
            choose(graph, mesh_, MACHINE, limit=Limit(float(peak.min() - 1), True, 3))
        assert peak.min() <= raised.value.least
        tried += 1
    assert tried > 3
    assert limited > 1


def test_no_level_of_zero_that_fits_is_predicted_faster():
    job, mesh = wide(), parse_mesh("data=2,model=2")
    graph = trace(job, data_set("train", 640, 8), name="train", rows=8, training=True)
    differentiate(graph, job.optimizer)
    needed = held_bytes(choose(graph, mesh, MACHINE))
    fitting = 0
    for share in (0.9, 0.65):
        found = choose(graph, mesh, MACHINE, limit=Limit(share * needed, free=True, zero=3))
        assert held_bytes(found) <= share * needed
        for level, whole in product(range(4), (False, True)):
            costs = fit._pinned(found.problem, level, whole)
            template = fit.minimise(costs, found.problem.pairs)
            held = budget(found.problem, again=True).peak(template.choice)
            fitting += held <= share * needed
            assert held > share * needed or found.seconds <= template.total * 1.001
    assert fitting > 2
