"""More micro-batches are in flight where messages take long, and not where that is not worth it."""

from dataclasses import replace

import pytest
from jobs import compile_for

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler import driver
from mpiflow.compiler.ahead import Turns, fewest_ahead
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.pipeline import Pipeline, in_flight

STAGES, COUNT = 4, 16
CPU = find_machine("cpu")


def with_latency(seconds):
    return replace(CPU, inner=replace(CPU.inner, latency=seconds, call=0.0, bandwidth=1e15))


def planned(machine, memory=0, batch=512):
    def model(batch):
        x = mf.cast(batch["image"], "float32")
        for i in range(2 * STAGES):
            x = mf.tanh(nn.Dense(64, name=f"layer{i}")(x))
        return {"loss": mf.mean(mf.square(x))}

    data = mf.Dataset("train-*.h5", batch=batch)
    job = mf.Job("deep", model, train=data, optimizer=mf.SGD(lr=0.1), micro_batches=COUNT)
    return compile_for(
        f"stage={STAGES}", job, rows=2 * batch, machine=machine, memory=memory, zero=None
    )


def flights(plan):
    return [in_flight(p.sequence) for p in plan.programs if p.name == "train"]


def arena(plan):
    return dict(plan.arenas)["host"]


def test_the_clock_is_that_of_theory():
    even = Turns((1.0,) * 4, (2.0,) * 4, (0.2,) * 4, (0.2,) * 4)

    def seconds(ahead):
        return even.seconds([Pipeline(ahead=ahead).sequence(s, 4, 16) for s in range(4)])

    assert seconds(3) == pytest.approx(16 * 3 + 3 * (3 + 2 * 0.2))
    assert seconds(0) > seconds(1) > seconds(2) >= seconds(3)


def test_on_a_slow_link_a_step_is_shorter_with_more_in_flight(monkeypatch):
    slow = with_latency(1e-4)
    hurried = planned(slow)
    monkeypatch.setattr(driver, "hurried", lambda step: step)
    plain = planned(slow)
    assert (flights(plain), flights(hurried)) == ([4, 3, 2, 1], [7, 5, 3, 1])
    assert hurried.program("train").seconds < 0.75 * plain.program("train").seconds
    assert arena(plain) < arena(hurried)


@pytest.mark.parametrize(
    ("backward", "hop", "wanted"),
    [
        ((2.0, 2.0, 2.0, 2.0), 0.0, 0),
        ((2.0, 2.0, 2.0, 2.0), 0.2, 2),
        ((2.0, 2.0, 2.0, 2.0), 1.0, 3),
        ((2.4, 2.0, 2.0, 2.0), 0.0, 3),
    ],
)
def test_no_more_are_in_flight_than_even_stages_and_fast_messages_need(backward, hop, wanted):
    turns = Turns((1.0,) * 4, backward, (hop,) * 4, (hop,) * 4)
    assert fewest_ahead(turns, 16) == wanted


def test_only_as_many_more_are_in_flight_as_a_limit_on_memory_allows():
    slow = with_latency(1e-4)
    free = arena(planned(slow))
    some = planned(slow, memory=free - 1)
    assert flights(some)[0] == 5
    least = planned(slow, memory=arena(some) - 1)
    assert flights(least) == [4, 3, 2, 1]
    assert arena(least) < arena(some) < free
