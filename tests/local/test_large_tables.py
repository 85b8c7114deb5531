"""Classes, vocabularies and tables too large to travel: what is chosen for them, and its losses."""

import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from jobs import EXAMPLES, MemoryReader, compile_arrays, on_ranks, target, train

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler import signature
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import B, S
from mpiflow.jobfile import load_job
from mpiflow.models.faces import Faces
from mpiflow.plan.records import DataSet, Field
from mpiflow.plan.rows import FETCH, ROW_KINDS, SEND
from mpiflow.plan.slice import RankPlan
from mpiflow.plan.traffic import bytes_sent, sent_by

sys.path.insert(0, str(EXAMPLES))
import generated

MESHES = [
    pytest.param(mesh, marks=pytest.mark.ranks(parse_mesh(mesh).size))
    for mesh in ("model=4", "data=2,model=2", "data=4", "model=3")
]


def planned(job, mesh, machine="cpu"):
    """The plan of a job's training, whose fields are declared."""
    fields = tuple(Field(n, shape, dtype) for n, (shape, dtype) in job.train.fields.items())
    batch, rows = job.train.batch, job.train.rows or 100 * job.train.batch
    data = DataSet("train", "x", fields, (), rows, batch, False, 0, 1, 1, "")
    wanted = target(mesh, find_machine(machine))
    return compile_job(replace(job, evaluate=None), {"train": data}, wanted)


def example(name, *settings):
    return load_job(str(EXAMPLES / f"{name}.py"), settings)[0]


def splits_rows(plan, name):
    """Whether all ranks split the rows of a variable and of what is kept beside it."""
    layouts = [v.layout for v in plan.variables if v.name.startswith(name)]
    assert layouts
    return all(isinstance(sbp, S) and sbp.dim == 0 for layout in layouts for sbp in layout)


def travels(plan, size):
    """The collectives of a step that move a tensor with a dim of this size."""
    program = plan.program("train")
    tensors = plan.tensors(program)
    return [
        task.name
        for task in program.tasks
        if task.kind == "collective" and task.op not in ROW_KINDS
        for name in task.inputs
        if size in tensors[name].shape
    ]


def losses(plan, arrays, steps):
    readers = {"train": MemoryReader(arrays, plan.dataset("train").batch)}
    found = on_ranks(plan, lambda session: [o["loss"] for o in train(session, steps)], readers)
    assert all(other == found[0] for other in found)
    return found[0]


# Classes


def faces(classes, *, sampled=1.0, batch=16):
    """A layer, and the loss over classes of faces."""
    network = Faces(None, classes, 8, "arc", 0.3, 16.0, sampled=sampled)

    def model(batch):
        features = mf.normalise(nn.Dense(8, name="features")(batch["x"]))
        cosines, column = network.compared(features, batch["label"])
        return {"loss": network.loss(cosines, column)}

    fields = {"x": ((6,), "float64"), "label": ((), "int32")}
    data = mf.Dataset("x", batch=batch, fields=fields)
    return mf.Job("faces", model, train=data, optimizer=mf.SGD(0.05, momentum=0.9))


@pytest.mark.parametrize("mesh", MESHES[:3])
@pytest.mark.parametrize(("sampled", "fewer"), [(1.0, 96_000), (0.25, 960_000)])
def test_classes_are_split_over_all_ranks_and_bytes_do_not_depend_on_how_many_there_are(
    mesh, sampled, fewer
):
    sent = []
    for classes in (fewer, 10 * fewer):
        plan = planned(faces(classes, sampled=sampled), mesh)
        assert splits_rows(plan, "classes.weight")
        assert travels(plan, classes) == []
        sent.append(bytes_sent(plan, plan.program("train")))
    # Nothing that has classes is in it; what is worth one message with others depends on seconds.
    assert sent[1] == pytest.approx(sent[0], rel=0.1)


@pytest.mark.ranks(4)
def test_a_million_identities_of_the_example_are_split_where_only_the_ranks_are_named():
    plan = planned(example("faces", "classes=1000000"), "data=4")
    assert splits_rows(plan, "classes.weight")
    assert travels(plan, 1_000_000) == []


def test_classes_that_are_fewer_than_the_batch_stay_whole():
    plan = planned(faces(12), "data=4")
    assert all(v.layout == (B,) for v in plan.variables)


@cache
def points(classes, rows=64):
    draw = np.random.default_rng(0)
    label = draw.integers(0, classes, rows).astype(np.int32)
    return {"x": draw.standard_normal((rows, 6)), "label": label}


@cache
def alone(classes, sampled):
    job = faces(classes, sampled=sampled, batch=13)
    return losses(planned(job, "data=1"), points(classes), 3)


