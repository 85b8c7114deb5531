"""Shared: memory that the ranks of a host see of one another, and collectives that work in it.

A collective within a host needs no messages. Of a sum that all are to have, each member adds up its
part, where they hold it, and writes it to all; anything else each member takes from where it lies,
in whatever shape, so that nothing is packed. By messages the same bytes are copied through buffers
of MPI, twice and in small pieces.

    Neighbours             the ranks of this host; `share` lets them see parts of this rank's memory
      └─ SharedOperation   a collective whose members are all of them, on memory that all see
           └─ Meeting      its members wait for one another, by counters in a window of MPI

Memory is shared by its pages: a file of Linux without a name (memfd) takes their place, and others
map it. Where that cannot be, all ranks know it, and messages do what they always did.

An operation goes on only while it is tested itself. Those of a group may be under way at once, if
all are tested by turns, as the engine does, or in one order by all members.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from mpiflow.exec.pages import NAME, File, Segment, opened
from mpiflow.exec.transport import (
    DONE,
    Call,
    Group,
    InTurn,
    Operation,
    Request,
    Source,
    Steps,
    Take,
    Transport,
    in_parts,
)
from mpiflow.graph.sbp import span

_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum}
_COUNTERS = 1 << 13
"""One for each bound operation; what is bound after them goes by messages."""
_BLOCK_BYTES = 1 << 18
"""What is added or copied at a time, so that it stays in the cache until it is written to all."""
_BYTES_A_LOOK = 16 << 20
"""So many are read and written, and what else is in flight is looked at."""

Place = tuple[int, int]
"""The number of a `share`, and the byte in the file that a rank made for it."""
NOWHERE: Place = (-1, 0)
Work = tuple[int, Callable[[], Any]]
"""What is done at a time, and how many bytes it reads and writes."""


@dataclass(slots=True)
class _Shared:
    """What one `share` was about: this rank's memory, and the files of all by their ranks."""

    memory: np.ndarray
    segments: list[Segment]
    files: dict[int, np.ndarray]
    counters: list[int] = field(default_factory=list)
    """Those of the operations on it."""


