"""Shared: memory that the ranks of a host see of one another, and collectives that work in it.

A collective within a host needs no messages: each member adds up its part of what all hold, where
they hold it, and writes the sum to all. By messages the same bytes are copied through buffers of
MPI, twice and in small pieces.

    Neighbours             the ranks of this host; `share` lets them see parts of this rank's memory
      └─ SharedOperation   a collective whose members are all of them, on memory that all see
           └─ Meeting      its members wait for one another, by counters in a window of MPI

Memory is shared by its pages: a file of Linux without a name (memfd) takes their place, and others
map it. Where that cannot be, all ranks know it, and messages do what they always did.

An operation goes on only while it is tested itself. Those of a group may be under way at once, if
all are tested by turns, as the engine does, or in one order by all members.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mpiflow.exec.transport import (
    DONE,
    Call,
    Group,
    InTurn,
    Operation,
    Request,
    Steps,
    Transport,
    in_parts,
)
from mpiflow.graph.sbp import span

PAGE = mmap.PAGESIZE
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum}
_COUNTERS = 1 << 13
"""One for each bound operation; what is bound after them goes by messages."""
_BLOCK_BYTES = 1 << 18
"""What is added or copied at a time, so that it stays in the cache until it is written to all."""
_BYTES_A_LOOK = 16 << 20
"""So many are read and written, and what else is in flight is looked at."""
_MAP_FIXED = 0x10
_TOKEN_BYTES = 16
_NAME = "mpiflow-shared"

Place = tuple[int, int]
"""The number of a `share`, and the byte in the file that a rank made for it."""
NOWHERE: Place = (-1, 0)
Work = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Segment:
    """Pages of this rank, and where they lie in the file."""

    start: int
    stop: int
    offset: int


@dataclass(slots=True)
class _Shared:
    """What one `share` was about: this rank's memory, and the files of all by their ranks."""

    memory: np.ndarray
    segments: list[_Segment]
    files: dict[int, np.ndarray]
    counters: list[int] = field(default_factory=list)
    """Those of the operations on it."""


