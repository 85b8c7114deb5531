"""Clocks of hosts that are planted apart are found, within what is said of the uncertainty."""

import time

import pytest

from mpiflow.exec.clocks import Clocks
from mpiflow.exec.local import run_local
from mpiflow.plan.tracefile import Clock

HOSTS = ("a", "b", "a", "c", "b")
AHEAD = {"a": 0.0, "b": 5.0, "c": -7.0}


def compared(transport, drift=0.0):
    host = HOSTS[transport.rank]
    began = time.perf_counter()

    def clock():
        now = time.perf_counter()
        return now + AHEAD[host] + (drift * (now - began) if host == "c" else 0.0)

    clocks = Clocks(transport, host, clock)
    before = clocks.compare()
    between = time.perf_counter(), clock()
    return before, clocks.compare(), between


def test_a_planted_skew_is_found():
    for rank, (before, after, _) in enumerate(run_local(len(HOSTS), compared)):
        for found in (before, after):
            assert found.ahead == pytest.approx(AHEAD[HOSTS[rank]], abs=found.uncertainty + 1e-9)
            assert found.uncertainty < 0.5
        assert (before.uncertainty == 0) == (HOSTS[rank] == "a")


def test_a_planted_drift_is_followed():
    found = run_local(len(HOSTS), lambda transport: compared(transport, drift=0.5))
    before, after, (true, local) = found[HOSTS.index("c")]
    aligned = Clock(before, after).aligned(local)
    assert aligned == pytest.approx(true, abs=before.uncertainty + after.uncertainty + 1e-6)


def test_on_one_host_nothing_is_exchanged():
    found = run_local(3, lambda transport: Clocks(transport, "a").compare())
    assert {(each.ahead, each.uncertainty) for each in found} == {(0.0, 0.0)}
