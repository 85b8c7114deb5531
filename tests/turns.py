"""How tests share the processes of pytest-xdist, `pytest -n N`.

A test that measures time, or whose ranks are processes, would slow those beside it and be slowed
by them. It is marked `alone`, as all in tests/mpi and tests/slurm is, and is run while the other
processes wait. These tests come last, as until then no process has to wait for another.

A file's tests stay in one process, so that what they share is made once; all of tests/slurm is
taken for one file, as it shares a cluster.
"""

import fcntl
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

ALONE = ("tests/mpi/", "tests/slurm/")
TOGETHER = "tests/slurm/"


def is_alone(item):
    """Whether nothing else may run beside this test."""
    return item.nodeid.startswith(ALONE) or item.get_closest_marker("alone") is not None


class Turns:
    """Lets any number of tests run at a time, or one that is alone; known by a folder they share.

    Whoever comes in passes the door, one after another, and is then in the room. What is to be
    alone leaves the door closed behind it and waits until all others have left the room.
    """

    def __init__(self, folder):
        self.door = open(Path(folder) / "door", "w")  # noqa: SIM115
        self.room = open(Path(folder) / "room", "w")  # noqa: SIM115

    @contextmanager
    def turn(self, alone):
        fcntl.flock(self.door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            if not alone:
                fcntl.flock(self.door, fcntl.LOCK_UN)
            yield
        finally:
            fcntl.flock(self.room, fcntl.LOCK_UN)
            fcntl.flock(self.door, fcntl.LOCK_UN)

    def close(self):
        self.door.close()
        self.room.close()


class Worker:
    """In a process that runs tests."""

    def __init__(self, folder):
        self.turns = Turns(folder)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=is_alone)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        with self.turns.turn(is_alone(item)):
            return (yield)

    def pytest_unconfigure(self):
        self.turns.close()


class Controller:
    """In the process that deals tests out."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="turns-")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["turns"] = self.folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        from xdist.scheduler import LoadScopeScheduling

        class ByFile(LoadScopeScheduling):
            def _split_scope(self, nodeid):
                return TOGETHER if nodeid.startswith(TOGETHER) else nodeid.partition("::")[0]

        config.option.loadscopereorder = False
        return ByFile(config, log)

    def pytest_unconfigure(self):
        self.folder.cleanup()


def plugin_of(config):
    """What this process has to do for it; None where pytest-xdist is not at work."""
    if hasattr(config, "workerinput"):
        return Worker(config.workerinput["turns"])
    return Controller() if getattr(config.option, "dist", "no") != "no" else None
