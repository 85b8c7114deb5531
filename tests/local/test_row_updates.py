"""Tables that are updated by rows: the same numbers as dense, on any layout, and little memory."""

from dataclasses import replace
from functools import cache
from statistics import median
from time import thread_time

import numpy as np
import pytest
from jobs import MemoryReader, on_ranks, train
from table_jobs import BATCH, STEPS, TABLES, USERS, WIDTH, WORDS, ops, plan_of, rows, run, states

import mpiflow as mf
from mpiflow.compiler.scaling import SCALE
from mpiflow.graph.sbp import S

EXACT = [mf.SGD(0.2), mf.SGD(mf.Cosine(0.2), clip=0.5), mf.Adagrad(0.1), mf.Adagrad(0.1, clip=0.5)]
LAZY = [
    mf.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1, clip=0.5),
    mf.Adam(mf.InverseSqrt(0.05, 3)),
    mf.AdamW(0.05, groups=(mf.Group("users.*", weight_decay=0.0, lr_scale=2.0),), clip=0.5),
    mf.Adagrad(0.1, weight_decay=0.1),
]


@pytest.mark.parametrize("optimizer", EXACT, ids=repr)
def test_rows_alone_are_updated_where_that_is_the_same_as_all(optimizer):
    plan = plan_of(optimizer)
    assert ops(plan)["SumRows"] == len(TABLES)
    assert not plan.notes
    _, outputs, found = run(plan, work=states)
    dense = plan_of(optimizer, sparse=False)
    assert "SumRows" not in ops(dense)
    _, expected, whole = run(dense, work=states)
    for name, value in whole.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-14, err_msg=name)
    for a, b in zip(outputs, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-12)


@cache
def alone(optimizer):
    return run(plan_of(optimizer, sparse=True))


MESHES = [
    pytest.param(mesh, split, marks=pytest.mark.ranks(ranks), id=f"{mesh}-{split}")
    for mesh, split, ranks in [
        ("data=2", None, 2), ("data=3", None, 3), ("model=2", S(0), 2), ("model=3", S(0), 3),
        ("model=2", S(1), 2), ("data=2,model=2", S(0), 4),
    ]
]  # fmt: skip


@pytest.mark.parametrize("optimizer", [EXACT[3], LAZY[2]], ids=repr)
@pytest.mark.parametrize(("mesh", "split"), MESHES)
def test_an_update_by_rows_is_the_same_under_every_layout(mesh, split, optimizer):
    plan = plan_of(optimizer, mesh, sparse=True, split=split)
    layouts = {v.name: v.layout[-1] for v in plan.variables}
    assert all(layouts[name] == split for name in TABLES if split)
    for step, expected in zip(run(plan), alone(optimizer), strict=True):
        assert step == pytest.approx(expected, rel=1e-9)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mesh", ["data=1", "data=3"])
def test_micro_batches_have_their_lookups_in_one_update(mesh):
    plan = plan_of(LAZY[2], mesh, sparse=True, micro_batches=2)
    assert ops(plan)["AdamRowUpdate"] == len(TABLES)
    for step, expected in zip(run(plan), alone(LAZY[2]), strict=True):
        assert step == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("optimizer", LAZY, ids=repr)
def test_the_lazy_form_leaves_the_other_rows_and_what_is_kept_of_them_alone(optimizer):
    arrays, larger = rows(), {"words.weight": WORDS + 9, "users.weight": USERS + 9}
    before, _, after = run(plan_of(optimizer, sparse=True, sizes=larger), work=states)
    for name, fields in (("words", ("words", "more")), ("users", ("user",))):
        used = np.unique(np.concatenate([arrays[field].reshape(-1) for field in fields]))
        others = np.setdiff1d(np.arange(larger[f"{name}.weight"]), used)
        assert len(others) >= 9
        for variable, value in after.items():
            if variable.startswith(name):
                np.testing.assert_array_equal(value[others], before[variable][others])
                assert not np.equal(value[used], before[variable][used]).all(1).any()


