"""The cuda device without a GPU: what it asks of one, and in which order.

The calls of a training step of four plans are in tests/golden/*.calls; `PYTHONPATH=tests python
tests/unit/exec/test_cuda.py` renews them.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_jobs import on_gpus
from gpu_stand_in import StandIn, World
from jobs import classifier, compile_for, digits, fed_when_read

from mpiflow.errors import LaunchError, PlanError, TaskError
from mpiflow.exec import cuda
from mpiflow.exec.cuda_device import CudaDevice, CudaStream
from mpiflow.exec.device import Wanted, open_device
from mpiflow.exec.local import run_local
from mpiflow.exec.segments import Segment
from mpiflow.exec.transport import Transport
from mpiflow.plan.places import ACCELERATOR, FEED, PINNED
from mpiflow.plan.records import Task

GOLDEN = Path(__file__).parents[2] / "golden"
STAGES = "classifier-stage2-nccl"
CALLS = ("digits-2-staged", "digits-2-nccl", "digits-2-mpi", STAGES)


def plan_of(name):
    if name == STAGES:
        return compile_for("stage=2", replace(classifier(), micro_batches=2), route="nccl")
    route = name.rpartition("-")[2]
    return compile_for("data=2", digits(), rows=1437, test_rows=360, features=64, route=route)


def calls_of(name):
    """The calls of each rank in its third step, when nothing is new any more."""

    def work(session):
        driver, read = session.device.driver, session._programs["train"].read
        session.expect("train", range(5))
        for step in range(3):
            first = len(driver.calls)
            while read.filled < min(read.acknowledged + read.ahead, 5 * len(read.spans)):
                time.sleep(0.001)  # so that the step waits for no file
            session.run("train", step)
            if not step:
                _see_copies_late(driver, session._streams[FEED])
        return driver.calls[first:]

    with fed_when_read():
        found = on_gpus(plan_of(name), work, blind=name == STAGES)
    lines = []
    for rank, calls in enumerate(found):
        lines += [f"rank {rank}", *(f"    {call}" for call in _by_stream(calls))]
    return "\n".join(lines) + "\n"


def _see_copies_late(driver, feed):
    """What copies for the next step is done when that waits for it, so that these waits show."""
    wait, record, is_done, awaited = driver.wait, driver.record, driver.is_done, set()

    def waiting(stream, event):
        awaited.discard(event)
        wait(stream, event)

    def recording(event, stream):
        if stream == feed._handle:
            awaited.add(event)
        record(event, stream)

    driver.wait, driver.record = waiting, recording
    driver.is_done = lambda event: event not in awaited and is_done(event)


def _by_stream(calls):
    """The calls of each stream in order: how those of different streams mix is left to the host."""
    streams = {}
    for call in calls:
        names = [word for word in call.split() if word.startswith("stream")]
        streams.setdefault(names[0] if names else "", []).append(call)
    return [call for name in sorted(streams) for call in streams[name]]


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_a_step_are_those_that_were_seen_before(name):
    assert calls_of(name) == (GOLDEN / f"{name}.calls").read_text()


def test_a_steady_step_makes_nothing():
    made = ("allocate", "allocate_pinned", "stream", "communicator", "fetch", "fill", "use")
    for name in CALLS:
        words = {line.split()[0] for line in (GOLDEN / f"{name}.calls").read_text().splitlines()}
        assert words.isdisjoint(made)


TASK = Task("t", "compute", "compute", "Relu")


def segment(*calls):
    return Segment(calls, (TASK,) * len(calls), True)


def test_a_stream_waits_for_the_event_of_another_unless_it_is_seen_to_be_done():
    driver = StandIn()
    driver.is_done = lambda event: False
    first, second = (CudaStream(driver, name) for name in ("h2d", "compute"))
    first.submit(segment())
    first.submit(segment())
    second.submit(segment(), [(first, 1)])
    assert driver.calls[-2:] == ["wait stream2 for stream1", "record stream2"]
    driver.is_done = lambda event: event != "event2"
    assert (first.done, second.done) == (1, 1)
    second.submit(segment(), [(first, 1)])
    assert driver.calls[-2:] == ["record stream2", "record stream2"]
    second.submit(segment(), [(first, 2)])
    assert driver.calls[-2:] == ["wait stream2 for stream1", "record stream2"]


def test_a_kernel_that_raises_stops_its_stream():
    def fail():
        raise ZeroDivisionError

    stream = CudaStream(StandIn(), "compute")
    stream.submit(segment(fail, fail))
    assert stream.failure is not None
    assert stream.failure[0] is TASK
    assert stream.done == 0


def test_an_error_of_the_gpu_ends_the_wait_for_an_event():
    driver = StandIn()
    stream = CudaStream(driver, "compute")
    stream.submit(segment(lambda: None))

    def is_done(event):
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    driver.is_done = is_done
    assert stream.done == 0
    task, error = stream.failure
    assert (task, "IllegalAddress" in str(error)) == (TASK, True)


def test_a_strict_stream_forbids_what_a_steady_step_must_not_do():
    class Strict(StandIn):
        def strict(self):
            self.calls.append("strict")
            return nullcontext()

    driver = Strict()
    stream, kernel = CudaStream(driver, "compute", strict=True), segment(lambda: None)
    stream.submit(kernel)
    assert "strict" not in driver.calls
    stream.submit(kernel)
    assert driver.calls[-2:] == ["strict", "record stream1"]


def opened(monkeypatch, *routes, **more):
    monkeypatch.setattr(cuda, "load", lambda: StandIn(World(1)))
    wanted = Wanted(ACCELERATOR, frozenset(routes), **more)
    return run_local(2, lambda transport: open_device("cuda", wanted, transport).kind)


def test_two_ranks_share_a_gpu_where_asked_and_staged(monkeypatch):
    assert opened(monkeypatch, "", "staged", share=True) == [ACCELERATOR] * 2
    with pytest.raises(LaunchError, match="2 ranks took the same GPU"):
        opened(monkeypatch, "", "staged")
    with pytest.raises(LaunchError, match="ranks 0, 1 share a GPU, which NCCL refuses"):
        opened(monkeypatch, "nccl", share=True)


def test_memory_of_gpus_is_handed_to_mpi_only_where_it_takes_it(monkeypatch):
    assert opened(monkeypatch, "mpi", share=True) == [ACCELERATOR] * 2
    monkeypatch.setattr(Transport, "takes_device_memory", lambda self: "it does not")
    with pytest.raises(LaunchError, match="it does not; make the plan with --route nccl or"):
        opened(monkeypatch, "mpi", share=True)


def test_an_error_in_a_step_names_the_task():
    def work(session):
        def fail(*arrays):
            raise RuntimeError("out of order")

        session.device.driver.multiply = fail
        session.expect("train", range(1))
        session.run("train")

    with pytest.raises(TaskError, match=r"task fc1/linear \(Linear\): RuntimeError: out of order"):
        on_gpus(compile_for("data=1", classifier(), route="staged"), work)


def test_only_whole_arrays_are_copied():
    device = CudaDevice(StandIn())
    arena = device.allocate(64, PINNED).view("float32").reshape(4, 4)
    with pytest.raises(PlanError, match="contiguous"):
        device.copier(arena[:, :2], np.zeros((4, 2), "float32"))


if __name__ == "__main__":
    for each in CALLS:
        (GOLDEN / f"{each}.calls").write_text(calls_of(each))