@pytest.mark.parametrize("mesh", MESHES[1::2])
@pytest.mark.parametrize(("classes", "sampled"), [(30_011, 1.0), (48_000, 0.25)])
def test_losses_over_split_classes_are_those_of_one_rank(mesh, classes, sampled):
    job = faces(classes, sampled=sampled, batch=13)
    plan = planned(job, mesh)
    weight = next(v for v in plan.variables if v.name == "classes.weight")
    assert all(isinstance(sbp, S) for sbp in weight.layout)
    found = losses(plan, points(classes), 3)
    np.testing.assert_allclose(found, alone(classes, sampled), rtol=1e-8)


# Vocabularies


@pytest.mark.parametrize("mesh", MESHES[:3])
def test_a_vocabulary_of_a_million_is_split_and_its_logits_do_not_move(mesh):
    job = example("bert", "vocabulary=1000000", "size=tiny")
    plan = planned(replace(job, train=replace(job.train, make=None)), mesh)
    for name in ("words.weight", "masked.bias"):
        assert splits_rows(plan, name)
    assert travels(plan, 1_000_000) == []
    # Layers are data-parallel: what they make of a batch is split by its rows.
    program = plan.program("train")
    activations = [r for r in program.registers if r.shape == (64, 33, 64)]
    assert activations
    assert any(all(sbp == S(0) for sbp in r.layout) for r in activations)
    layers = [v for v in plan.variables if v.name.startswith("block0") and v.trainable]
    assert all("P" not in map(str, v.layout) for v in layers)


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_losses_over_a_split_vocabulary_are_those_of_one_rank(mesh):
    job = example("bert", "vocabulary=3001", "batch=6", "warmup=2")
    arrays = generated.pairs(12, 3, vocabulary=3001, length=33)
    plan = compile_arrays(mesh, job, arrays)
    assert splits_rows(plan, "words.weight")
    alone = losses(compile_arrays("data=1", job, arrays), arrays, 2)
    np.testing.assert_allclose(losses(plan, arrays, 2), alone, rtol=1e-5)


# Tables


@pytest.mark.parametrize("mesh", MESHES[:3])
def test_rows_of_a_billion_travel_by_owner(mesh):
    job = example("widedeep", "table=1000000000", "batch=65536", "width=64")
    plan = planned(job, mesh)
    assert splits_rows(plan, "deep_table0")
    program = plan.program("train")
    tensors = plan.tensors(program)
    moved = {
        task.op
        for task in program.tasks
        if task.kind == "collective" and tensors[task.inputs[-1]].shape[:1] == (65536,)
        if any(tensors[n].shape == (65536, 64) for n in (*task.inputs, *task.outputs))
    }
    assert moved == {FETCH, SEND}


ROWS, WIDTH, BATCH, STEPS = 20_011, 64, 4001, 2
ADAM = mf.Adam(0.1)


def lookups(optimizer=ADAM):
    """A table on all ranks, a layer, a loss."""

    def model(batch):
        table = nn.Embedding(
            ROWS, WIDTH, name="table", dtype="float64", sparse=True, sbp=S(0), init=nn.normal(1.0)
        )
        logits = nn.Dense(3, name="out")(table(batch["id"]))
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    fields = {"id": ((), "int32"), "label": ((), "int32")}
    data = mf.Dataset("x", batch=BATCH, fields=fields, rows=BATCH * STEPS)
    return mf.Job("lookups", model, train=data, optimizer=optimizer)


@cache
def skewed():
    """Ids of which few occur often."""
    draw = np.random.default_rng(0)
    return {
        "id": (draw.zipf(1.2, BATCH * STEPS) % ROWS).astype(np.int32),
        "label": draw.integers(0, 3, BATCH * STEPS).astype(np.int32),
    }


def rows_sent(plan, rank):
    """What a rank sends by owner in all steps: counts, distinct ids of others, rows for others."""
    mesh = plan.mesh
    size, bounds = mesh.size, [(0, 0)] * mesh.size
    for member in range(size):
        where = RankPlan(mesh, member, mesh.coordinates(member))
        table = next(v for v in plan.variables if v.name == "table.weight")
        bounds[member] = where.box(table)[0]
    total = 0
    for step in range(STEPS):
        ids = skewed()["id"][step * BATCH :][:BATCH]
        wanted = []
        for member in range(size):
            where = RankPlan(mesh, member, mesh.coordinates(member))
            register = next(r for r in plan.program("train").registers if r.name == "batch/id")
            layout = tuple(S(0) for _ in mesh.sizes)
            start, stop = where.box(replace(register, layout=layout))[0]
            wanted.append(np.unique(ids[start:stop]))

        def owned(ids, member):
            start, stop = bounds[member]
            return int(((ids >= start) & (ids < stop)).sum())

        asked = len(wanted[rank]) - owned(wanted[rank], rank)
        given = sum(owned(w, rank) for m, w in enumerate(wanted) if m != rank)
        total += 8 * (size - 1) + 8 * asked + 8 * WIDTH * given  # fetch
        total += 8 * (size - 1) + (8 + 8 * WIDTH) * asked  # send
    return total


