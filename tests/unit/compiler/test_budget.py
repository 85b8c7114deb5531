"""What layouts hold, against the arenas of plans, and what is chosen under a limit on it."""

from dataclasses import replace
from functools import cache, reduce
from itertools import pairwise, product

import numpy as np
import pytest
from jobs import classifier, data_set

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler import fit
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.budget import budget
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.domains import Domains
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.fit import Attempt, Limit, TooLarge, held_bytes, within
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.signature import choose, pose
from mpiflow.compiler.trace import trace
from mpiflow.compiler.zero import split_variables
from mpiflow.errors import CompileError
from mpiflow.graph.mesh import parse_mesh

MACHINE = find_machine("cpu")


def wide(batch=8, **more):
    """Layers whose weights and states are most of what a rank holds."""
    job = classifier(batch, width=4000, hidden=None, last=None, optimizer=mf.Adam(lr=0.01))
    return replace(job, evaluate=None, **more)


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


def compiled(job, mesh, **target):
    """The plan of a job for 640 rows, and the layouts of its training step."""
    found = []
    plan = compile_job(
        job,
        {"train": data_set("train", 640, job.train.batch)},
        Target(parse_mesh(mesh), MACHINE, **target),
        observe=lambda step, _, made: found.append(made) if step == "signatures" else None,
    )
    return plan, found[-1]


@cache
def without_limit():
    """The plan of the wide layers on four ranks."""
    return compiled(wide(), "data=4")[0]


def arena(plan):
    return dict(plan.arenas)["host"]


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


# -- choosing under a limit -----------------------------------------------------------------------


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


def joint(sizes, terms):
    """The sum of tables, by scope, for every assignment: an array with a dim for each domain."""
    total = np.zeros(sizes)
    for scope, table in terms:
        total = total + table.reshape([n if i in scope else 1 for i, n in enumerate(sizes)])
    return total


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


# -- plans ----------------------------------------------------------------------------------------


def test_a_limit_that_does_not_bind_changes_nothing():
    free = without_limit()
    loose, _ = compiled(wide(), "data=4", memory=arena(free))
    assert loose.layouts.limit == arena(free)
    assert replace(loose, layouts=free.layouts) == free
    assert free.layouts.gap == 0.0


@pytest.mark.parametrize("share", [0.8, 0.45])
def test_the_arena_of_a_plan_keeps_the_limit_by_splitting_what_zero_splits(share):
    free = without_limit()
    limit = int(share * arena(free))
    plan, placed = compiled(wide(), "data=4", memory=limit)
    assert arena(plan) <= limit
    assert any(str(v.layout[0]) != "B" for v in plan.variables)
    assert placed.lower <= placed.seconds
    assert plan == compiled(wide(), "data=4", memory=limit)[0]


def test_less_memory_takes_no_less_time():
    free = without_limit()
    sizes = [int(share * arena(free)) for share in (0.7, 0.5, 0.35)]
    seconds = [compiled(wide(), "data=4", memory=size)[0].layouts.seconds for size in sizes]
    assert all(a <= b for a, b in pairwise(seconds))


def test_a_pinned_level_is_kept_under_a_limit():
    free, _ = compiled(wide(), "data=4", zero=0)
    with pytest.raises(CompileError, match="no --zero 0, so that weights too may be split"):
        compiled(wide(), "data=4", zero=0, memory=arena(free) // 2)


def test_what_does_not_fit_says_what_is_in_the_way_and_what_would_help():
    job = wide(640)
    with pytest.raises(CompileError) as caught:
        compiled(job, "data=2", memory=3 << 20)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("classifier does not fit 3.00 MiB a rank on mesh data=2: of all lay")
    assert lines[1].startswith("  most is held at ")
    assert "jobs.py:" in lines[1]
    assert any("S(0)  640x4000 float32  jobs.py:" in line for line in lines[2:10])
    assert "more that hold" in lines[-2]
    assert "what would help: --micro-batches " in lines[-1]
    assert "ranks, data=" in lines[-1]


# -- rounds ---------------------------------------------------------------------------------------


def attempts(sizes):
    """Plans by the limits that were aimed at; and those limits."""
    aimed, left = [], iter(sizes)

    def plan(limit):
        aimed.append(limit.nbytes)
        return Attempt(len(aimed), next(left), lambda: 0.0)

    return plan, aimed


def test_the_limit_is_tightened_by_what_the_arena_exceeds_it_at_the_pace_of_the_last_two():
    plan, aimed = attempts([110, 104, 100])
    free = Attempt(0, 200, lambda: 190.0)
    assert within(100, free, [Limit(0.0)], plan).made == 3
    assert aimed == [95.0, 85.0, pytest.approx(85 - 4 * 10 / 6)]


def test_plans_that_never_fit_are_refused():
    plan, aimed = attempts([101] * 9)
    with pytest.raises(CompileError, match="smallest needs 101 B; take more"):
        within(100, Attempt(0, 200, lambda: 200.0), [Limit(0.0), Limit(0.0, True)], plan)
    assert len(aimed) == 8


def test_what_fits_is_planned_once():
    plan, aimed = attempts([])
    assert within(100, Attempt(7, 100, lambda: 0.0), [Limit(0.0)], plan).made == 7
    assert aimed == []
