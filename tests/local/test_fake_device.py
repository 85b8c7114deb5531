"""Plans for accelerators on the fake device: as on the CPU, and every missing wait is found."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from jobs import classifier, compile_for, evaluate, fed_when_read, on_ranks, train

from mpiflow.errors import TaskError
from mpiflow.exec import bind
from mpiflow.plan.places import FEED, ROUTES
from mpiflow.plan.unroll import unroll

# pytest-mpi takes a case that is called mpi for the mark.
by_each_route = pytest.mark.parametrize("route", ROUTES, ids="by {}".format)


@cache
def plan_for(mesh, route="", zero=0):
    return compile_for(mesh, classifier(48), zero=zero, route=route)


def all_programs(session):
    """Training and evaluation in turn, and the variables in the end."""
    outputs = []
    for part in range(2):
        steps = range(3 * part, 3 * part + 3)
        session.expect("train", steps)
        outputs += [session.run("train", step) for step in steps]
        outputs += [values for _, values in evaluate(session)]
    return outputs, {name: array.copy() for name, array in session.variables.items()}


@cache
def on_host(mesh, zero=0):
    return on_ranks(plan_for(mesh, zero=zero), all_programs)


def assert_same(found, wanted):
    for (outputs, variables), (theirs, values) in zip(found, wanted, strict=True):
        assert outputs == theirs
        assert all(np.array_equal(variables[name], values[name]) for name in values)


@pytest.mark.ranks(2)
@by_each_route
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 0), ("data=3", 1)])
def test_any_order_of_the_device_gives_the_bits_of_the_cpu(mesh, zero, route):
    plan = plan_for(mesh, route, zero)
    for seed in range(2):
        assert_same(on_ranks(plan, all_programs, seed=seed), on_host(mesh, zero))


def waits_of(route):
    """Everything that an item of the training step waits for, but for its own stream."""
    plan = plan_for("data=2", route)
    program = plan.program("train")
    items = bind.items_of(unroll(program), plan.tensors(program))
    return [
        (stream, number, wait)
        for stream, found in items.items()
        for number, item in enumerate(found)
        for wait in item.waits
        if wait[0] != stream
    ]


@pytest.fixture
def forget(monkeypatch):
    """Lets an item of the training step not wait for what it should."""
    plain = bind.items_of

    def plant(stream, number, wait):
        def forgetful(program, tensors):
            items = plain(program, tensors)
            if program.name == "train":
                found = list(items[stream])
                left = tuple(each for each in found[number].waits if each != wait)
                found[number] = replace(found[number], waits=left)
                items[stream] = tuple(found)
            return items

        monkeypatch.setattr(bind, "items_of", forgetful)

    return plant


@pytest.mark.ranks(2)
@by_each_route
def test_each_missing_wait_is_found_and_named(forget, route):
    for stream, number, (other, count) in waits_of(route):
        forget(stream, number, (other, count))
        said = rf"reads .* without waiting for .* on {re.escape(other)}(\n|$)"
        with pytest.raises(TaskError, match=said):
            on_ranks(plan_for("data=2", route), lambda session: train(session, 1))


@pytest.fixture
def patient():
    with fed_when_read():
        yield


def fed_in_turn(plan, session):
    """How many copies for the next step each step begins; the last one knows of none."""
    bound, found = session._programs["train"], []
    session.expect("train", range(4))
    for step in range(4):
        session.run("train", step)
        found.append(bound.phase.feed.started)
    return found


@pytest.mark.parametrize(("micro_batches", "early"), [(1, 1), (2, 2), (3, 2)])
@pytest.mark.usefixtures("patient")
def test_copies_of_the_next_step_begin_beside_this_one(micro_batches, early):
    job = replace(classifier(48), micro_batches=micro_batches)
    plan = compile_for("data=1", job, route="nccl")
    ((*found, last),) = on_ranks(plan, lambda session: fed_in_turn(plan, session))
    # Whether all have begun by the end of a step is a matter of when their slots became free.
    assert (max(found), last) == (early, 0)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.usefixtures("patient")
def test_copies_that_begin_before_their_slot_is_free_are_found(monkeypatch, number):
    plain = bind.items_of

    def hasty(program, tensors):
        items = plain(program, tensors)
        if program.name == "train":
            fed = list(items[FEED])
            assert fed[number].early
            fed[number] = replace(fed[number], early=())
            items[FEED] = tuple(fed)
        return items

    monkeypatch.setattr(bind, "items_of", hasty)
    plan = compile_for("data=1", replace(classifier(48), micro_batches=3), route="nccl")
    with pytest.raises(TaskError, match=r"h2d read train.*overwrites|but its bytes now hold"):
        on_ranks(plan, lambda session: train(session, 4))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.usefixtures("patient")
def test_what_was_fed_for_steps_that_do_not_come_is_forgotten(micro_batches):
    job = replace(classifier(48), micro_batches=micro_batches)

    def work(session):
        outputs = []
        for first in (0, 7, 3):
            session.expect("train", range(first, first + 4))
            outputs += [session.run("train", first + step) for step in range(2)]
            outputs += [values for _, values in evaluate(session)]
            session.forget("train")
        return outputs

    plans = [compile_for("data=1", job, route=route) for route in ("", "staged", "nccl")]
    wanted, *found = [on_ranks(plan, work) for plan in plans]
    assert found == [wanted] * 2