@pytest.mark.parametrize(
    ("mesh", "job"),
    [
        pytest.param("model=4", lookups(), marks=pytest.mark.ranks(4)),
        pytest.param("data=2,model=2", lookups(optimizer=mf.SGD(0.5)), marks=pytest.mark.ranks(4)),
    ],
)
def test_each_distinct_row_travels_once_and_no_more_than_the_plan_says(mesh, job):
    plan = planned(job, mesh)
    program, tensors = plan.program("train"), plan.tensors(plan.program("train"))
    messages = [task for task in program.tasks if task.op in ROW_KINDS]
    assert [task.op for task in messages] == [FETCH, SEND]
    readers = {"train": MemoryReader(skewed(), BATCH)}

    def work(session):
        before = session.sent
        return [row["loss"] for row in train(session, STEPS)], session.sent - before

    found = on_ranks(plan, work, readers)
    for rank, (_, sent) in enumerate(found):
        view = RankPlan(plan.mesh, rank, plan.mesh.coordinates(rank))
        rest = [t for t in program.tasks if t.kind == "collective" and t not in messages]
        others = STEPS * sum(sent_by(view, task, tensors) for task in rest)
        assert sent == others + rows_sent(plan, rank)
        assert sent <= others + STEPS * sum(sent_by(view, task, tensors) for task in messages)
    assert max(sent for _, sent in found) < 0.5 * STEPS * bytes_sent(plan, program)  # skewed
    alone = losses(planned(job, "data=1"), skewed(), STEPS)
    np.testing.assert_allclose(found[0][0], alone, rtol=1e-10)


@pytest.mark.ranks(4)
def test_few_rows_are_added_up_instead_as_three_messages_would_cost_more():
    job = lookups()
    small = replace(job, train=replace(job.train, batch=8, rows=24))
    ops = {task.op for task in planned(small, "model=4").program("train").tasks}
    assert not ops & set(ROW_KINDS)


@pytest.mark.ranks(4)
def test_a_rank_may_ask_for_nothing_and_may_own_nothing_that_is_asked_for():
    job = lookups()
    arrays = {**skewed(), "id": np.full(BATCH * STEPS, ROWS - 1, np.int32)}
    alone = losses(planned(job, "data=1"), arrays, STEPS)
    np.testing.assert_allclose(losses(planned(job, "data=4"), arrays, STEPS), alone, rtol=1e-10)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["data=4", "model=2,data=2", "model=3"])
@pytest.mark.parametrize("sparse", [True, False])
def test_ranks_without_ids_or_rows_and_ids_of_no_row_are_right(monkeypatch, mesh, sparse):
    monkeypatch.setattr(signature, "message_seconds", lambda *a: -5e-6)  # whatever it costs
    size, rows, batch = 3, 3, 2

    def model(batch):
        table = nn.Embedding(
            rows, size, name="table", dtype="float64", sparse=sparse, sbp=S(0), init=nn.normal(1.0)
        )
        ids = mf.cast(batch["id"], "int64") * 1  # no field, so that nothing refuses what is no row
        logits = nn.Dense(3, name="out")(mf.reduce_sum(mf.tanh(table(ids)), 1))
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    fields = {"id": ((2,), "int32"), "label": ((), "int32")}
    data = mf.Dataset("x", batch=batch, fields=fields, rows=8)
    job = mf.Job("few", model, train=data, optimizer=mf.SGD(0.3))
    arrays = {
        "id": np.array([[0, 2], [9, 0], [1, 1], [2, -3], [0, 0], [7, 8], [2, 2], [0, 1]], np.int32),
        "label": np.array([0, 1, 2, 0, 1, 2, 0, 1], np.int32),
    }
    plan = planned(job, mesh)
    assert {task.op for task in plan.program("train").tasks} >= {FETCH, SEND}
    alone = losses(planned(job, "data=1"), arrays, 4)
    np.testing.assert_allclose(losses(plan, arrays, 4), alone, rtol=1e-10)


def test_what_owners_get_of_a_batch_that_two_axes_split_is_planned():
    # On the second axis ids would be split too, and a message of rows wants all of them there.
    plan = planned(example("gpt", "size=small", "batch=1024"), "data=64,model=8")
    assert plan.mesh.size == 512
