"""The last word on a rank that was killed: a small process that sees it end, and says so.

    rank 0, 1, 2 ── TCP ──> witness, beside rank 0        what breaks first is the rank that is gone

A launcher ends all ranks as soon as one is gone, before any of them can speak, and Hydra, MPICH's,
does not always name that one. It does not end the witness, to which every rank holds a lifeline: a
connection, which breaks in the moment in which its process ends. Where one that breaks has not
been let go of before, its rank was killed.

The witness is this file, run by itself, so that it is small and there at once: it imports nothing
but the standard library. It ends with the first lifeline, and says nothing unless it holds all.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiflow.exec.transport import Transport

_LOCALHOST = "127.0.0.1"
_CONNECT_SECONDS = 2.0
_END_SECONDS = 5.0
_LARGEST = 65_536
_GOODBYE = b"goodbye"


def is_needed(size: int) -> bool:
    """Whether the launcher is one that does not name the rank that was killed."""
    return size > 1 and "HYDI_CONTROL_FD" in os.environ


class Lifeline:
    """A rank's connection to the witness; rank 0 starts that, unless it is not needed.

    A rank that cannot be connected leaves the witness without a word to say.
    """

    def __init__(self, transport: Transport, host: str, token: bytes, report: Path) -> None:
        """Collective. `host` is the address of rank 0; a report is left in that file too."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._released = False
        port = 0
        if transport.rank == 0 and is_needed(transport.size):
            port = self._start(host, token, transport.size, report)
        everyone = transport.broadcast(str(port).encode() if transport.rank == 0 else None)
        self._address = host, int(everyone)
        hello = {"rank": transport.rank, "host": transport.host, "pid": os.getpid()}
        self._hello = b"%s %s\n" % (token, json.dumps(hello).encode())

    def _start(self, host: str, token: bytes, size: int, report: Path) -> int:
        """The port of a new witness; 0 where there can be none."""
        try:
            listener = socket.create_server((_LOCALHOST if host == _LOCALHOST else "", 0))
        except OSError:
            return 0
        task = {"listener": listener.fileno(), "size": size, "token": token.decode()}
        with listener, suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # launchers end process groups
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({**task, "report": str(report)}).encode() + b"\n")
            self._process.stdin.flush()
            return int(listener.getsockname()[1])
        return 0

    def connect(self) -> None:
        """Tell the witness who this is. It may take seconds where hosts do not hear each other."""
        if not self._address[1]:
            return
        with suppress(OSError):
            line = socket.create_connection(self._address, _CONNECT_SECONDS)
            line.sendall(self._hello)
            line.setblocking(False)
            self._socket = line
        if self._released:  # meanwhile, by another thread
            self.let_go()

    def tell(self, place: str) -> None:
        """Tell the witness where this rank is."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendall(place.encode()[:_LARGEST].replace(b"\n", b" ") + b"\n")

    def let_go(self) -> None:
        """This rank ends as it should, or has said why it does not. Any thread may call."""
        self._released = True
        self.tell(_GOODBYE.decode())

    def close(self) -> None:
        """Let go, and give back the connection and the process."""
        self.let_go()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class _Over(Exception):
    """The witness is no longer needed; `gone` is the rank whose lifeline is broken, if one is."""

    def __init__(self, gone: _Rank | None) -> None:
        super().__init__()
        self.gone = gone


@dataclass(slots=True)
class _Rank:
    """The witness's end of a lifeline: what the rank said of itself, and where it is."""

    socket: socket.socket
    known: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    broken: bool = False
    _rest: bytes = b""

    def lines(self) -> list[bytes]:
        """What the rank has said since, to its end if the connection is `broken`."""
        data = self._rest
        try:
            while more := self.socket.recv(_LARGEST):
                data += more
            self.broken = True
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
        *lines, self._rest = data.split(b"\n")
        return lines


class Witness:
    """Holds the lifelines of all ranks.

    `parent` is a descriptor that is at its end when rank 0 is, which may never get to connect.
    """

    def __init__(self, listener: socket.socket, parent: int, token: bytes, size: int) -> None:
        self._token, self._size = token, size
        self._known: set[int] = set()
        # On Linux it gives what happened in the order in which it did.
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(parent, selectors.EVENT_READ, self._orphaned)

    def attend(self) -> _Rank | None:
        """The rank that is the first to be gone; None where that is not known, or one lets go."""
        try:
            while True:
                self.look()
        except _Over as over:
            return over.gone if len(self._known) == self._size else None

    def look(self, seconds: float | None = None) -> None:
        """Take in what has happened, or what happens next."""
        for key, _ in self._selector.select(seconds):
            key.data(key.fileobj)

    def close(self) -> None:
        """Let go of all."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        rank = _Rank(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(rank))

    def _orphaned(self, parent: int) -> None:
        if len(self._known) < self._size:
            raise _Over(None)
        self._selector.unregister(parent)

    def _hear(self, rank: _Rank) -> None:
        for line in rank.lines():
            if rank.known and line == _GOODBYE:
                raise _Over(None)
            if rank.known:
                rank.place = line.decode(errors="replace")
            elif line.startswith(self._token + b" "):
                rank.known = json.loads(line[len(self._token) :])
                self._known.add(rank.known["rank"])
        if rank.broken and rank.known:
            raise _Over(rank)
        if rank.broken:
            self._selector.unregister(rank.socket)
            rank.socket.close()


def kills_for_memory() -> int:
    """How many processes the system has killed on this host for want of memory, if it says so."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def sentence(known: dict[str, Any], place: str, *, for_memory: bool) -> str:
    """What became of a rank, in the user's words."""
    cause = "was killed by the system for want of memory" if for_memory else "was killed or crashed"
    seen = f", last seen in {place}" if place else ""
    return (
        f"rank {known['rank']} ({known['host']}) is gone{seen}: its process {known['pid']} {cause}"
    )


def main() -> None:
    """The process of the witness; what it needs to know comes in one line of standard input."""
    task = json.loads(sys.stdin.readline())
    before = kills_for_memory()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each rank
    listener = socket.socket(fileno=task["listener"])
    token = task["token"].encode()
    gone = Witness(listener, sys.stdin.fileno(), token, task["size"]).attend()
    if gone is None:
        return
    here = gone.known["host"] == socket.gethostname()
    text = sentence(gone.known, gone.place, for_memory=here and kills_for_memory() > before)
    with suppress(OSError, ValueError):
        sys.stderr.write(f"mpiflow: {text}\n")
        sys.stderr.flush()
    with suppress(OSError):
        Path(task["report"]).write_text(f"mpiflow: {text}\n")


if __name__ == "__main__":
    main()
