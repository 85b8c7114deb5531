from dataclasses import replace
from time import perf_counter

import handmade
import pytest
from mutants import MUTATIONS, Facts, mutants, swapped, with_program, with_register, with_task
from oracle import Fault, explore
from random_plans import random_plan

from mpiflow.errors import VerifyError
from mpiflow.plan.records import Output
from mpiflow.plan.verify import verify

PLANS = {
    "dense": handmade.dense(),
    "sharded": handmade.sharded(),
    "flattened": handmade.flattened(),
}


def rejection(plan):
    with pytest.raises(VerifyError) as caught:
        verify(plan)
    return str(caught.value)


def train_with(plan, change, *arguments, **changes):
    train = plan.program("train")
    return with_program(plan, train, change(train, *arguments, **changes))


@pytest.mark.parametrize("name", PLANS)
def test_valid_plans_are_accepted(name):
    verify(PLANS[name])


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_mutant_is_rejected_with_a_message_that_names_what_it_broke(name, kind):
    for mutant in mutants(PLANS[name], 40, seed=1, kinds=[kind]):
        message = rejection(mutant.plan)
        assert any(name in message for name in mutant.names), (mutant.what, message)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_kind_of_mutant_has_a_place_in_some_plan(kind):
    assert any(list(mutants(plan, 1, kinds=[kind])) for plan in PLANS.values())


@pytest.mark.parametrize("seeds", [range(i, i + 100) for i in range(0, 300, 100)], ids=str)
def test_the_verdict_is_that_of_trying_every_interleaving(seeds):
    verdicts = {True: 0, False: 0}
    for seed in seeds:
        plan = random_plan(seed)
        try:
            explore(plan, plan.program("train"))
            sound = True
        except Fault:
            sound = False
        verdicts[sound] += 1
        if sound:
            verify(plan)
        else:
            rejection(plan)
    assert min(verdicts.values()) > 15  # both kinds occur


@pytest.mark.parametrize("name", PLANS)
def test_the_handmade_plans_are_right_by_every_interleaving(name):
    for program in PLANS[name].programs:
        if program.name != "initialise":
            assert explore(PLANS[name], program, steps=2) > 1


def test_a_circle_is_told_as_a_short_chain_with_the_users_lines():
    plan = PLANS["dense"]
    train = plan.program("train")
    message = rejection(with_program(plan, train, swapped(train, 3, 4)))
    assert message.splitlines() == [
        "program train would hang: 2 tasks wait for each other",
        "  t4 matmul (digits.py:12) waits for t3 cross_entropy_grad (digits.py:12) (for dh)",
        "  t3 cross_entropy_grad (digits.py:12) waits for t4 matmul (digits.py:12) "
        "(by the order of stream compute)",
    ]


def test_reuse_too_early_names_writer_reader_and_bytes():
    plan = train_with(PLANS["dense"], with_task, 9, after=())
    assert rejection(plan) == (
        "program train: register l and register norm share bytes 272..276: "
        "t7 sum_squares (digits.py:12) may write register norm while c0 all_reduce "
        "still uses register l"
    )


def test_variables_that_share_memory_are_refused():
    plan = PLANS["dense"]
    first, second, *others = plan.variables
    plan = replace(plan, variables=(first, replace(second, offset=first.offset), *others))
    assert "share bytes" in rejection(plan)


def test_an_update_before_the_last_reader_names_both():
    plan = PLANS["sharded"]
    train = plan.program("train")
    reader = replace(train.tasks[1], name="c9", outputs=("late",))
    late = replace(plan.tensors(train)["v.all"], name="late", offset=400)
    user = handmade.compute("t9", "norm", "late", "n")
    n = replace(plan.tensors(train)["l.all"], name="n", offset=500)
    tasks = (*train.tasks, reader, user)
    order = tuple((s, (*o, 11) if s == "comm.model" else (*o, 12) if s == "compute" else o)
                  for s, o in train.order)  # fmt: skip
    train = replace(train, tasks=tasks, order=order, registers=(*train.registers, late, n),
                    outputs=(*train.outputs, Output("n", "n")))  # fmt: skip
    plan = replace(with_program(plan, plan.program("train"), train), arenas=(("host", 600),))
    assert rejection(plan) == (
        "program train: variable v may be overwritten by t4 sgd (digits.py:12) before "
        "c9 all_gather has read it; nothing orders the two"
    )
    writer = next(i for i, task in enumerate(train.tasks) if task.name == "t4")
    verify(with_program(plan, train, swapped(with_task(train, writer, after=("c9",)), 10, 12)))


