"""A limit on memory holds for each pipeline stage: what the fullest holds is split, no more."""

from dataclasses import replace

import numpy as np
import pytest
from jobs import data_set

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.budget import Share, budget
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.microbatch import divide
from mpiflow.compiler.signature import choose
from mpiflow.compiler.trace import trace
from mpiflow.errors import CompileError
from mpiflow.graph.mesh import parse_mesh
from mpiflow.plan.records import Field

MACHINE = find_machine("cpu")
WIDTH, CLASSES, ROWS, TURNS, LAYERS = 48, 3000, 16, 4, 4
DATA = replace(
    data_set("train", 4 * ROWS, ROWS),
    fields=(Field("x", (WIDTH,), "float32"), Field("label", (), "int64")),
)


def many_classes():
    """Small layers before one that holds ten times as much as all of them."""

    def model(batch):
        x = batch["x"]
        for i in range(LAYERS):
            x = mf.relu(nn.Dense(WIDTH, name=f"layer{i}")(x))
        logits = nn.Dense(CLASSES, name="out")(x)
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"]))}

    train = mf.Dataset("x", batch=ROWS)
    return mf.Job("classes", model, train=train, optimizer=mf.Adam(lr=0.1), micro_batches=TURNS)


def plan_within(memory):
    target = Target(parse_mesh("stage=2,data=2"), MACHINE, memory=memory, recompute="none")
    return compile_job(many_classes(), {"train": DATA}, target)


def is_split(variable):
    return any(str(sbp) != "B" for sbp in variable.layout)


def test_a_plan_is_found_by_splitting_what_the_fullest_stage_holds_and_nothing_else():
    arenas = dict(plan_within(0).arenas)
    assert arenas["host.1"] > 10 * arenas["host.0"]
    limit = int(0.6 * arenas["host.1"])
    plan = plan_within(limit)
    assert dict(plan.arenas)["host"] <= limit
    assert {v.name for v in plan.variables if is_split(v)} >= {
        "out.weight", "out.weight.moment1", "out.weight.moment2"
    }  # fmt: skip
    assert not [v.name for v in plan.variables if v.stage == 0 and is_split(v)]


def a_table_and_layers():
    """A table that is large and takes no time, before layers that take all of it."""

    def model(batch):
        x = nn.Embedding(CLASSES, WIDTH, name="table")(batch["label"])
        for i in range(2 * LAYERS):
            x = mf.relu(nn.Dense(WIDTH, name=f"layer{i}")(x))
        return {"loss": mf.mean(mf.square(x))}

    train = mf.Dataset("x", batch=ROWS)
    return mf.Job("table", model, train=train, optimizer=mf.Adam(lr=0.1), micro_batches=TURNS)


def test_nodes_move_from_a_stage_that_holds_too_much_though_it_then_takes_less_time():
    def plan(memory):
        target = Target(parse_mesh("stage=2"), MACHINE, memory=memory, recompute="none")
        return compile_job(a_table_and_layers(), {"train": DATA}, target)

    def layers(plan):
        return [
            sum(v.stage == stage and v.name.endswith("weight") for v in plan.variables)
            for stage in (0, 1)
        ]

    balanced = plan(0)
    arenas = dict(balanced.arenas)
    first, second = arenas["host.0"], arenas["host.1"]
    assert layers(balanced) == [3, 6]
    limit = first - (first - second) // 200
    moved = plan(limit)
    assert dict(moved.arenas)["host"] <= limit < first
    assert layers(moved) == [2, 7]
    assert not [v.name for v in moved.variables if is_split(v)]


def test_what_does_not_fit_names_the_stage_that_holds_most_by_its_tensors():
    with pytest.raises(CompileError, match="of all layouts that were found") as caught:
        plan_within(1 << 20)
    assert "out.weight" in str(caught.value)
    assert "layer" not in str(caught.value)


def traced():
    """Layouts of the training graph on two ranks, and products and variables of small layers."""
    job = many_classes()
    graph = trace(job, DATA, name="train", rows=ROWS, training=True)
    differentiate(graph, job.optimizer)
    mesh = parse_mesh("data=2").in_time(TURNS)
    placed = choose(graph, mesh, MACHINE, timing=divide(graph, TURNS))
    small = frozenset(node for node, _ in placed.nodes if "layer" in node.name)
    variables = frozenset(v.tensor for n, v in graph.variables.items() if "layer" in n)
    return placed, small, variables


def test_what_stages_hold_is_counted_for_each_by_itself():
    placed, small, variables = traced()
    graph = placed.graph
    rest = frozenset(node for node, _ in placed.nodes) - small
    others = frozenset(v.tensor for v in graph.variables.values()) - variables
    parts = [Share(small, variables, 1.0), Share(rest, others, 1.0)]
    every = Share(small | rest, variables | others, 1.0)
    *peaks, whole = [
        budget(placed.problem, shares=[part]).peak(placed.choice) for part in [*parts, every]
    ]
    assert budget(placed.problem, shares=parts).peak(placed.choice) == max(peaks)
    assert peaks[0] < peaks[1] < whole < sum(peaks)


def test_activations_of_micro_batches_in_flight_are_counted_one_by_one():
    placed, small, variables = traced()
    peaks = [
        budget(placed.problem, shares=[Share(small, variables, n)]).peak(placed.choice)
        for n in (100.0, 101.0, 102.0)
    ]
    # Of each layer but the first its input, of a micro-batch of 16 / 4 rows on 2 ranks.
    assert np.diff(peaks).tolist() == [(LAYERS - 1) * (2 * WIDTH * 4)] * 2