class Neighbours:
    """The ranks of this host, by their numbers among all; this one is among them.

    A rank is alone where it is the only one, or where MPI has no window for several.
    """

    def __init__(
        self,
        transport: Transport,
        mpi: Any,
        world: Any,
        all_gather: Callable[[Any, bytes], list[bytes]],
    ) -> None:
        """Collective over all ranks, whose communicator `world` is.

        `all_gather` gives what all members of a communicator tell one another.
        """
        self._transport, self._all_gather = transport, all_gather
        self.refused = ""
        """Why memory is not shared that was to be, on which rank. That counters are out is known
        to members of the group alone."""
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
                file = File(memory, ranges)
            except OSError as error:
                reason = str(error)
        everyone = self._transport.all_gather(json.dumps(file.told if file else None).encode())
        told = {rank: json.loads(everyone[rank]) for rank in self.ranks}
        for rank in (rank for rank in told if file and told[rank]):
            try:
                files[rank] = opened(*told[rank])
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
        if call.kind == "all_reduce":
            return self._bind_sum(group, members, communicator, call, nbytes)
        takes = _takes_of(call, group, self._told(communicator, call.send_counts))
        return self.bind_take(group, members, communicator, call, [call.send], takes, nbytes)

    def _bind_sum(
        self, group: Group, members: tuple[int, ...], communicator: Any, call: Call, nbytes: int
    ) -> SharedOperation | None:
        met = self._meet(group, members, communicator, [call.send])
        if met is None:
            return None
        meeting, told = met
        dtype, shape = call.send.dtype, call.send.shape
        buffers = [self._view(members[i], told[i][0], shape, dtype) for i in range(group.size)]
        part = slice(*span(call.send.size, group.size, group.index))
        work = _summed([each[part] for each in buffers], call.reduce, group.index, self._work)
        return SharedOperation(group, call, nbytes, meeting, work)

    def bind_take(
        self,
        group: Group,
        members: tuple[int, ...],
        communicator: Any,
        call: Call,
        shown: Sequence[np.ndarray],
        takes: Sequence[Take],
        nbytes: int,
    ) -> SharedOperation | None:
        """Collective over the group. See `transport.Group.bind_take`."""
        takes = [take for take in takes if take.target.size and not _is_there(take, shown, group)]
        # Others read what this member shows, while it writes what it takes.
        apart = _are_apart([take.target for take in takes], shown)
        met = self._meet(group, members, communicator, shown if apart else None)
        if met is None:
            return None
        meeting, told = met
        work: list[Work] = []
        for take in takes:
            dtype = take.target.dtype
            sources = [
                self._view(members[s.member], told[s.member][s.number], s.shape, dtype)[s.where]
                for s in take.sources
            ]
            work += _taken(take.target, sources, call.reduce)
        return SharedOperation(group, call, nbytes, meeting, work)

    def _meet(
        self,
        group: Group,
        members: tuple[int, ...],
        communicator: Any,
        shown: Sequence[np.ndarray] | None,
    ) -> tuple[Meeting, list[list[Place]]] | None:
        """Collective over the group. What each shows, and a way to wait; None if it is hidden."""
        own = self._counters[self._transport.rank]
        counter = self._unused[-1] if self._unused else -1
        places = [NOWHERE] if shown is None else [self._place(array) for array in shown]
        told = [
            (number, count, [(share, offset) for share, offset in theirs])
            for number, count, theirs in self._told(
                communicator, (counter, int(own[counter]), places)
            )
        ]
        if any(number < 0 for number, *_ in told):
            self.refused = self.refused or f"more than {_COUNTERS} collectives are bound at once"
            return None
        if any(NOWHERE in places for *_, places in told):
            return None
        self._unused.pop()
        self._shared[max(number for number, _ in places)].counters.append(counter)
        counters = [
            (self._counters[rank][number : number + 1], count)
            for rank, (number, count, _) in zip(members, told, strict=True)
        ]
        meeting = Meeting(counters, group.index, self._window.Sync)
        return meeting, [places for *_, places in told]

    def _told(self, communicator: Any, mine: Any) -> list[Any]:
        """Collective over the communicator. What all tell, as JSON has it."""
        everyone = self._all_gather(communicator, json.dumps(mine).encode())
        return [json.loads(data) for data in everyone]

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
                    is_theirs = f"memfd:{NAME}" in line and int(words[4]) not in self._inodes
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
        if not array.nbytes:  # counts as part of the newest share, as what is bound now is
            return next(reversed(self._shared), -1), 0
        start = array.ctypes.data
        for number, shared in self._shared.items():
            for each in shared.segments:
                if each.start <= start and start + array.nbytes <= each.stop:
                    return number, each.offset + start - each.start
        return NOWHERE

    def _view(
        self, rank: int, place: Place, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.ndarray:
        (number, offset), nbytes = place, prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        return self._shared[number].files[rank][offset:][:nbytes].view(dtype).reshape(shape)


def _is_there(take: Take, shown: Sequence[np.ndarray], group: Group) -> bool:
    """Whether a member takes what it shows itself, to where that is."""
    (source, *others) = take.sources
    if others or source.member != group.index:
        return False
    own = shown[source.number].reshape(source.shape)[source.where]
    return own.ctypes.data == take.target.ctypes.data and own.strides == take.target.strides


def _are_apart(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> bool:
    """Whether the first arrays and the second ones, which are contiguous, have no bytes in common.

    Bytes between those of an array count as its own.
    """
    spans = sorted(_bytes_of(each) for each in theirs if each.size)
    stops = list(accumulate((stop for _, stop in spans), max))
    for start, stop in (_bytes_of(each) for each in ours if each.size):
        behind = bisect_left(spans, (stop, 0))  # those before it begin before this one's end
        if behind and stops[behind - 1] > start:
            return False
    return True


def _bytes_of(array: np.ndarray) -> tuple[int, int]:
    """Where the bytes of an array begin and end; it is not empty."""
    start = array.__array_interface__["data"][0]
    steps = zip(array.shape, array.strides, strict=True)
    return start, start + sum((n - 1) * stride for n, stride in steps) + array.itemsize


def _takes_of(call: Call, group: Group, counts: list[tuple[int, ...]]) -> list[Take]:
    """What a member takes in a collective on flat arrays; `counts` are what each sends to each."""
    own, everyone = group.index, range(group.size)
    if call.kind == "reduce_scatter":
        part = slice(*_ends(call.send_counts, own))
        return [Take(call.receive, tuple(Source(i, 0, call.send.shape, part) for i in everyone))]
    parts = in_parts(call.receive, call.receive_counts)
    places = [(0, sum(each)) if len(each) == 1 else _ends(each, own) for each in counts]
    return [Take(parts[i], (Source(i, 0, (sum(counts[i]),), slice(*places[i])),)) for i in everyone]


def _ends(counts: Sequence[int], number: int) -> tuple[int, int]:
    """Where one of the parts of so many elements begins and ends."""
    first = sum(counts[:number])
    return first, first + counts[number]


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
        self._request: Request = DONE

    def _begin(self) -> None:
        self._request = InTurn(self._steps())

    def _is_done(self) -> bool:
        return self._request.test()

    def _steps(self) -> Steps:
        self._meeting.come()
        yield self._meeting
        passed = 0
        for nbytes, do in self._work:
            if passed + nbytes > _BYTES_A_LOOK:
                yield _Later()
                passed = 0
            do()
            passed += nbytes
        self._meeting.come()  # nobody reads, or writes, any more
        yield self._meeting


def _summed(parts: list[np.ndarray], reduce: str, own: int, scratch: np.ndarray) -> list[Work]:
    """Reduce the parts, flat arrays, in their order, and write the result to all of them."""
    # The first two are read before the sum is written, so it can be made in one of them.
    total = parts[own] if own < 2 else None
    others = [each for each in parts if each is not total]
    work = []
    for block in _blocks(parts[0].shape, parts[0].itemsize):
        sources, copies = [each[block] for each in parts], [each[block] for each in others]
        small = scratch.view(parts[0].dtype)[: sources[0].size]
        target = small if total is None else total[block]
        work.append(_reduced(reduce, sources, target, copies))
    return work


def _taken(target: np.ndarray, sources: list[np.ndarray], reduce: str) -> list[Work]:
    """Copy the source, or reduce several in their order."""
    arrays = [target, *sources]
    if all(array.flags.c_contiguous for array in arrays):
        arrays = [array.reshape(-1) for array in arrays]
    work: list[Work] = []
    for block in _blocks(arrays[0].shape, target.itemsize):
        out, *rest = (array[block] for array in arrays)
        if len(rest) == 1:
            work.append((2 * out.nbytes, partial(np.copyto, out, rest[0])))
        else:
            work.append(_reduced(reduce, rest, out, []))
    return work


def _reduced(
    reduce: str, sources: list[np.ndarray], total: np.ndarray, targets: list[np.ndarray]
) -> Work:
    nbytes = total.nbytes * (len(sources) + 1 + len(targets))
    return nbytes, partial(_reduce_block, _UFUNCS[reduce], sources, total, targets)


def _reduce_block(
    ufunc: np.ufunc, sources: list[np.ndarray], total: np.ndarray, targets: list[np.ndarray]
) -> None:
    so_far, *rest = sources
    for source in rest:
        so_far = ufunc(so_far, source, out=total)
    for target in targets:
        target[...] = total


def _blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[Any, ...]]:
    """Where the parts of an array are that have at most `_BLOCK_BYTES`."""
    rows, *rest = shape
    row = prod(rest) * itemsize
    if rest and row > _BLOCK_BYTES:
        yield from ((i, *block) for i in range(rows) for block in _blocks(tuple(rest), itemsize))
        return
    step = max(_BLOCK_BYTES // row, 1) if row else max(rows, 1)
    yield from ((slice(i, min(i + step, rows)),) for i in range(0, rows, step))
