"""How beats travel: by datagram from every rank to a few that watch, beside MPI.

    every rank ── UDP ──> watcher 0, 1, 2        on other hosts than each other where there are some
               └─ file in the run folder ──>     where a rank's datagrams are not answered

Datagrams need no connection, so that a rank that hangs, or is gone, holds up nobody. They may be
lost: the next one says the same. MPI is used once, for the addresses, by the main thread.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpiflow.exec.transport import Transport

WATCHERS = 3
FOLDER = ".beats"
_LOCALHOST = "127.0.0.1"
_NOWHERE = "0.0.0.0"
_LARGEST = 60_000
_ANSWER = b"heard"
_UNANSWERED = 12
"""So many beats without an answer, and a rank leaves files."""


@dataclass(frozen=True, slots=True)
class Address:
    """A rank: the host that it is on, its process there, the port where it listens.

    `space` tells containers apart: processes see each other where it is the same.
    """

    rank: int
    host: str
    pid: int
    port: int
    space: int = 0


class Post:
    """The socket of one rank, for what it sends and what it hears."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        """Collective. `folder` is one that all ranks can see, for those that hear no answer."""
        self.rank = transport.rank
        self._folder = folder / FOLDER
        hosts = [data.decode() for data in transport.all_gather(transport.host.encode())]
        one_host = len(set(hosts)) == 1
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_LOCALHOST if one_host else "", 0))
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1]
        mine = [self.rank, transport.host, os.getpid(), port, _process_space()]
        everyone = transport.all_gather(json.dumps(mine).encode())
        self.addresses = [Address(*json.loads(data)) for data in everyone]
        token = secrets.token_hex(8).encode() if self.rank == 0 else None
        self.token = transport.broadcast(token)
        self.watchers = choose_watchers(self.addresses)
        self._one_host = one_host
        self._targets = {
            rank: (self.address(rank), self.addresses[rank].port)
            for rank in self.watchers
            if rank != self.rank
        }
        self._unanswered = dict.fromkeys(self._targets, 0)

    def address(self, rank: int) -> str:
        """Where the host of a rank can be reached."""
        return _LOCALHOST if self._one_host else _resolved(self.addresses[rank].host)

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send to every watcher but oneself; leave a file for those that have never answered."""
        deaf = False
        for rank, target in self._targets.items():
            # A host that is down or not known is a watcher that does not answer.
            with suppress(OSError):
                self._socket.sendto(self.token + data[:_LARGEST], target)
            if rank in self._unanswered:
                self._unanswered[rank] += 1
                deaf |= self._unanswered[rank] > _UNANSWERED
        if deaf:
            with suppress(OSError):
                self._leave(data)

    def receive(self) -> Iterator[bytes]:
        """What has come from other ranks; beats are answered, which is all that is sent back."""
        while True:
            try:
                data, sender = self._socket.recvfrom(65_535)
            except OSError:
                return
            if not data.startswith(self.token):
                continue
            data = data[len(self.token) :]
            if data.startswith(_ANSWER):
                self._unanswered.pop(int(data[len(_ANSWER) :] or -1), None)
                continue
            with suppress(OSError):
                self._socket.sendto(self.token + _ANSWER + str(self.rank).encode(), sender)
            yield data

    def files(self) -> Iterator[bytes]:
        """What ranks have left in the folder."""
        with suppress(OSError):
            for path in self._folder.glob("rank-*"):
                data = path.read_bytes()
                if data.startswith(self.token):  # a run that failed may have left some too
                    yield data[len(self.token) :]

    def close(self) -> None:
        """Give back the socket, and what lies in the folder."""
        self._socket.close()
        with suppress(OSError):
            (self._folder / f"rank-{self.rank}").unlink(missing_ok=True)
            self._folder.rmdir()  # the last one

    def _leave(self, data: bytes) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"new-{self.rank}"
        path.write_bytes(self.token + data)
        path.replace(self._folder / f"rank-{self.rank}")


def _process_space() -> int:
    """The namespace of this process's id; 0 where there are none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _resolved(host: str) -> str:
    """The address of a host; one that leads nowhere if its name is not known here."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return _NOWHERE


def choose_watchers(addresses: list[Address]) -> list[int]:
    """The first rank of each of the first hosts, then other ranks; never more than `WATCHERS`."""
    firsts = list({address.host: address.rank for address in reversed(addresses)}.values())[::-1]
    others = [address.rank for address in addresses if address.rank not in firsts]
    return [*firsts, *others][:WATCHERS]
