"""Streams of a step run side by side, and wait for each other only where the plan says so."""

import signal
import threading
import time
from functools import partial

import pytest

from mpiflow.exec.device import Cpu
from mpiflow.exec.engine import Bell, Engine
from mpiflow.exec.lanes import Failed, KernelLane, MessageLane
from mpiflow.exec.local import LocalWorld
from mpiflow.exec.segments import InlineStream, Segment, attentive
from mpiflow.plan.handshakes import Item
from mpiflow.plan.records import COMPUTE, Task

COMM = "comm.data"


def item(name, *waits):
    return Item((Task(name, COMPUTE, COMPUTE, "Copy"),), waits)


class Message:
    """A message that is over when `done` is set."""

    def __init__(self, log, name):
        self.log, self.name, self.done = log, name, threading.Event()

    def start(self):
        self.log.append(f"start {self.name}")

    def test(self):
        if self.done.is_set():
            self.log.append(f"end {self.name}")
            return True
        return False


def lanes_of(kernels, calls, items, messages):
    """A compute and a communication stream; `polled` as with MPI."""
    segments = tuple(Segment((c,), i.tasks, True) for i, c in zip(kernels, calls, strict=True))
    lanes = {
        COMPUTE: KernelLane(COMPUTE, kernels, segments),
        COMM: MessageLane(COMM, items, tuple(messages), ((),) * len(items), polled=True),
    }
    for lane in lanes.values():
        lane.tie(lanes)
    return lanes


@pytest.fixture
def engine():
    return Engine(LocalWorld(1).transports[0])


@pytest.fixture
def stream(engine):
    made = Cpu().stream(COMPUTE, engine.wake)
    yield made
    made.close()


def run(engine, stream, lanes):
    lanes[COMPUTE].use(stream)
    engine.run(tuple(lanes.values()), "train", 0)


def test_a_message_goes_on_while_a_kernel_runs(engine, stream):
    log = []
    message, waiting = Message(log, "a"), threading.Event()

    def kernel():
        """Ends only if the message is started and polled meanwhile."""
        while "start a" not in log:
            time.sleep(1e-4)
        message.done.set()
        while "end a" not in log:
            time.sleep(1e-4)
        waiting.set()

    kernels = (item("f"), item("g"))
    run(engine, stream, lanes_of(kernels, (int, kernel), (item("a", (COMPUTE, 1)),), [message]))
    assert waiting.is_set()


def test_items_wait_for_other_streams_and_not_for_one_another(engine, stream):
    log = []
    messages = [Message(log, name) for name in "ab"]
    kernels = (item("f"), item("g", (COMM, 1)))

    def first():
        log.append("f")

    def second():
        log.append("g")
        messages[1].done.set()

    messages[0].done.set()
    items = (item("a", (COMPUTE, 1)), item("b"))
    run(engine, stream, lanes_of(kernels, (first, second), items, messages))
    assert [entry for entry in log if len(entry) == 1 or entry.endswith("a")] == [
        "f", "start a", "end a", "g"
    ]  # fmt: skip
    assert log.index("start b") < log.index("g") < log.index("end b")


@pytest.mark.parametrize("inline", [True, False])
def test_an_error_of_a_kernel_names_its_task(engine, stream, inline):
    def fail():
        raise ValueError("planted")

    lanes = lanes_of((item("f"), item("g")), (int, fail), (item("a"),), [Message([], "a")])
    with pytest.raises(Failed) as caught:
        run(engine, InlineStream() if inline else stream, lanes)
    assert caught.value.task.name == "g"
    assert isinstance(caught.value.__cause__, ValueError)


def looking(engine, *calls):
    """Kernels on the thread of messages, which looks at these after each kernel."""
    tasks = tuple(Task(f"k{i}", COMPUTE, COMPUTE, "Copy", seconds=1.0) for i in range(len(calls)))
    return attentive(Segment(calls, tasks, True), engine.look, 0.5)


