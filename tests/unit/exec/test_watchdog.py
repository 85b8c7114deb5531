"""How long is too long, who speaks, and how beats travel where datagrams do not."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from jobs import classifier_plan, look, on_ranks, train

from mpiflow.exec import watchdog
from mpiflow.exec.beat import Beat, unpack
from mpiflow.exec.blame import SILENT
from mpiflow.exec.failure import Failure
from mpiflow.exec.local import LocalWorld, run_local
from mpiflow.exec.position import Position
from mpiflow.exec.post import _UNANSWERED, Address, Post, choose_watchers
from mpiflow.exec.watchdog import FIRST, LEAST_SECONDS, PREDICTIONS, STANDS, Watch, process_state
from mpiflow.plan.records import COMPUTE, READ

PERIOD = 0.25


def watch(ranks=3, host=""):
    addresses = [Address(rank, host or f"node{rank}", os.getpid(), 1) for rank in range(ranks)]
    return Watch(classifier_plan(f"data={ranks}"), addresses, 0, PERIOD)


class Ranks:
    """Ranks that send beats to a watch, in its time."""

    def __init__(self, watch, ranks=3):
        self.watch, self.number, self.run = watch, 0, 1
        self.still = [0.0] * ranks
        self.silent = set()

    def tick(self, seconds=PERIOD, moving=True, program="train", expected=0.0):
        self.watch.pass_time(seconds)
        self.number += 1
        self.run += moving
        for rank, still in enumerate(self.still):
            self.still[rank] = 0.0 if moving else still + seconds
            position = Position(self.run, program, self.run, ((COMPUTE, 3),), True, expected)
            if rank not in self.silent:
                self.watch.hear(Beat(rank, self.number, position, still=self.still[rank]))
        return self.watch.still()

    def stand(self, seconds, **more):
        for _ in range(round(seconds / PERIOD)):
            still = self.tick(moving=False, **more)
        return still


def test_a_job_may_stand_still_as_long_as_its_own_pace_says():
    ranks = Ranks(watch())
    ranks.tick()
    assert ranks.watch.patience() == FIRST * LEAST_SECONDS
    for _ in range(5):
        assert ranks.tick() == 0.0
    assert ranks.watch.patience() == LEAST_SECONDS
    assert ranks.stand(3) == pytest.approx(3)
    ranks.tick()
    assert ranks.watch.patience() == pytest.approx(STANDS * 3)
    ranks.tick(expected=2.0)
    assert ranks.watch.patience() == pytest.approx(PREDICTIONS * 2)
    ranks.tick(program="evaluate")
    assert ranks.watch.patience() == pytest.approx(FIRST * STANDS * 3)


def test_a_rank_that_is_not_heard_is_silent_though_others_move_or_wait():
    ranks = Ranks(watch())
    for _ in range(20):
        ranks.tick()
    ranks.silent.add(1)
    assert ranks.stand(6) == pytest.approx(6)
    assert ranks.watch.silent(1) == pytest.approx(6)
    assert not ranks.watch.silent(2)
    verdict = ranks.watch.judge()
    assert (verdict.kind, verdict.rank) == (SILENT, 1)
    assert verdict.text.startswith("rank 1 (node1) has been silent for 6 s")


def test_ranks_that_stand_still_are_told_of_though_nobody_finds_out_why():
    ranks = Ranks(watch())
    ranks.tick(program="none of the plan's")
    ranks.stand(9, program="none of the plan's")
    text = ranks.watch.judge().text
    assert text.startswith("the ranks have stood still for 9 s; who holds them up cannot be told: ")
    assert "has no program none of the plan's" in text.splitlines()[0]
    assert "Traceback" in text


def test_an_old_beat_or_one_of_no_rank_changes_nothing():
    ranks = Ranks(watch())
    for _ in range(5):
        ranks.tick()
    ranks.watch.hear(Beat(1, 2, Position(9)))
    ranks.watch.hear(Beat(7, 99, Position(9)))
    assert ranks.stand(2) == pytest.approx(2)


@pytest.mark.ranks(2)
def test_the_position_says_which_kernel_runs_and_what_is_done():
    plan = classifier_plan("data=2")
    program = plan.program("train")
    kernels = [program.tasks[i] for i in dict(program.order)[COMPUTE]]
    at = next(i for i, task in enumerate(kernels) if task.op == "Relu")

    def work(session):
        found = []
        where = lambda: found.append((session.position(), session.thread()))  # noqa: E731
        look(session, "train", "Relu", where)
        train(session, 3)
        return found, session.position(), threading.get_ident()

    for found, after, main in on_ranks(plan, work):
        assert [(p.run, p.program, p.step) for p, _ in found] == [
            (run, "train", run - 2) for run in (2, 3, 4)
        ]
        for position, thread in found:
            assert position.computing
            assert position.head(COMPUTE) == at
            assert position.head(READ) == 1
            assert position.seconds == kernels[at].seconds
            assert thread != main
        assert after == Position(4)


def test_those_who_watch_are_on_different_hosts_where_there_are_some():
    def on(*hosts):
        return choose_watchers([Address(r, host, 1, 1) for r, host in enumerate(hosts)])

    assert on("a", "a", "b", "b", "c", "d") == [0, 2, 4]
    assert on("a", "a", "b", "b") == [0, 2, 1]
    assert on("a", "a", "a", "a") == [0, 1, 2]
    assert on("a") == [0]


@pytest.mark.ranks(4)
def test_beats_travel_by_datagram_and_by_files_where_those_are_lost(tmp_path):
    def work(transport):
        post = Post(transport, tmp_path)
        got = set()
        if transport.rank == 3:
            # A port where nobody listens, as behind a firewall.
            post._targets = {rank: (host, 9) for rank, (host, _) in post._targets.items()}
        beat = Beat(transport.rank, 1)
        for _ in range(_UNANSWERED + 2):
            post.send(beat.pack())
            deadline = time.monotonic() + 5
            while transport.rank == 0 and not {1, 2} <= got and time.monotonic() < deadline:
                got |= {unpack(data).rank for data in post.receive()}
            transport.barrier().wait()
        left = {unpack(data).rank for data in post.files()}
        transport.barrier().wait()
        post.close()
        return got, left

    (got, left), *_ = run_local(4, work)
    assert got == {1, 2}
    assert 3 in left
    assert not list((tmp_path / ".beats").glob("rank-*"))


def test_what_does_not_carry_the_token_is_dropped(tmp_path):
    first, second = (Post(LocalWorld(1).transports[0], tmp_path) for _ in range(2))
    target = first._socket.getsockname()
    second._socket.sendto(b"nonsense", target)
    second._socket.sendto(first.token + b"data", target)
    assert list(first.receive()) == [b"data"]
    first.close()
    second.close()


@pytest.mark.parametrize(("space", "gone"), [(0, True), (1, False)])
def test_a_process_of_another_container_is_not_taken_for_one_that_is_gone(space, gone):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    addresses = [Address(0, "a", os.getpid(), 1), Address(1, "a", ended.pid, 1, space)]
    seen = Watch(classifier_plan("data=2"), addresses, 0, PERIOD)
    seen.pass_time(60.0)
    assert seen.gone() == gone


def test_a_host_knows_whether_a_process_runs_is_stopped_or_gone():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert process_state(process.pid) == "whose process is stopped"
    process.kill()
    process.communicate()
    assert process_state(process.pid) == watchdog.GONE
    assert "runs" in process_state(os.getpid())


def pulse_of(watched, checks):
    pulse = watchdog.Pulse(LocalWorld(1).transports[0], checks)
    pulse.watched = watched
    return pulse


def test_a_rank_tells_for_how_long_it_is_in_the_same_place():
    watched = SimpleNamespace(
        reads=SimpleNamespace(doing=""),
        writes=SimpleNamespace(doing="", waited=False),
        position=lambda: place,
        thread=lambda: None,
    )
    place = Position(1, "train", 0)
    checks = itertools.count()
    pulse = pulse_of(watched, lambda: next(checks))
    assert [pulse(0.5).still for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    place = Position(1, "train", 1)
    assert pulse(0.5).still == 0.0
    beats = [pulse(1.0) for _ in range(3)]
    assert [bool(beat.stack) for beat in beats] == [False, False, True]
    assert 'watchdog.py", line' in beats[-1].stack
    assert [beat.deaf for beat in beats] == [0.0, 0.0, 0.0]
    asleep = pulse_of(watched, lambda: 7)
    assert [asleep(1.0).deaf for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_rank_without_a_session_gets_on_as_long_as_its_lines_change():
    transport, made = LocalWorld(1).transports[0], []
    begun, first, second = (threading.Event() for _ in range(3))

    def main():
        made.append(watchdog.Pulse(transport, lambda: 0))
        begun.set()
        first.wait()
        begun.set()
        while not second.is_set():
            time.sleep(0.001)

    thread = threading.Thread(target=main)
    thread.start()
    begun.wait()
    (pulse,) = made
    time.sleep(0.1)
    assert [pulse(0.5).still for _ in range(3)] == [0.0, 0.5, 1.0]
    begun.clear()
    first.set()
    begun.wait()
    assert pulse(0.5).still == 0.0
    transport.waiting = True  # goes through the lines of a loop, and gets nowhere
    assert pulse(0.5).still == 0.0
    assert [pulse(0.5).still for _ in range(3)] == [0.5, 1.0, 1.5]
    second.set()
    thread.join()


def test_between_programs_a_rank_gets_on_as_long_as_its_lines_change():
    place, lines = Position(2), itertools.count()
    watched = SimpleNamespace(
        reads=SimpleNamespace(doing=""),
        writes=SimpleNamespace(doing="", waited=False),
        position=lambda: place,
        thread=lambda: None,
    )
    pulse = pulse_of(watched, lambda: 0)
    pulse._line = lambda: f"restore.py:{next(lines)}"
    assert [pulse(0.5).still for _ in range(3)] == [0.0, 0.0, 0.0]
    for place in (Position(3, "train", 0), Position(3)):  # in a program, and waiting for files
        watched.writes.waited = not place.program
        assert [pulse(0.5).still for _ in range(3)] == [0.0, 0.5, 1.0]


def test_until_all_ranks_have_begun_they_have_longer():
    seen = Watch(classifier_plan("data=2"), [Address(r, "a", 0, 1) for r in range(2)], 0, PERIOD)
    numbers = itertools.count(1)

    def heard(rank, *place):
        seen.hear(Beat(rank, next(numbers), Position(*place)))
        return seen.patience()

    longer, first = watchdog.OPENING_SECONDS, watchdog.FIRST * watchdog.LEAST_SECONDS
    assert seen.patience() == longer
    assert heard(0, 1, "initialise") == longer  # nothing was heard of the other
    assert heard(1) == longer
    assert heard(1, 1, "initialise") == first
    assert heard(1, 1) == longer  # loads weights, it may be
    assert heard(1, 2, "train") == first


def test_what_another_run_has_left_is_no_beat(tmp_path):
    (old, new) = (Post(LocalWorld(1).transports[0], tmp_path) for _ in range(2))
    old._leave(b"old")
    assert list(new.files()) == []
    new._leave(b"new")
    assert list(new.files()) == [b"new"]
    old.close()
    new.close()
    assert not (tmp_path / ".beats").exists()


def test_a_rank_that_fails_alone_is_not_watched_any_more(tmp_path):
    (transport,) = LocalWorld(1).transports
    with (
        pytest.raises(ValueError, match="planted"),
        watchdog.watching(transport, Failure(transport), classifier_plan("data=1"), tmp_path),
    ):
        assert "watchdog" in [thread.name for thread in threading.enumerate()]
        raise ValueError("planted")
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_what_ranks_took_to_begin_makes_nobody_wait_longer_afterwards():
    seen = Watch(classifier_plan("data=1"), [Address(0, "a", 0, 1)], 0, PERIOD)
    seen.pass_time(40.0)
    assert seen.still() == 40.0
    for number in (1, 2):
        seen.hear(Beat(0, number, Position(number, "train")))
        seen.still()
    assert seen.patience() == watchdog.LEAST_SECONDS