@pytest.mark.parametrize("optimizer", LAZY, ids=repr)
def test_a_step_that_looks_up_every_row_is_that_of_the_whole_table(optimizer):
    few = {"words.weight": 3, "users.weight": 2}
    arrays = rows(3, 2)
    arrays["words"][:] = np.arange(3)
    arrays["user"][::2] = 1 - arrays["user"][1::2]
    plans = (plan_of(optimizer, sparse=s, sizes=few, arrays=arrays) for s in (True, False))
    found, expected = (run(plan, arrays=arrays) for plan in plans)
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", [EXACT[1], *LAZY], ids=repr)
def test_nothing_in_a_step_is_as_large_as_a_table(optimizer):
    large = {"words.weight": 10_000, "users.weight": 10_000}
    for mesh, split in (("data=2", None), ("data=2,model=2", S(0))):
        plan = plan_of(optimizer, mesh, sparse=True, split=split, sizes=large)
        program = plan.program("train")
        assert not [t.name for t in program.tasks if t.name.startswith(("assign ", "keep "))]
        assert max(r.nbytes for r in program.registers) < 5000 * WIDTH
        assert max(t.workspace[1] for t in program.tasks) < 5000 * WIDTH


def test_the_price_of_a_step_does_not_grow_with_the_table():
    def price(count):
        sizes = dict.fromkeys(TABLES, count)
        program = plan_of(mf.Adam(0.1), sparse=True, sizes=sizes).program("train")
        return program.seconds, [(t.op, t.nbytes, t.flops) for t in program.tasks]

    assert price(10**9) == price(10**4)


@pytest.mark.alone
def test_the_time_of_a_step_does_not_grow_with_the_table():
    def seconds(count):
        arrays = rows(count, count, steps=60)
        sizes = dict.fromkeys(TABLES, count)
        plan = plan_of(mf.Adam(0.1), sparse=True, sizes=sizes, arrays=arrays, dtype="float32")

        def work(session, steps):
            session.expect("train", range(steps))
            times = []
            for step in range(steps):
                start = thread_time()
                session.run("train", step)
                times.append(thread_time() - start)
            return median(times)

        return run(plan, 60, arrays, work)

    small, large = seconds(1_000), seconds(300_000)
    # An update of all rows takes more than twenty times as long for the larger tables.
    assert large < 4 * small


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [None, S(0)])
def test_an_infinity_skips_one_step_and_leaves_the_tables_alone(split):
    mesh = "model=2" if split else "data=2"
    plan = plan_of(mf.Adam(0.05), mesh, sparse=True, split=split, dtype="float32",
                   precision="float16")  # fmt: skip
    assert ops(plan)["AdamRowUpdate"] == len(TABLES)
    arrays = rows()
    arrays["y"][3 * BATCH + 5] = np.inf

    def work(session):
        session.variables[SCALE][...] = 256  # at which nothing else overflows
        session.expect("train", range(STEPS))
        seen = []
        for step in range(STEPS):
            before = {name: session.variables[name].copy() for name in TABLES}
            outputs = session.run("train", step)
            same = all(np.array_equal(before[n], session.variables[n]) for n in TABLES)
            seen.append((outputs["skipped"], outputs[SCALE], same))
        return seen

    for seen in on_ranks(plan, work, {"train": MemoryReader(arrays, BATCH)}):
        skipped, scales, same = zip(*seen, strict=True)
        assert skipped == tuple(int(step == 3) for step in range(STEPS))
        assert same == tuple(step == 3 for step in range(STEPS))
        assert scales[4] == scales[3] / 2


@pytest.mark.ranks(2)
def test_a_table_that_a_product_shares_is_updated_as_a_whole():
    for mesh in ("data=1", "data=2"):
        plan = plan_of(mf.SGD(0.1), mesh, sparse=True, tied=True)
        assert ops(plan)["SgdRowUpdate"] == 1  # that of the users
        assert ops(plan)["EmbeddingGrad"] == 2
        (note,) = plan.notes
        assert note.startswith("words.weight: sparse=True has no effect")
        assert "words/linear" in note
        found = run(plan)
        assert found[-1]["loss"] < found[0]["loss"]


def test_the_plan_with_rows_survives_a_checkpoint_of_the_middle():
    plan = plan_of(mf.Adam(0.05), sparse=True)

    def halves(session, steps):
        train(session, steps // 2)
        kept = {name: value.copy() for name, value in session.variables.items()}
        session.expect("train", range(steps // 2, steps))
        first = [session.run("train", step) for step in range(steps // 2, steps)]
        for name, value in kept.items():
            session.variables[name][...] = value
        session.expect("train", range(steps // 2, steps))
        return first, [session.run("train", step) for step in range(steps // 2, steps)]

    first, second = run(plan, work=halves)
    assert first == second


def test_how_a_table_is_updated_is_part_of_what_a_checkpoint_belongs_to():
    """The identity says what is computed, and sparse=True is part of that."""
    plans = [plan_of(mf.Adam(0.1), sparse=s) for s in (None, False, True)]
    models = {dict(plan.identity)["model"] for plan in plans}
    assert len(models) == 3
    assert replace(plans[0], notes=()).variables == plans[1].variables