def test_shards_that_would_interleave_are_refused():
    m = handmade.Maker("data=2,model=2")
    registers = [
        m.tensor("a", (8,), "S(0) S(0)", 0),
        m.tensor("b", (8,), "B S(0)", 16),
        m.tensor("y", (), "B B", 64),
    ]
    tasks = [
        handmade.compute("t0", "iota", "", "a"),
        handmade.collective("c0", "all_gather", "data", "a", "b"),
        handmade.compute("t1", "sum", "b", "y"),
    ]
    train = handmade.program("train", registers, tasks, outputs=(Output("y", "y"),))
    assert "axis model inside data splits dim 0 too" in rejection(m.plan([], [train], 68))


def test_units_must_divide_what_the_outer_axis_left():
    m = handmade.Maker("data=2,model=2")
    variable = replace(
        m.variable("q", (12, 4), "S(0,unit=4) B", 0), layout=m.tensor("x", (8,), "S(0) B", 0).layout
    )
    fine = m.variable("q", (12, 4), "S(0,unit=4) B", 0)
    init = handmade.program("initialise", [], [handmade.compute("i0", "zeros", "", "q")])
    verify(m.plan([fine], [init], 128))
    assert "largest shard (6, 4)" in rejection(m.plan([variable], [init], 128))
    odd = replace(fine, shape=(10, 4))
    assert "units of 4" in rejection(m.plan([odd], [init], 128))


def test_a_variable_that_nothing_initialises_is_refused():
    plan = PLANS["dense"]
    init = plan.program("initialise")
    shorter = replace(init, tasks=init.tasks[:1], order=(("compute", (0,)),))
    assert rejection(with_program(plan, init, shorter)) == (
        "program initialise: no task writes variable b"
    )
    assert "no program 'initialise'" in rejection(replace(plan, programs=plan.programs[1:]))


def test_harmless_variations_are_accepted():
    plan = PLANS["dense"]
    train = plan.program("train")
    verify(replace(plan, arenas=(("host", 10_000),)))
    verify(with_program(plan, train, with_register(train, "norm", offset=280)))
    verify(with_program(plan, train, swapped(train, 4, 5)))  # two independent gradients
    verify(with_program(plan, train, replace(train, order=train.order[::-1])))
    spaced = with_task(train, 9, after=("c0", "t4"))
    verify(with_program(plan, train, spaced))


def test_lost_memory_of_a_step_that_runs_behind_is_a_missing_slot():
    plan = PLANS["dense"]
    save = plan.program("save")
    more = replace(save, registers=(*save.registers, replace(save.registers[0], name="d")))
    tasks = (*save.tasks, handmade.compute("s3", "copy", "w", "d", after=("s1",)),
             handmade.write("s4", "d"))  # fmt: skip
    more = replace(more, tasks=tasks, order=(("compute", (0, 3)), ("write", (1, 2, 4))))
    message = rejection(with_program(plan, save, more))
    assert "in use beyond the step" in message
    assert "s0 copy" in message
    assert "s3 copy" in message
    with pytest.raises(Fault):
        explore(with_program(plan, save, more), more, steps=2)


def test_five_thousand_tasks_are_verified_within_seconds():
    plan = handmade.chain(5000)
    begin = perf_counter()
    verify(plan)
    assert perf_counter() - begin < 10


def test_a_long_circle_is_told_by_the_ends_of_streams():
    plan = handmade.chain(700)
    train = plan.program("train")
    plan = with_program(plan, train, with_task(train, 0, after=("t699",)))
    first, last = "digits.py:12", "digits.py:14"
    assert rejection(plan).splitlines() == [
        "program train would hang: 2 tasks wait for each other",
        f"  t0 relu ({first}) waits for t699 relu ({last}) (by its `after`)",
        f"  t699 relu ({last}) waits for t0 relu ({first}) (by the order of stream compute)",
    ]


def test_facts_of_the_mutants_know_who_waits_for_whom():
    waits = Facts(PLANS["dense"], PLANS["dense"].program("train")).waits()
    assert waits[1] == {0}
    assert waits[7] == {0, 1, 2, 3, 4, 5, 6}
