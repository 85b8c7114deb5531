"""The change of each figure between two plans is that of its items together, as it is printed."""

import json
import re
from functools import cache
from itertools import combinations

import handmade
import pytest
from jobs import classifier_plan, compile_arrays, compile_for, digits
from micro_jobs import arrays, job, masked, masked_plan
from random_plans import random_plan

from mpiflow.errors import VerifyError
from mpiflow.plan.breakdown import apportioned, breakdowns, step_seconds
from mpiflow.plan.compare import compare, relaid
from mpiflow.plan.peak import peak
from mpiflow.plan.simulator import simulate
from mpiflow.plan.traffic import bytes_sent
from mpiflow.plan.verify import verify


@cache
def digits_plan(mesh, zero=0):
    return compile_for(mesh, digits(), rows=1437, test_rows=360, features=64, zero=zero)


@cache
def half_plan(mesh):
    """In float16, whose loss is scaled."""
    made = job(lambda rows: masked(rows, "float32"), 24, 1, precision="float16")
    return compile_arrays(mesh, made, arrays(24))


PLANS = {
    "data": lambda: digits_plan("data=4"),
    "mixed": lambda: digits_plan("data=2,model=2"),
    "zero": lambda: digits_plan("data=4", zero=1),
    "one rank": lambda: digits_plan("data=1"),
    "small": lambda: classifier_plan("model=3"),
    "cut": lambda: masked_plan("data=2", micro_batches=4),
    "whole": lambda: masked_plan("data=2", micro_batches=1),
    "16 bits": lambda: half_plan("data=2"),
    "by hand": handmade.dense,
    "by hand, sharded": handmade.sharded,
}
PAIRS = list(combinations(PLANS, 2))


def numbers(line):
    """The figures of a line of a table, in its last digit; nothing stands for no change."""
    found = re.findall(r"([+-]?[\d,]+\.?\d*) (?:B|s|ms|us|ns)(?= |$)", line)
    return [int(text.replace(",", "").replace(".", "")) for text in found]


@pytest.mark.parametrize(("a", "b"), PAIRS[::2])
def test_what_is_printed_adds_up_in_every_column(a, b):
    first, second = PLANS[a](), PLANS[b]()
    text = str(compare(first, second))
    tables = [part.splitlines() for part in text.split("\n\n") if " first " in part.split("\n")[0]]
    assert tables
    for _, *lines in tables:
        *items, total = [numbers(line) for line in lines if numbers(line)]
        for column in range(3):
            assert sum(row[column] for row in items if len(row) > column) == total[column]
        assert total[1] - total[0] == total[2]
        assert len(items) <= 12
    assert max(map(len, text.splitlines())) <= 200
    assert len(text.splitlines()) < 140


@pytest.mark.parametrize(("a", "b"), PAIRS[1::4])
def test_the_totals_are_the_figures_of_the_plans(a, b):
    first, second = PLANS[a](), PLANS[b]()
    step, sent, memory = breakdowns(first, second)
    for plan, total in ((first, "a"), (second, "b")):
        program = plan.program("train")
        assert getattr(sent.total, total) == bytes_sent(plan, program)
        assert getattr(memory.total, total) == sum(size for _, size in plan.arenas)
        if plan.machine != "laptop":  # those by hand have any seconds
            told = getattr(step.total, total) * step.quantum
            assert abs(told - program.seconds) <= step.quantum / 2 * 1.001
    for each in (step, sent, memory):
        assert sum(item.change for item in each.items) == each.total.change
    json.dumps(compare(first, second).plain(), allow_nan=False)


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_what_is_computed_and_waited_for(name):
    plan = PLANS[name]()
    parts = step_seconds(plan, plan.program("train"))
    assert sum(parts.values()) == pytest.approx(simulate(plan, "train").step_seconds, rel=1e-9)
    assert min(parts.values()) >= 0


def test_what_does_not_change_is_rounded_alike_and_the_rest_makes_up_the_sum():
    parts = {"a": 1.4, "b": 2.4, "c": 0.4, "d": 0.3}
    counts = apportioned(parts, 1.0, {"a", "b"})
    assert (counts["a"], counts["b"]) == (1, 2)
    assert sum(counts.values()) == 4  # 4.5, rounded to even
    assert counts == {"a": 1, "b": 2, "c": 1, "d": 0, "rounding": 0}
    assert apportioned({"a": 1.4, "b": 1.4}, 1.0, {"a", "b"})["rounding"] == 1


def test_a_plan_is_equal_to_itself():
    assert compare(digits_plan("data=4"), digits_plan("data=4")) is None


# -- memory ---------------------------------------------------------------------------------------


def test_the_peak_of_digits_is_known_by_class():
    at = peak(digits_plan("data=4"))
    held = dict(at.classes)
    weights = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    assert (held["variables"], held["optimizer state"]) == (weights, weights)
    rows = [-(-batch // 4) for batch in (128, 128, 360 - 256)]  # train, evaluate, evaluate_tail
    assert held["read slots"] == sum(2 * (64 + 8) * each for each in rows)
    assert at.program == "train"
    assert sum(held.values()) == dict(digits_plan("data=4").arenas)["host"]


def test_zero_divides_the_state_of_the_optimizer():
    whole, split = (dict(peak(digits_plan("data=4", zero=z)).classes) for z in (0, 1))
    assert split["variables"] == whole["variables"]
    assert (
        whole["optimizer state"] / 4 <= split["optimizer state"] <= whole["optimizer state"] / 3.9
    )


@pytest.mark.parametrize("name", PLANS)
def test_no_class_is_negative_and_little_is_unused(name):
    plan = PLANS[name]()
    held = dict(peak(plan).classes)
    assert min(held.values()) >= 0
    assert held["unused then"] < 0.5 * sum(held.values())


def test_what_lives_at_once_in_any_proven_plan_fits_its_arena():
    proven = 0
    for seed in range(150):
        plan = random_plan(seed)
        try:
            verify(plan)
        except VerifyError:
            continue
        proven += 1
        assert min(size for _, size in peak(plan).classes) >= 0
    assert proven > 8


# -- layouts --------------------------------------------------------------------------------------


def test_layouts_that_change_alike_are_told_together():
    found = relaid(digits_plan("data=4"), digits_plan("data=2,model=2"))
    variables = {each.change: each.names for each in found if each.kind == "variable"}
    assert variables["B -> S(1) on model"] == ("fc1.weight", "fc1.weight.momentum")
    assert set(variables["B -> S(0) on model"]) >= {"fc1.bias", "out.weight"}
    assert not any(">" in name for each in found for name in each.names)
    back = relaid(digits_plan("data=2,model=2"), digits_plan("data=4"))
    assert {each.change for each in back if each.kind == "variable"} == {
        "S(1) -> B on model", "S(0) -> B on model",
    }  # fmt: skip


def test_plans_that_differ_everywhere_stay_readable():
    text = str(compare(digits_plan("data=4"), masked_plan("data=2", micro_batches=4)))
    assert re.search(r"\.\.\. and \d+ more, together +[\d.]+ us", text)
    assert "of this kind (all with --json)" in text