class Neighbours:
    """The ranks of this host, by their numbers among all; this one is among them.

    A rank is alone where it is the only one, or where MPI has no window for several.
    """

    def __init__(self, transport: Transport, mpi: Any, world: Any) -> None:
        """Collective over all ranks, whose communicator `world` is."""
        self._transport = transport
        self.refused = ""
        """Why memory is not shared that was to be, on which rank; alike on all ranks."""
        self._next = 0
        """The number of the next share."""
        self._shared: dict[int, _Shared] = {}
        self._inodes: set[int] = set()
        self._unused = list(range(_COUNTERS))[::-1]
        self._work = np.empty(_BLOCK_BYTES, np.uint8)  # one thread works on one block at a time
        self._node = world.Split_type(mpi.COMM_TYPE_SHARED)
        self._window: Any = None
        reason = ""
        if self._node.Get_size() > 1:
            try:
                self._window = mpi.Win.Allocate_shared(8 * _COUNTERS, 8, mpi.INFO_NULL, self._node)
            except (NotImplementedError, mpi.Exception) as error:
                reason = f"MPI has no window: {error}"
        reasons = self._node.allgather(reason)
        self.ranks: tuple[int, ...] = tuple(self._node.allgather(transport.rank))
        if any(reasons):
            self.ranks = (transport.rank,)
        self._agree(reason)
        if len(self.ranks) > 1:
            self._count()

    def _count(self) -> None:
        """Collective over the host. Make the counters.

        The standard has a memory barrier for windows alone: what is written before a counter is
        seen by who sees the counter. On x86 it costs nothing; Arm needs it.
        """
        self._window.Lock_all()
        self._counters = {
            rank: np.frombuffer(self._window.Shared_query(index)[0], np.int64)
            for index, rank in enumerate(self.ranks)
        }
        self._counters[self._transport.rank][:] = 0
        self._window.Sync()
        self._node.Barrier()

    def share(self, memory: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        """Collective over all ranks. Let neighbours see these bytes (start, stop) of it.

        It comes from `device.host_bytes`: its pages hold nothing else, and zeros until now. It is
        kept until `unshare`.
        """
        file, files, reason = None, {}, ""
        if ranges and len(self.ranks) > 1:
            try:
                file = _File(memory, ranges)
            except OSError as error:
                reason = str(error)
        everyone = self._transport.all_gather(json.dumps(file.told if file else None).encode())
        told = {rank: json.loads(everyone[rank]) for rank in self.ranks}
        for rank in (rank for rank in told if file and told[rank]):
            try:
                files[rank] = _opened(*told[rank])
            except (OSError, ValueError) as error:
                reason = reason or f"memory of rank {rank}: {error}"
        is_whole = self._agree(reason)
        if file is not None:
            file.close()
            self._inodes.add(file.inode)
            if is_whole:
                self._shared[self._next] = _Shared(memory, file.segments, files)
        self._next += 1

    def unshare(self, memory: np.ndarray) -> None:
        """Forget it; nothing that is bound to it is started any more, here or elsewhere."""
        for number in [n for n, each in self._shared.items() if each.memory is memory]:
            self._unused += self._shared.pop(number).counters

    def _agree(self, reason: str) -> bool:
        """Collective over all ranks. Whether none of this host has a reason against it."""
        reasons = [text.decode() for text in self._transport.all_gather(reason.encode())]
        first = next((f"rank {r}: {text}" for r, text in enumerate(reasons) if text), "")
        self.refused = self.refused or first
        return not any(reasons[rank] for rank in self.ranks)

    def bind(
        self, group: Group, members: tuple[int, ...], communicator: Any, call: Call, nbytes: int
    ) -> SharedOperation | None:
        """Collective over the group. The operation, or None if some memory of it is not shared."""
        own = self._counters[self._transport.rank]
        counter = self._unused[-1] if self._unused else -1
        sent, received = self._place(call.send), self._place(call.receive)
        if call.kind in ("reduce_scatter", "all_to_all") and _overlap(call.send, call.receive):
            received = NOWHERE  # others read what this member would write
        mine = counter, int(own[counter]), sent, received, call.send_counts
        told = communicator.allgather(mine)
        if any(number < 0 for number, *_ in told):
            self.refused = self.refused or f"more than {_COUNTERS} collectives are bound at once"
            return None
        if any(NOWHERE in places for _, _, *places, _ in told):
            return None
        self._unused.pop()
        self._shared[max(sent[0], received[0])].counters.append(counter)
        counters = [
            (self._counters[rank][number : number + 1], count)
            for rank, (number, count, *_) in zip(members, told, strict=True)
        ]
        views = [
            self._view(rank, place, sum(counts), call.send.dtype)
            for rank, (_, _, place, _, counts) in zip(members, told, strict=True)
        ]
        meeting = Meeting(counters, group.index, self._window.Sync)
        work = _work_of(call, group, views, [counts for *_, counts in told], self._work)
        return SharedOperation(group, call, nbytes, meeting, work)

    def seen_bytes(self) -> int:
        """The memory of other ranks that this one has touched: it counts as resident in both."""
        if not self._inodes:
            return 0  # nor need there be a /proc
        found, is_theirs = 0, False
        with open("/proc/self/smaps") as maps:
            for line in maps:
                words = line.split()
                if words[0] == "Rss:":
                    found += is_theirs * int(words[1]) * 1024
                elif not words[0].endswith(":"):  # the head of a mapping; the fifth is its inode
                    is_theirs = f"memfd:{_NAME}" in line and int(words[4]) not in self._inodes
        return found

    def close(self) -> None:
        """Collective. Give back the window and the communicator."""
        self._shared.clear()
        if self._window is not None:
            if len(self.ranks) > 1:
                self._counters.clear()
                self._window.Unlock_all()
            self._window.Free()
        self._node.Free()

    def _place(self, array: np.ndarray) -> Place:
        """Where others see it; NOWHERE if they do not."""
        if not array.nbytes:
            return next(iter(self._shared), -1), 0
        start = array.ctypes.data
        for number, shared in self._shared.items():
            for each in shared.segments:
                if each.start <= start and start + array.nbytes <= each.stop:
                    return number, each.offset + start - each.start
        return NOWHERE

    def _view(self, rank: int, place: Place, count: int, dtype: np.dtype[Any]) -> np.ndarray:
        number, offset = place
        if not count:
            return np.empty(0, dtype)
        return self._shared[number].files[rank][offset:][: count * dtype.itemsize].view(dtype)


def _overlap(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two flat arrays have bytes in common."""
    first, second = sorted((one, two), key=lambda array: int(array.ctypes.data))
    both = one.nbytes and two.nbytes
    return bool(both) and first.ctypes.data + first.nbytes > second.ctypes.data


class _File:
    """A file without a name that has taken the place of pages of an array. OSError if it cannot."""

    def __init__(self, memory: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no files in memory (memfd)")
        first = memory.ctypes.data
        runs = _whole_pages([(first + start, first + stop) for start, stop in ranges])
        self.segments: list[_Segment] = []
        nbytes = PAGE  # that of the token
        for start, stop in runs:
            self.segments.append(_Segment(start, stop, nbytes))
            nbytes += stop - start
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._number = os.memfd_create(_NAME)
        try:
            os.ftruncate(self._number, nbytes)
            os.pwrite(self._number, token.encode(), 0)
            for run in self.segments:
                _map(run.start, run.stop - run.start, _MAP_FIXED, self._number, run.offset)
        except OSError:
            self.close()
            raise
        self.inode = os.fstat(self._number).st_ino
        self.told = os.getpid(), self._number, nbytes, token
        """What others open it by."""

    def close(self) -> None:
        """Its pages stay; nobody can open it any more."""
        os.close(self._number)


def _whole_pages(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages that these bytes touch, those that meet as one."""
    runs: list[tuple[int, int]] = []
    for start, stop in sorted((a // PAGE * PAGE, -(-b // PAGE) * PAGE) for a, b in ranges if b > a):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(stop, runs[-1][1])
        else:
            runs.append((start, stop))
    return runs


def _map(address: int, nbytes: int, flags: int, file: int, offset: int) -> int:
    """The address at which pages of this process are those of a file; OSError if not.

    Python's mmap can take no address, and keeps a descriptor for each.
    """
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = call(address, nbytes, access, mmap.MAP_SHARED | flags, file, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return int(found)


def _unmap(address: int, nbytes: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _opened(pid: int, number: int, nbytes: int, token: str) -> np.ndarray:
    """The bytes of a neighbour's file. OSError or ValueError if they cannot be seen from here."""
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        address = _map(0, nbytes, 0, file, 0)
    finally:
        os.close(file)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, address, nbytes).atexit = False
    if bytes(memory[:_TOKEN_BYTES]) != token.encode():
        raise ValueError(f"its process {pid} is another one here")
    return np.ctypeslib.as_array(memory)


class Meeting(Request):
    """Members wait for one another: each has a counter that it alone moves on."""

    def __init__(
        self, counters: list[tuple[np.ndarray, int]], own: int, sync: Callable[[], None]
    ) -> None:
        """The counters come with what they have counted before."""
        self._own, self._first = counters[own]
        self._others = [each for i, each in enumerate(counters) if i != own]
        self._sync, self._count = sync, 0

    def come(self) -> None:
        """Say that this member is there, and that what it wrote can be read."""
        self._count += 1
        self._sync()
        self._own[0] = self._first + self._count
        self._sync()

    def test(self) -> bool:
        """Whether all have come; what they wrote can be read then."""
        for counter, first in self._others:
            if counter[0] - first < self._count:
                return False
        self._sync()
        return True


class _Later(Request):
    """Done when it is asked for the second time."""

    def __init__(self) -> None:
        self._asked = False

    def test(self) -> bool:
        asked, self._asked = self._asked, True
        return asked


class SharedOperation(Operation):
    """A collective in memory that all its members see: they meet, work, and meet again."""

    def __init__(
        self, group: Group, call: Call, nbytes: int, meeting: Meeting, work: list[Work]
    ) -> None:
        super().__init__(group, call, nbytes)
        self._meeting, self._work = meeting, work
        self._at_once = max(1, _BYTES_A_LOOK // _BLOCK_BYTES // (2 * group.size))
        self._request: Request = DONE

    def _begin(self) -> None:
        self._request = InTurn(self._steps())

    def _is_done(self) -> bool:
        return self._request.test()

    def _steps(self) -> Steps:
        self._meeting.come()
        yield self._meeting
        for first in range(0, len(self._work), self._at_once):
            if first:
                yield _Later()
            for block in self._work[first : first + self._at_once]:
                block()
        self._meeting.come()  # nobody reads, or writes, any more
        yield self._meeting


def _work_of(
    call: Call,
    group: Group,
    sent: list[np.ndarray],
    counts: list[tuple[int, ...]],
    work: np.ndarray,
) -> list[Work]:
    """What this member does, in blocks; it sees what each has to send, in parts of these counts."""
    own = group.index
    if call.kind == "all_reduce":
        part = slice(*span(call.send.size, group.size, own))
        parts = [each[part] for each in sent]
        if own < 2:  # the first two are read before the sum is written, so it can be made in one
            others = [each for i, each in enumerate(parts) if i != own]
            return _reduced(call.reduce, parts, parts[own], others)
        return _reduced(call.reduce, parts, work.view(call.send.dtype), parts)
    if call.kind == "reduce_scatter":
        parts = [in_parts(each, n)[own] for each, n in zip(sent, counts, strict=True)]
        return _reduced(call.reduce, parts, call.receive, [])
    targets = in_parts(call.receive, call.receive_counts)
    if call.kind == "all_to_all":
        sent = [in_parts(each, n)[own] for each, n in zip(sent, counts, strict=True)]
    elif call.send.ctypes.data == targets[own].ctypes.data:  # gathered where it is
        targets[own], sent[own] = targets[own][:0], sent[own][:0]
    pairs = zip(targets, sent, strict=True)
    return [block for target, source in pairs for block in _copied(target, source)]


def _reduced(
    reduce: str, sources: list[np.ndarray], total: np.ndarray, targets: list[np.ndarray]
) -> list[Work]:
    """The reduction of the sources in their order, made in `total` and copied to all targets.

    A `total` that is shorter than they are is scratch, for a block.
    """
    size = sources[0].size
    whole = total.size >= size
    return [
        partial(
            _reduce_block,
            _UFUNCS[reduce],
            [each[part] for each in sources],
            total[part] if whole else total[: part.stop - part.start],
            [each[part] for each in targets],
        )
        for part in _blocks(size, total.itemsize)
    ]


def _reduce_block(
    ufunc: np.ufunc, sources: list[np.ndarray], total: np.ndarray, targets: list[np.ndarray]
) -> None:
    so_far, *rest = sources
    for source in rest:
        so_far = ufunc(so_far, source, out=total)
    for target in targets:
        target[...] = total


def _copied(target: np.ndarray, source: np.ndarray) -> list[Work]:
    return [
        partial(np.copyto, target[part], source[part])
        for part in _blocks(target.size, target.itemsize)
    ]


def _blocks(size: int, itemsize: int) -> Iterator[slice]:
    step = max(_BLOCK_BYTES // itemsize, 1)
    return (slice(i, min(i + step, size)) for i in range(0, size, step))
