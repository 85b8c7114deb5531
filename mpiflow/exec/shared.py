"""Shared: memory that the ranks of a host see of one another, and collectives that work in it.

A collective within a host needs no messages: each member adds up its part of what all hold, where
they hold it, and writes the sum to all. By messages the same bytes are copied through buffers of
MPI, twice and in small pieces.

    Neighbours           the ranks of this host; `share` lets them see parts of this rank's memory
      └─ SharedOperation   a collective whose members are all of them, on memory that all see
           └─ Meeting        its members wait for one another, by counters in a window of MPI

Memory is shared by its pages: a file of Linux without a name (memfd) takes their place, and others
map it. Where that cannot be, all ranks of the host know it, and messages do what they always did.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
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
)
from mpiflow.graph.sbp import span

PAGE = mmap.PAGESIZE
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum}
_COUNTERS = 1 << 13
"""One for each bound operation; what is bound after them goes by messages."""
_BLOCK_BYTES = 1 << 18
"""What is added or copied at a time, so that it stays in the cache until it is written to all."""
_BLOCKS_A_LOOK = 16
"""So many, and what else is in flight is looked at: 4 MiB."""
_MAP_FIXED = 0x10
_TOKEN_BYTES = 16
_NAME = "mpiflow-shared"

Place = tuple[int, int]
"""A file of a rank, and the byte in it."""
Work = Callable[[], Any]
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Segment:
    """Pages of this rank that lie in one of its files."""

    start: int
    stop: int
    file: int
    offset: int


class Neighbours:
    """The ranks of this host, by their numbers among all; this one is among them.

    Made by `neighbours_of`, closed by all together.
    """

    def __init__(self, transport: Transport, mpi: Any, node: Any) -> None:
        """Collective over the ranks of the host, whose communicator `node` is."""
        self.ranks: tuple[int, ...] = tuple(node.allgather(transport.rank))
        self._transport, self._node = transport, node
        self._segments: list[_Segment] = []
        self._files = 0
        self._own: set[str] = set()
        """The inodes of its files."""
        self._seen: dict[tuple[int, int], np.ndarray] = {}
        self._taken = 0
        self._work = np.empty(_BLOCK_BYTES, np.uint8)  # one thread works on one block at a time
        self.refused = ""
        """Why memory that was to be shared is not, if it is not."""
        # The standard has a memory barrier for windows alone: what is written before a counter is
        # seen by who sees the counter. On x86 it costs nothing; Arm needs it.
        self._window = mpi.Win.Allocate_shared(8 * _COUNTERS, 8, mpi.INFO_NULL, node)
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self._counters = {
            rank: np.frombuffer(self._window.Shared_query(index)[0], np.int64)
            for index, rank in enumerate(self.ranks)
        }
        self._counters[transport.rank][:] = 0
        self._window.Sync()
        node.Barrier()

    def share(self, memory: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        """Collective over all ranks. Let the others see these bytes (start, stop) of it.

        It comes from `device.host_bytes`: its pages hold nothing else, and zeros until now.
        """
        number, own, refused = self._files, None, ""
        self._files += 1
        try:
            own = _File(memory, ranges)
        except (OSError, AttributeError) as error:  # no Linux, no room, or too many files
            refused = str(error)
        everyone = self._transport.all_gather(json.dumps(own.told if own else None).encode())
        seen = {}
        for rank in self.ranks if own else ():
            try:
                seen[rank, number] = _opened(json.loads(everyone[rank]))
            except (OSError, ValueError) as error:
                refused = str(error)
        reasons = [text.decode() for text in self._transport.all_gather(refused.encode())]
        if own is not None:
            self._own.add(str(os.fstat(own.number).st_ino))
            os.close(own.number)
        self.refused = next((reasons[rank] for rank in self.ranks if reasons[rank]), "")
        if own is not None and not self.refused:
            self._seen.update(seen)
            self._segments += own.segments(number)

    def bind(
        self, group: Group, members: tuple[int, ...], communicator: Any, call: Call, nbytes: int
    ) -> SharedOperation | None:
        """Collective over the group. The operation, or None if some memory of it is not shared."""
        own = self._taken if self._taken < _COUNTERS else -1
        places = self._place(call.send), self._place(call.receive)
        told = communicator.allgather((own, *places, call.send_counts))
        if any(-1 in (slot, send[0], receive[0]) for slot, send, receive, _ in told):
            return None
        self._taken += 1
        counters = [
            self._counters[rank][slot : slot + 1]
            for rank, (slot, *_) in zip(members, told, strict=True)
        ]
        meeting = Meeting(counters, group.index, self._window.Sync)
        sent = [
            self._view(rank, place, sum(counts), call.send.dtype)
            for rank, (_, place, _, counts) in zip(members, told, strict=True)
        ]
        make = _WORK[call.kind]
        work = make(call, group, sent, [counts for *_, counts in told], self._work)
        return SharedOperation(group, call, nbytes, meeting, work)

    def seen_bytes(self) -> int:
        """The memory of other ranks that this one has touched: it counts as resident in both."""
        found, is_theirs = 0, False
        with open("/proc/self/smaps") as maps:
            for line in maps:
                words = line.split()
                if words[0] == "Rss:":
                    found += is_theirs * int(words[1]) * 1024
                elif not words[0].endswith(":"):  # the head of a mapping; the fifth is its inode
                    is_theirs = f"memfd:{_NAME}" in line and words[4] not in self._own
        return found

    def close(self) -> None:
        """Collective. Give back the window and the communicator."""
        self._seen.clear()
        self._counters.clear()
        self._window.Unlock_all()
        self._window.Free()
        self._node.Free()

    def _place(self, array: np.ndarray) -> Place:
        """Where others see it; (-1, 0) if they do not."""
        if not array.nbytes:
            return 0, 0
        start = array.ctypes.data
        for each in self._segments:
            if each.start <= start and start + array.nbytes <= each.stop:
                return each.file, each.offset + start - each.start
        return -1, 0

    def _view(self, rank: int, place: Place, count: int, dtype: np.dtype[Any]) -> np.ndarray:
        if not count:
            return np.empty(0, dtype)
        file, offset = place
        return self._seen[rank, file][offset : offset + count * dtype.itemsize].view(dtype)


def neighbours_of(transport: Transport, mpi: Any, world: Any) -> Neighbours | None:
    """Collective. Of a rank that has any; None also where its MPI has no windows for them."""
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    if node.Get_size() > 1:
        try:
            return Neighbours(transport, mpi, node)
        except (NotImplementedError, mpi.Exception):
            return None
    node.Free()
    return None


class _File:
    """A file without a name that has taken the place of pages of an array."""

    def __init__(self, memory: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        first = memory.ctypes.data
        self._runs = _whole_pages([(first + start, first + stop) for start, stop in ranges])
        nbytes = PAGE + sum(stop - start for start, stop in self._runs)
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.number = os.memfd_create(_NAME)
        os.ftruncate(self.number, nbytes)
        os.pwrite(self.number, token.encode(), 0)
        for run in self.segments(0):
            _map_at(run.start, run.stop - run.start, self.number, run.offset)
        self.told = [os.getpid(), self.number, nbytes, token]
        """What others open it by."""

    def segments(self, number: int) -> list[_Segment]:
        """The pages, in the file of that number; they follow the page of the token."""
        offset, found = PAGE, []
        for start, stop in self._runs:
            found.append(_Segment(start, stop, number, offset))
            offset += stop - start
        return found


def _whole_pages(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages that these bytes touch, those that meet as one."""
    runs: list[tuple[int, int]] = []
    for start, stop in sorted((a // PAGE * PAGE, -(-b // PAGE) * PAGE) for a, b in ranges if b > a):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(stop, runs[-1][1])
        else:
            runs.append((start, stop))
    return runs


def _map_at(address: int, nbytes: int, file: int, offset: int) -> None:
    """Let pages of this process be those of a file; OSError if not. Python's mmap cannot."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = call(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, file, offset)
    if found != address:
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes")


def _opened(told: list[Any] | None) -> np.ndarray:
    """The bytes of a neighbour's file. OSError or ValueError if they cannot be seen from here."""
    if told is None:
        raise ValueError("a rank has no memory to share")
    pid, number, nbytes, token = told
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        mapped = mmap.mmap(file, nbytes)
    finally:
        os.close(file)
    if mapped[:_TOKEN_BYTES] != token.encode():
        raise ValueError(f"process {pid} of a rank is another one here")
    return np.frombuffer(mapped, np.uint8)


class Meeting(Request):
    """Members wait for one another: each has a counter that it alone moves on."""

    def __init__(self, counters: list[np.ndarray], own: int, sync: Callable[[], None]) -> None:
        self._own, self._sync = counters[own], sync
        self._others = [counter for i, counter in enumerate(counters) if i != own]
        self._count = 0

    def come(self) -> None:
        """Say that this member is there, and that what it wrote can be read."""
        self._count += 1
        self._sync()
        self._own[0] = self._count
        self._sync()

    def test(self) -> bool:
        """Whether all have come; what they wrote can be read then."""
        for counter in self._others:
            if counter[0] < self._count:
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
        self._request: Request = DONE

    def _begin(self) -> None:
        self._request = InTurn(self._steps())

    def _is_done(self) -> bool:
        return self._request.test()

    def _steps(self) -> Steps:
        self._meeting.come()
        yield self._meeting
        for first in range(0, len(self._work), _BLOCKS_A_LOOK):
            if first:
                yield _Later()
            for block in self._work[first : first + _BLOCKS_A_LOOK]:
                block()
        self._meeting.come()  # nobody reads, or writes, any more
        yield self._meeting


def _all_reduce(
    call: Call, group: Group, sent: list[np.ndarray], counts: list[Counts], work: np.ndarray
) -> list[Work]:
    """Reduces this member's part of all, and writes it to all."""
    start, stop = span(call.send.size, group.size, group.index)
    parts = [each[start:stop] for each in sent]
    return _reduced(call.reduce, parts, parts, work)


def _reduce_scatter(
    call: Call, group: Group, sent: list[np.ndarray], counts: list[Counts], work: np.ndarray
) -> list[Work]:
    """Reduces this member's part of all into its own buffer."""
    start = sum(call.send_counts[: group.index])
    parts = [each[start : start + call.receive.size] for each in sent]
    return _reduced(call.reduce, parts, [call.receive], work)


def _all_gather(
    call: Call, group: Group, sent: list[np.ndarray], counts: list[Counts], work: np.ndarray
) -> list[Work]:
    """Copies what each has."""
    own = _parts(call.receive, call.receive_counts)
    if call.send.ctypes.data == own[group.index].ctypes.data:  # it is in its place
        own[group.index] = own[group.index][:0]
    pairs = zip(own, sent, strict=True)
    return [block for target, source in pairs for block in _copied(target, source)]


def _all_to_all(
    call: Call, group: Group, sent: list[np.ndarray], counts: list[Counts], work: np.ndarray
) -> list[Work]:
    """Copies the part for this member of what each has."""
    own = _parts(call.receive, call.receive_counts)
    theirs = [_parts(each, n)[group.index] for each, n in zip(sent, counts, strict=True)]
    pairs = zip(own, theirs, strict=True)
    return [block for target, source in pairs for block in _copied(target, source)]


_WORK = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _reduced(
    reduce: str, sources: list[np.ndarray], targets: list[np.ndarray], work: np.ndarray
) -> list[Work]:
    """Block by block, the reduction of the sources in their order, written to all targets."""
    size, dtype = sources[0].size, sources[0].dtype
    return [
        partial(
            _reduce_block,
            _UFUNCS[reduce],
            work.view(dtype)[: part.stop - part.start],
            [each[part] for each in sources],
            [each[part] for each in targets],
        )
        for part in _blocks(size, dtype.itemsize)
    ]


def _reduce_block(
    ufunc: np.ufunc, work: np.ndarray, sources: list[np.ndarray], targets: list[np.ndarray]
) -> None:
    total, *rest = sources
    for source in rest:
        ufunc(total, source, out=work)
        total = work
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


def _parts(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """An array, flat, in parts of so many elements."""
    stops = list(accumulate(counts))
    return [array[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
