"""ZeRO: variables split over the axis that splits the batch; losses stay what they are."""

from dataclasses import replace

import numpy as np
import pytest
from jobs import classifier, compile_for, evaluate, on_ranks, train

import mpiflow as mf
from mpiflow.compiler.zero import check_level
from mpiflow.errors import UsageError
from mpiflow.graph.sbp import S

OPTIMIZERS = {
    "adamw": mf.AdamW(lr=0.01, clip=1.0, ema=0.9),
    "lamb": mf.LAMB(lr=0.01),
    "sgd": mf.SGD(lr=0.1, momentum=0.9),
}


def plan_of(mesh, level, *, optimizer="adamw", micro_batches=1, batch=24, width=7, **data):
    job = classifier(batch, optimizer=OPTIMIZERS[optimizer], width=width, hidden=None, last=None)
    job = replace(job, micro_batches=micro_batches)
    return compile_for(mesh, job, zero=level, **data)


GRADIENT = "grad/fc1/linear/row_product"


def large_plan(level, micro_batches=1):
    """Of layers whose gradients are better sent than what they are made of."""
    return plan_of(
        "data=4", level, optimizer="sgd", micro_batches=micro_batches,
        batch=16384, width=1024, features=512, rows=20000,
    )  # fmt: skip


def numbers(plan):
    def work(session):
        steps = [list(outputs.values()) for outputs in train(session, 6)]
        return steps, [list(outputs.values()) for _, outputs in evaluate(session)]

    return on_ranks(plan, work)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "optimizer", "level", "micro_batches"),
    [
        ("data=2", "lamb", 1, 1),
        ("data=3", "adamw", 1, 3),
        ("data=3", "adamw", 2, 2),
        ("data=2,model=2", "sgd", 2, 3),
        ("data=3", "lamb", 3, 1),
        ("data=2,model=2", "adamw", 3, 2),
    ],
)
def test_every_level_trains_as_one_rank_does(mesh, optimizer, level, micro_batches):
    alone = numbers(plan_of("data=1", 0, optimizer=optimizer))[0]
    plan = plan_of(mesh, level, optimizer=optimizer, micro_batches=micro_batches)
    for found in numbers(plan):
        for ours, theirs in zip(found, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5)


def stored(plan, kind):
    """Bytes that the rank with the most stores of the weights, or of what is beside them."""
    return sum(v.nbytes for v in plan.variables if v.trainable == (kind == "weights"))


def test_what_a_rank_stores_falls_by_the_ranks():
    plans = [plan_of("data=4", level, batch=64, width=64) for level in range(4)]
    state, weights = ([stored(p, kind) for p in plans] for kind in ("state", "weights"))
    step = 8  # the step count, which every rank has
    assert [s - step for s in state] == [
        state[0] - step,
        *[pytest.approx(state[0] / 4, rel=0.02)] * 3,
    ]
    assert weights == [weights[0]] * 3 + [pytest.approx(weights[0] / 4, rel=0.02)]


def test_the_reduction_of_a_large_gradient_is_scattered_and_its_weight_gathered_in_place():
    plan = large_plan(1)
    tasks = plan.program("train").tasks
    update = next(t for t in tasks if t.name == "update/fc1.weight/sgd_update")
    gather = next(t for t in tasks if t.outputs == ("fc1.weight",))
    assert gather.op == "all_gather"
    assert gather.inputs == update.outputs[:1]
    scattered = [t.inputs for t in tasks if t.op == "reduce_scatter"]
    assert (GRADIENT,) in scattered


def test_level_two_scatters_in_the_loop_what_level_one_adds_up_whole():
    one, two = (large_plan(level, micro_batches=8) for level in (1, 2))
    scattered = [
        next(
            t
            for t in plan.program("train").tasks
            if t.op == "reduce_scatter" and GRADIENT in t.name
        )
        for plan in (one, two)
    ]
    assert [task.phase for task in scattered] == [2, 1]
    assert dict(two.arenas)["host"] < dict(one.arenas)["host"]


def test_a_weight_with_fewer_rows_than_ranks_is_split_by_columns_or_stays():
    layouts = {v.name: v.layout for v in plan_of("data=8", 3, batch=64, width=12).variables}
    assert layouts["fc1.weight"] == (S(1),)  # 6 x 12
    assert layouts["out.bias"] != (S(0),)  # 5


def test_other_levels_are_refused():
    with pytest.raises(UsageError, match="--zero takes a level from 0 to 3, not 4"):
        check_level(4)