def test_a_message_goes_on_between_kernels_of_the_same_thread(engine):
    log = []
    message = Message(log, "a")
    lanes = lanes_of((item("k0"),), (print,), (item("a"),), (message,))
    seen = []

    def second():
        seen.extend(log)
        message.done.set()

    lanes[COMPUTE].segments = (looking(engine, lambda: log.append("k0"), second, log.clear),)
    lanes[COMM].move()  # it is in flight when the kernels begin
    message.test = lambda: log.append("look") or Message.test(message)
    engine._lanes = tuple(lanes.values())
    stream = InlineStream()
    lanes[COMPUTE].use(stream)
    lanes[COMPUTE].move()
    assert (seen, log) == (["start a", "k0", "look"], [])
    assert (stream.failure, stream.done, lanes[COMM].done) == (None, 1, 0)


def test_a_message_begins_before_the_next_segment_of_the_same_thread(engine):
    log = []
    message = Message(log, "a")
    message.done.set()
    calls = [partial(log.append, name) for name in "fgh"]
    kernels = tuple(item(name) for name in "fgh")
    lanes = lanes_of(kernels, calls, (item("a", (COMPUTE, 1)),), [message])
    run(engine, InlineStream(), lanes)
    assert log == ["f", "start a", "g", "end a", "h"]


def test_a_message_that_fails_between_kernels_is_what_the_error_names(engine):
    lanes = lanes_of((item("k0"),), (print,), (item("a"),), (Message([], "a"),))

    def lost():
        raise OSError("no route to host")

    lanes[COMM]._messages[0].test = lambda: False
    kernels = (lambda: setattr(lanes[COMM]._messages[0], "test", lost), print)
    lanes[COMPUTE].segments = (looking(engine, *kernels),)
    lanes[COMPUTE]._waits = (((lanes[COMM], 0),),)
    with pytest.raises(Failed) as raised:
        run(engine, InlineStream(), dict(sorted(lanes.items())))
    assert raised.value.task.name == "a"
    assert "no route" in str(raised.value.__cause__)


def test_check_is_called_while_a_kernel_runs_and_ends_the_step(engine, stream):
    release = threading.Event()

    def check():
        raise KeyboardInterrupt

    engine._transport.check = check
    lanes = lanes_of((item("f"),), (release.wait,), (item("a"),), [Message([], "a")])
    try:
        with pytest.raises(KeyboardInterrupt):
            run(engine, stream, lanes)
        assert lanes[COMPUTE].done == 0
    finally:
        release.set()


def test_waiting_for_a_kernel_costs_next_to_no_time_of_the_processor(engine, stream):
    message = Message([], "a")
    message.done.set()
    items = (item("a", (COMPUTE, 1)),)
    lanes = lanes_of((item("f"),), (lambda: time.sleep(0.2),), items, [message])
    before = time.thread_time()
    run(engine, stream, lanes)
    assert time.thread_time() - before < 0.02


@pytest.mark.parametrize("predicted", [100.0, 0.0])
def test_a_long_message_is_moved_on_without_sleep(engine, monkeypatch, predicted):
    began, sleeps, wait = time.perf_counter(), [], Bell.wait

    class Long:
        def start(self):
            """Nothing is to be done."""

        def test(self):
            return bool(sleeps) or time.perf_counter() > began + 0.02

    def noted(bell, seconds):
        sleeps.append(seconds)
        return wait(bell, seconds)

    monkeypatch.setattr(Bell, "wait", noted)
    task = Task("send", COMPUTE, COMM, "all_reduce", seconds=predicted)
    lane = MessageLane(COMM, (Item((task,), ()),), (Long(),), ((),), polled=True)
    lane.tie({COMM: lane})
    engine.run([lane], "train", 0)
    assert bool(sleeps) == (not predicted)


def test_a_sleep_ends_in_time_though_signals_interrupt_it():
    """Some come just as it is over, when what is left of the time to sleep is less than nothing."""
    bell, end = Bell(), time.monotonic() + 5.0

    def interrupt(number, frame):
        assert time.monotonic() < end, "it sleeps on"

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 3e-4, 1.3e-4)
    try:
        for _ in range(500):
            bell.wait(1e-4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_bell_that_rang_while_nobody_waited_ends_one_wait():
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.wait(60.0)
    assert not bell.wait(0.0)
