"""Recorder and meter: what they keep of steps, by a clock that the tests move."""

import numpy as np
import pytest
from jobs import classifier_plan, on_ranks, train

from mpiflow.errors import DataError, TaskError
from mpiflow.exec.meter import COLLECTIVES, COPIES, INPUT, ITEMS, KERNELS, Meter
from mpiflow.exec.trace import Recorder
from mpiflow.ops.elementwise import Relu
from mpiflow.plan import tracefile
from mpiflow.plan.differences import differences
from mpiflow.plan.unroll import unroll


class Ticking:
    """A clock that each kernel moves by its own seconds."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        def work():
            self.now += seconds

        return work


@pytest.fixture
def clock():
    return Ticking()


@pytest.fixture
def program():
    return unroll(classifier_plan("data=2").program("train"))


def kernels_of(program):
    return [task for task in program.tasks if task.kind == "compute"]


def test_kernels_are_kept_with_their_own_start_and_stop(program, clock):
    recorder = Recorder(program, range(4, 6), clock)
    first, second, third = kernels_of(program)[:3]
    calls = [
        recorder.segment([clock.spend(1), clock.spend(2)], recorder.marks([first, second])),
        clock.spend(8),
        recorder.segment([clock.spend(4)], recorder.marks([third])),
    ]
    for step in (4, 5):
        recorder.begin(step)
        for call in calls:
            call()
        recorder.end()
    trace = recorder.taken(0, "host", "digest")
    assert trace.first == 5
    np.testing.assert_array_equal(trace.times[0, :3], [[100, 101], [101, 103], [111, 115]])
    np.testing.assert_array_equal(trace.times[1], trace.times[0] + 15)
    assert np.isnan(trace.times[0, 3:]).all()
    np.testing.assert_array_equal(trace.steps, [[100, 115], [115, 130]])
    plan = classifier_plan("data=2").program("train")
    assert {d.task: d.measured for d in differences(plan, trace)} == {
        first.name: 1, second.name: 2, third.name: 4
    }  # fmt: skip


def test_reads_ahead_are_kept_with_the_step_that_they_are_for(program, clock):
    recorder = Recorder(program, range(4, 6), clock)
    read = next(task for task in program.tasks if task.kind == "read")
    recorder.begin(4)
    for step in (3, 5, 6):  # neither the one before nor the one after is wanted
        recorder.began(read, step)
        clock.spend(step)()
        recorder.ended(read, step)
    recorder.end()
    recorder.begin(5)
    recorder.end()
    trace = recorder.taken(0, "host", "digest")
    at = trace.firings.index((read.name, 0))
    np.testing.assert_array_equal(trace.times[1, at], [103, 108])
    assert np.isnan(trace.times[0, at]).all()


def test_a_run_that_ends_early_keeps_the_steps_that_it_did(program, clock):
    recorder = Recorder(program, range(10), clock)
    for step in range(3):
        recorder.begin(step)
        recorder.end()
    assert len(recorder.taken(0, "host", "digest").times) == 3


def test_recording_looks_at_the_clock_once_a_kernel(program):
    looks = []

    def clock():
        looks.append(None)
        return float(len(looks))

    recorder = Recorder(program, range(1), clock)
    tasks = kernels_of(program)
    call = recorder.segment([int] * len(tasks), recorder.marks(tasks))
    recorder.begin(0)
    looks.clear()
    call()
    assert len(looks) == len(tasks) + 1


def test_of_a_task_with_more_calls_the_first_is_its_kernel(program, clock):
    first, second = kernels_of(program)[:2]
    recorder = Recorder(program, range(1), clock)
    marks = recorder.marks([first, first, second])
    recorder.begin(0)
    recorder.segment([clock.spend(1), clock.spend(16), clock.spend(2)], marks)()
    recorder.end()
    times = recorder.taken(0, "host", "digest").times[0, :2]
    np.testing.assert_array_equal(times, [[100, 101], [117, 119]])


@pytest.mark.parametrize("steps", [range(0), range(2, 4), range(4, 6)])
def test_a_kernel_that_fails_is_named_whether_it_is_recorded_or_not(monkeypatch, steps):
    bind, calls = Relu.bind, []

    def bind_with_fault(self, *arrays):
        kernel = bind(self, *arrays)

        def kernel_with_fault():
            calls.append(None)
            if len(calls) == 4:
                raise FloatingPointError("planted")
            kernel()

        return kernel_with_fault

    def work(session):
        session.observe("train", Meter(), steps)
        train(session, 6)

    monkeypatch.setattr(Relu, "bind", bind_with_fault)
    with pytest.raises(TaskError, match=r"step 4, task relu \(Relu\): FloatingPointError: planted"):
        on_ranks(classifier_plan("data=1"), work)


def test_the_items_of_a_step_add_up_to_its_median(clock):
    meter = Meter(clock)
    kernels = meter.timed(KERNELS, clock.spend(4))
    waits = [meter.timed(item, clock.spend(item)) for item in (COLLECTIVES, COPIES, INPUT)]
    for extra in (1, 2, 1, 2, 40, 1, 2, 1):
        began = clock.now
        for call in (kernels, *waits, clock.spend(extra)):
            call()
        meter.step(clock.now - began)
    found = meter.typical()
    assert list(found) == list(ITEMS)
    assert sum(found.values()) == pytest.approx(11.5)  # the one that took long does not count
    assert found["compute"] == pytest.approx(4, rel=0.06)
    assert found["input"] == pytest.approx(3, rel=0.06)
    assert found["overhead"] == pytest.approx(1.5, rel=0.1)


def test_without_steps_there_are_no_items():
    assert Meter().typical() == {}


def test_a_session_tells_every_firing_of_the_steps_that_are_wanted():
    def work(session):
        meter = Meter()
        recorder = session.observe("train", meter, range(2, 4))
        session.expect("train", range(6))
        outputs = [session.run("train", step) for step in range(6)]
        meter.step(1.0)
        return outputs, recorder.taken(session.transport.rank, "host", "digest")

    def plain(session):
        session.expect("train", range(6))
        return [session.run("train", step) for step in range(6)]

    plan = classifier_plan("data=2")
    expected = on_ranks(plan, plain)
    for (outputs, trace), same in zip(on_ranks(plan, work), expected, strict=True):
        assert outputs == same
        assert trace.first == 3
        assert len(trace.firings) == len(plan.program("train").tasks)
        assert not np.isnan(trace.times).any()
        assert (trace.times[..., 1] >= trace.times[..., 0]).all()
        assert (trace.steps[:, 1] > trace.steps[:, 0]).all()


# -- files


def some_trace(rank=3):
    times = np.arange(24.0).reshape(2, 6, 2)
    clock = tracefile.Clock(tracefile.Offset(1, 2, 3e-6), tracefile.Offset(11, 2.5, 4e-6))
    firings = tuple((f"t{i}", i % 2) for i in range(6))
    return tracefile.RankTrace(
        rank, "nid1", "train", "abc", 7, firings, times, times[:, 0], clock
    )  # fmt: skip


def test_a_trace_comes_back_from_its_file(tmp_path):
    made = some_trace()
    path = made.save(tmp_path / "trace")
    assert tracefile.recorded_ranks(tmp_path / "trace") == {3: path}
    found = tracefile.load(path)
    np.testing.assert_array_equal(found.times, made.times)
    np.testing.assert_array_equal(found.steps, made.steps)
    assert (found.rank, found.host, found.first) == (3, "nid1", 7)
    assert (found.firings, found.clock) == (made.firings, made.clock)
    assert [p.name for p in (tmp_path / "trace").iterdir()] == ["rank-00003.npz"]


def test_aligned_times_follow_a_clock_that_drifts():
    clock = some_trace().clock
    np.testing.assert_allclose(clock.aligned(np.array([1.0, 6.0, 11.0])), [-1.0, 3.75, 8.5])
    assert clock.uncertainty == 4e-6
    np.testing.assert_array_equal(tracefile.SAME.aligned(np.array([5.0])), [5.0])


@pytest.mark.parametrize("damage", ["cut", "text", "shape", "format"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, damage):
    path = some_trace().save(tmp_path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:400])
    elif damage == "text":
        path.write_text("rank 3 was here")
    else:
        with np.load(path) as file:
            arrays = dict(file)
        if damage == "shape":
            arrays["times"] = arrays["times"][:, :5]
        else:
            text = arrays["header"].tobytes().replace(b'"format": 1', b'"format": 9')
            arrays["header"] = np.frombuffer(text, np.uint8)
        np.savez(path, **arrays)
    with pytest.raises(DataError, match="rank-00003"):
        tracefile.load(path)
