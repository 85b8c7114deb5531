"""The witness names the rank whose connection is the first to break, or nobody."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from mpiflow.exec import witness
from mpiflow.exec.local import run_local
from mpiflow.exec.witness import Lifeline, Witness, sentence

TOKEN = b"token"


class Hall:
    """A witness and what it holds: connections that the test makes, and the pipe of its parent."""

    def __init__(self, size):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.end, self.parent = os.pipe()
        self.witness = Witness(self.listener, self.end, TOKEN, size)
        self.lines = []

    def connect(self, rank, token=TOKEN):
        line = socket.create_connection(self.listener.getsockname())
        known = {"rank": rank, "host": f"node{rank}", "pid": 100 + rank}
        line.sendall(token + b" " + json.dumps(known).encode() + b"\n")
        self.lines.append(line)
        for seconds in (None, None, 0.0):  # to accept, to hear; and nothing more is to be heard
            self.witness.look(seconds)
        return line

    def close(self):
        for line in self.lines:
            line.close()
        os.close(self.end)
        self.witness.close()


@pytest.fixture
def hall():
    made = Hall(3)
    yield made
    made.close()
    if made.parent is not None:
        os.close(made.parent)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_first_to_be_gone_is_named_though_all_are_when_it_looks(hall, order):
    lines = [hall.connect(rank) for rank in range(3)]
    lines[order[0]].sendall(b"step 4\nstep 5\n")
    for rank in order:
        lines[rank].close()
    gone = hall.witness.attend()
    assert (gone.known["rank"], gone.place) == (order[0], "step 5")


def test_where_a_rank_says_goodbye_first_nobody_was_killed(hall):
    lines = [hall.connect(rank) for rank in range(3)]
    lines[1].sendall(b"step 4\ngoodbye\n")
    lines[1].close()
    assert hall.witness.attend() is None


def test_nobody_is_named_where_one_could_not_be_seen(hall):
    hall.connect(0)
    hall.connect(1).close()
    assert hall.witness.attend() is None


def test_it_ends_with_rank_0_before_anybody_has_connected(hall):
    os.close(hall.parent)
    hall.parent = None
    assert hall.witness.attend() is None


def test_who_does_not_know_the_token_is_no_rank(hall):
    hall.connect(0, token=b"other").close()
    hall.connect(1, token=b"other").sendall(b"goodbye\n")
    for rank in range(3):
        hall.connect(rank)
    hall.lines[-1].close()
    assert hall.witness.attend().known["rank"] == 2


def test_the_sentence_says_what_is_known():
    known = {"rank": 2, "host": "node07", "pid": 41}
    assert sentence(known, "step 17", for_memory=False) == (
        "rank 2 (node07) is gone, last seen in step 17: its process 41 was killed or crashed"
    )
    assert sentence(known, "", for_memory=True).endswith(
        "is gone: its process 41 was killed by the system for want of memory"
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("launcher", ["hydra", "other"])
def test_lifelines_start_a_process_only_where_the_launcher_names_the_wrong_rank(
    launcher, tmp_path, monkeypatch
):
    monkeypatch.delenv("HYDI_CONTROL_FD", raising=False)
    if launcher == "hydra":
        monkeypatch.setenv("HYDI_CONTROL_FD", "8")

    def work(transport):
        line = Lifeline(transport, "127.0.0.1", TOKEN, tmp_path / "failure.txt")
        line.connect()
        line.tell("step 3")
        transport.barrier().wait()
        line.close()
        return line._process

    first, second = run_local(2, work)
    assert (first is not None) == (launcher == "hydra")
    assert second is None
    assert first is None or first.returncode == 0
    assert not (tmp_path / "failure.txt").exists()


def test_the_file_needs_nothing_but_the_standard_library():
    """It is run by itself, where mpiflow may not even be on the path."""
    code = f"import runpy, sys; runpy.run_path({witness.__file__!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"numpy", "mpiflow"} & set(done.stdout.split())


@pytest.mark.ranks(2)
def test_a_lifeline_may_be_let_go_by_any_thread_and_before_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDI_CONTROL_FD", "8")

    def work(transport):
        line = Lifeline(transport, "127.0.0.1", TOKEN, tmp_path / "failure.txt")
        if transport.rank == 1:
            thread = threading.Thread(target=line.let_go)
            thread.start()
            thread.join()
        line.connect()
        transport.barrier().wait()
        if transport.rank == 1:
            line._socket.close()  # it ends without another word
        else:
            time.sleep(0.3)
            line.close()

    run_local(2, work)
    assert not (tmp_path / "failure.txt").exists()
