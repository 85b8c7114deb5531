"""The fake device: as late as allowed, in an order of its seed, and strict about memory."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from jobs import (
    MemoryReader,
    classifier,
    compile_arrays,
    compile_for,
    on_ranks,
    train,
    with_program,
)
from micro_jobs import arrays, job
from pipeline_jobs import layers

import mpiflow.exec.session as sessions
from mpiflow.errors import TaskError
from mpiflow.exec import bind
from mpiflow.exec.fake import Fake, FakeSide, FakeStream
from mpiflow.exec.lanes import MessageLane
from mpiflow.exec.segments import Segment
from mpiflow.exec.trace import Recorder
from mpiflow.exec.transport import DONE
from mpiflow.ops.shape import Cast
from mpiflow.plan.places import CUDA_MPI, ROUTES, STAGED
from mpiflow.plan.records import COMPUTE, Program, Task


@pytest.fixture
def device():
    return Fake(0)


class Played:
    """Streams of a device, and a log of what they have run."""

    def __init__(self, device):
        self.device, self.log = device, []
        self.streams = {name: device.stream(name, lambda: None) for name in "abc"}

    def submit(self, stream, *names, after=(), awaited=True):
        calls = tuple(lambda name=name: self.log.append(name) for name in names)
        tasks = tuple(Task(name, COMPUTE, COMPUTE, "Copy") for name in names)
        events = [(self.streams[other], count) for other, count in after]
        self.streams[stream].submit(Segment(calls, tasks, awaited), events)

    def play(self):
        while self.device.advance():
            pass
        return self.log


def test_nothing_runs_when_it_is_submitted(device):
    played = Played(device)
    played.submit("a", "x")
    assert played.log == []
    assert played.play() == ["x"]
    assert played.streams["a"].done == 1


def test_only_what_the_host_waits_for_runs(device):
    played = Played(device)
    played.submit("a", "not awaited", awaited=False)
    played.submit("b", "x", awaited=False)
    played.submit("c", "y", after=[("b", 1)])
    assert played.play() == ["x", "y"]


def test_seeds_choose_among_streams_and_keep_their_events():
    orders = set()
    for seed in range(20):
        played = Played(Fake(seed))
        for name in "abc":
            played.submit(name, f"{name}0")
        played.submit("a", "a1", after=[("b", 1), ("c", 1)])
        log = played.play()
        assert log[-1] == "a1"
        orders.add(tuple(log))
    assert len(orders) == 6


def test_streams_that_wait_for_each_other_are_named(device):
    played = Played(device)
    played.submit("a", "x", after=[("b", 1)])
    played.submit("b", "y", after=[("a", 1)])
    with pytest.raises(TaskError, match=r"wait for each other:\n  . on . waits for . to have done"):
        played.play()


def test_of_a_recorded_segment_the_task_that_failed_is_named(device):
    def fail():
        raise ZeroDivisionError

    tasks = tuple(Task(name, COMPUTE, COMPUTE, "Copy") for name in "xyz")
    recorder = Recorder(Program("train", 0, (), tasks, ()), range(1))
    marks = recorder.marks(tasks)
    call = recorder.segment([lambda: None, fail, fail], marks)
    stream = device.stream("compute", lambda: None)
    stream.submit(Segment((call,), tasks, True, marks))
    device.advance()
    task, error = stream.failure
    assert (task.name, type(error)) == ("y", ZeroDivisionError)


def test_memory_is_nan_until_it_is_written(device):
    assert np.isnan(device.allocate(16).view("float32")).all()
    assert np.isnan(device.allocate(16, "pinned").view("float16")).all()


# -- planted faults


@pytest.fixture
def forget(monkeypatch):
    """Lets items of the training step whose first task is named so not wait for a stream."""
    plain = bind.items_of

    def plant(name, stream):
        def forgetful(program, tensors):
            return {
                own: tuple(
                    replace(item, waits=tuple(w for w in item.waits if not w[0].startswith(stream)))
                    if program.name == "train" and item.tasks[0].name.startswith(name) else item
                    for item in items
                )
                for own, items in plain(program, tensors).items()
            }  # fmt: skip

        monkeypatch.setattr(bind, "items_of", forgetful)

    return plant


def run(plan, before=lambda session: None, steps=4, readers=None):
    def work(session):
        before(session)
        return train(session, steps)

    return on_ranks(plan, work, readers)


def plan_of(mesh="data=2", route=STAGED):
    return compile_for(mesh, classifier(48), route=route)


def test_a_forgotten_event_names_both_tasks_and_the_tensor(forget):
    forget("cast", "h2d.read")
    said = (
        r"program train, step 1, task cast \(Cast\): reads batch/image without waiting for"
        r" h2d read train on h2d.read\n  .*jobs.py:\d+"
    )
    with pytest.raises(TaskError, match=said):
        run(plan_of())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("route", [STAGED, "nccl"])
def test_weights_that_are_updated_before_their_reduction_is_done(forget, route):
    forget("scale.1", "h2d" if route == STAGED else "comm.data")
    said = r"reads reduce_sum>B without waiting for .*bucket.data.0 on "
    with pytest.raises(TaskError, match=said):
        run(plan_of(route=route))


@pytest.mark.ranks(2)
def test_what_is_still_being_sent_is_not_overwritten(forget):
    rows = arrays(24)
    made = job(partial(layers, dtype="float32"), 24, 6)
    plan = compile_arrays("stage=2", made, rows, route=CUDA_MPI)
    forget("add.1#", "send.1")
    said = (
        r"overwrites add.1, which add.1>stage1 of micro-batch \d on send.1\S* still sends"
        r"|reads add.1, but its bytes now hold that of micro-batch \d .written by add.1"
    )
    with pytest.raises(TaskError, match=said):
        run(plan, steps=1, readers={"train": MemoryReader(rows, 24)})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("route", ROUTES, ids="by {}".format)
def test_events_that_the_engine_does_not_hand_to_the_device(monkeypatch, route):
    plain = FakeStream.submit
    monkeypatch.setattr(FakeStream, "submit", lambda stream, segment, after: plain(stream, segment))
    with pytest.raises(TaskError, match=r"task .*: starts before .* on .* is done"):
        run(plan_of(route=route))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("route", "first"), [(STAGED, "d2h cast.2>B on d2h"),
                                              (CUDA_MPI, r"cast.2 on compute")])  # fmt: skip
def test_messages_that_the_engine_starts_before_the_device_has_made_them(monkeypatch, route, first):
    monkeypatch.setattr(MessageLane, "_blocked", lambda lane, number: None)
    with pytest.raises(TaskError, match=f"cast.2>B .*: starts before {first} is done"):
        run(plan_of(route=route))


@pytest.mark.ranks(2)
def test_sums_of_route_mpi_that_are_not_waited_for_are_not_there(monkeypatch):
    plan = plan_of(route=CUDA_MPI)
    summed = run(plan)
    monkeypatch.setattr(FakeSide, "mark", lambda side: DONE)
    assert run(plan) != summed


def test_a_slot_of_pinned_memory_that_is_filled_too_early():
    def hurry(session):
        session._programs["train"].read.ahead += 1

    with pytest.raises(TaskError) as found:
        run(plan_of("data=1"), hurry, steps=6)
    if "fills" in str(found.value):
        assert re.search(
            "fills batch/(image|label)@pinned anew, which h2d read train on h2d.read reads",
            str(found.value),
        )
        return
    # Which step it is depends on how far the reader's thread has come.
    at, held = re.search(
        r"step (\d), task h2d read train .*: reads batch/(?:image|label)@pinned, but its bytes now"
        r" hold that of step (\d) .written by read train on read.",
        str(found.value),
    ).groups()
    assert int(held) == int(at) + 2


def test_memory_that_is_given_to_another_tensor_too_early(monkeypatch):
    monkeypatch.setattr(sessions, "verify", lambda plan: None)

    def overlapping(program):
        registers = {r.name: r for r in program.registers}
        held, taken = registers["relu"], registers["out/linear"]
        moved = replace(taken, offset=held.offset)
        return replace(
            program, registers=tuple(moved if r is taken else r for r in program.registers)
        )

    plan = with_program(plan_of("data=1"), "train", overlapping)
    with pytest.raises(TaskError, match=r"reads .*relu, but its bytes now hold out/linear"):
        run(plan)


def test_a_kernel_that_leaves_out_a_part_of_its_output_gives_nan(monkeypatch):
    def lazy(self, shard, out, x):
        return lambda: np.copyto(out[1:], x[1:], casting="unsafe")

    monkeypatch.setattr(Cast, "bind", lazy)
    assert np.isnan(run(plan_of("data=1"), steps=1)[0][0]["loss"])


def test_what_is_being_stored_is_not_overwritten(monkeypatch):
    monkeypatch.setattr(sessions.WriteStream, "idle", False)
    monkeypatch.setattr(sessions.WriteStream, "wait", lambda self: None)

    class Nowhere:
        write = staticmethod(lambda name, start, array: None)
        finish = staticmethod(lambda: None)

    def work(session):
        session.writes.begin = lambda writer, pieces: None
        session.save(Nowhere)
        session.save(Nowhere)

    with pytest.raises(TaskError, match=r"overwrites .*, which is still being stored"):
        on_ranks(plan_of("data=1"), work)
