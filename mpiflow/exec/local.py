"""Many ranks in one process, one thread each: the transport of tests and of single-rank runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import reduce as fold
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from mpiflow.errors import TaskError
from mpiflow.exec.transport import Aborted, Call, Check, Group, Operation, Request, Transport
from mpiflow.plan.records import SEND

Result = TypeVar("Result")
_REDUCE = {"sum": np.add, "max": np.maximum}


class Meeting(Request):
    """What the members of a group bring to one collective; done when the last has come."""

    def __init__(self, world: LocalWorld, size: int) -> None:
        self.items: list[Any] = [None] * size
        self.missing = size
        self.done = threading.Event()
        self.wakes: list[Callable[[], None]] = []
        self._world = world

    def test(self) -> bool:
        """Whether all have come."""
        self._world.raise_if_failed()
        return self.done.is_set()

    def wait(self, check: Check | None = None) -> None:
        """Sleep until all have come."""
        while not self.done.wait(0.02 if check else None):
            self._world.raise_if_failed()
            if check:
                check()
        self._world.raise_if_failed()

    def end(self) -> None:
        """Wake all who wait for it."""
        self.done.set()
        for wake in self.wakes:
            wake()


class LocalWorld:
    """The ranks of one process, with a transport for each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.transports = tuple(LocalTransport(self, rank) for rank in range(size))
        self._lock = threading.Lock()
        self._meetings: dict[Hashable, Meeting] = {}
        self._failed = False

    def meet(
        self,
        key: Hashable,
        size: int,
        index: int,
        item: Any,
        finish: Callable[[list[Any]], None],
        wake: Callable[[], None] | None = None,
    ) -> Meeting:
        """Bring `item` to the meeting `key`; the last of `size` members calls `finish`.

        `wake` is called when the meeting is done, or will never be.
        """
        with self._lock:
            self.raise_if_failed()
            meeting = self._meetings.setdefault(key, Meeting(self, size))
            meeting.items[index] = item
            if wake is not None:
                meeting.wakes.append(wake)
            meeting.missing -= 1
            if not meeting.missing:
                finish(meeting.items)
                del self._meetings[key]
                meeting.end()
        return meeting

    def fail(self) -> None:
        """Wake every rank that waits, now or later, with Aborted."""
        with self._lock:
            self._failed = True
            for meeting in self._meetings.values():
                meeting.end()

    def raise_if_failed(self) -> None:
        """Raise Aborted once any rank failed."""
        if self._failed:
            raise Aborted("another rank failed")


class LocalTransport(Transport):
    """One rank of a LocalWorld."""

    polled = False

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(rank, world.size)
        self._world = world
        self._sequence = 0

    def group(self, members: tuple[int, ...], label: str) -> Group:
        """Collective. A group, once all ranks have named theirs."""
        groups = self._exchange("group", (members, label))
        for member in members:
            theirs = groups[member]
            if theirs != (members, label):
                raise TaskError(
                    f"rank {self.rank} makes group {label} {members}, rank {member} {theirs[1]} "
                    f"{theirs[0]}; the plans of the ranks differ"
                )
        return LocalGroup(self, self._world, members, label, self._sequence)

    def broadcast(self, data: bytes | None) -> bytes:
        """Collective. The data of rank 0."""
        return self._exchange("broadcast", data)[0]

    def all_gather(self, data: bytes) -> list[bytes]:
        """Collective. The data of all ranks."""
        return self._exchange("all_gather", data)

    def gather(self, data: bytes) -> list[bytes] | None:
        """Collective. The data of all ranks, on rank 0."""
        everything = self._exchange("gather", data)
        return everything if self.rank == 0 else None

    def barrier(self) -> Request:
        """Collective. Done once all ranks have come."""
        return self._meet("barrier", None)

    def abort(self, code: int) -> None:
        """Wake the other ranks, which then end with Aborted."""
        self._world.fail()

    def close(self) -> None:
        """Collective. Leave together."""
        self._exchange("close", None)

    def _exchange(self, kind: str, data: Any) -> list[Any]:
        meeting = self._meet(kind, data)
        self.waiting = True
        meeting.wait(self.check)
        self.waiting = False
        return [item for _, item in meeting.items]

    def _meet(self, kind: str, data: Any) -> Meeting:
        self._sequence = self.entered = self._sequence + 1
        item = kind, data
        return self._world.meet(self._sequence, self.size, self.rank, item, _check_kinds)


class LocalGroup(Group):
    """A group whose collectives the member that comes last computes for all, in rank order."""

    def __init__(
        self,
        transport: LocalTransport,
        world: LocalWorld,
        members: tuple[int, ...],
        label: str,
        made: int,
    ) -> None:
        super().__init__(label, len(members), members.index(transport.rank))
        self._transport, self._world = transport, world
        self._members = members
        self._made = made
        self._sequence = 0
        self._messages: Counter[tuple[int, int, int]] = Counter()

    def _bind(self, call: Call, nbytes: int) -> Operation:
        return _LocalOperation(self, call, nbytes)

    def meet(self, call: Call) -> Meeting:
        """Bring this member's part of the group's next collective, or of the next message."""
        if call.peer >= 0:
            return self._meet_peer(call)
        self._sequence += 1
        key = (self._made, self._members, self._sequence)
        wake = self._transport.wake
        return self._world.meet(key, self.size, self.index, call, self._finish, wake)

    def _meet_peer(self, call: Call) -> Meeting:
        """Messages of a tag between two members are numbered on either side."""
        sends = call.kind == SEND
        ends = (self.index, call.peer) if sends else (call.peer, self.index)
        self._messages[*ends, call.tag] += 1
        key = (self._made, self._members, *ends, call.tag, self._messages[*ends, call.tag])
        wake = self._transport.wake
        return self._world.meet(key, 2, 0 if sends else 1, call, self._deliver, wake)

    def _deliver(self, calls: list[Call]) -> None:
        sent, received = calls
        if (sent.send.shape, sent.send.dtype) != (received.send.shape, received.send.dtype):
            raise TaskError(
                f"{self.label}: rank {self._members[received.peer]} is in {sent},"
                f" rank {self._members[sent.peer]} in {received}; the plans of the ranks differ"
            )
        received.receive[...] = sent.send

    def _finish(self, calls: list[Call]) -> None:
        for index, call in enumerate(calls):
            if _agreed(call) != _agreed(calls[0]):
                raise TaskError(
                    f"{self.label}: rank {self._members[0]} is in {calls[0]}, "
                    f"rank {self._members[index]} in {call}; the plans of the ranks differ"
                )
        _KINDS[calls[0].kind](calls, self)


class _LocalOperation(Operation):
    _group: LocalGroup
    _meeting: Meeting

    def _begin(self) -> None:
        self._meeting = self._group.meet(self._call)

    def _is_done(self) -> bool:
        return self._meeting.test()

    def wait(self, check: Check | None = None) -> None:
        if self._active:
            self._meeting.wait(check)
        self.test()


def run_local(size: int, function: Callable[[LocalTransport], Result]) -> list[Result]:
    """Call `function` with the transport of each rank, on a thread each; the results by rank.

    The first exception wakes the other ranks and is raised here.
    """
    world = LocalWorld(size)
    results: list[Any] = [None] * size
    causes: list[BaseException] = []

    def run(transport: LocalTransport) -> None:
        try:
            results[transport.rank] = function(transport)
        except BaseException as error:
            if not isinstance(error, Aborted):
                causes.append(error)
            world.fail()

    threads = [
        threading.Thread(target=run, args=[transport], name=f"rank {transport.rank}")
        for transport in world.transports
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if causes:
        raise causes[0]
    return results


def _check_kinds(items: list[tuple[str, Any]]) -> None:
    for rank, (kind, _) in enumerate(items):
        if kind != items[0][0]:
            raise TaskError(f"rank 0 is in {items[0][0]}, rank {rank} in {kind}")


def _agreed(call: Call) -> tuple[Any, ...]:
    counts = {"all_gather": call.receive_counts, "all_to_all": ()}
    return call.kind, call.reduce, call.send.dtype, counts.get(call.kind, call.send_counts)


def _parts(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    return np.split(array, list(accumulate(counts))[:-1])


def _all_reduce(calls: list[Call], group: LocalGroup) -> None:
    whole = fold(_REDUCE[calls[0].reduce], [call.send for call in calls])
    for call in calls:
        call.receive[...] = whole


def _all_gather(calls: list[Call], group: LocalGroup) -> None:
    whole = np.concatenate([call.send for call in calls])
    for call in calls:
        call.receive[...] = whole


def _reduce_scatter(calls: list[Call], group: LocalGroup) -> None:
    whole = fold(_REDUCE[calls[0].reduce], [call.send for call in calls])
    for call, part in zip(calls, _parts(whole, calls[0].send_counts), strict=True):
        call.receive[...] = part


def _all_to_all(calls: list[Call], group: LocalGroup) -> None:
    for i, source in enumerate(calls):
        for j, target in enumerate(calls):
            if source.send_counts[j] != target.receive_counts[i]:
                raise TaskError(
                    f"{group.label}: all_to_all: member {i} sends {source.send_counts[j]} "
                    f"elements to member {j}, which expects {target.receive_counts[i]}"
                )
    parts = [_parts(call.send, call.send_counts) for call in calls]
    for j, target in enumerate(calls):
        target.receive[...] = np.concatenate([sent[j] for sent in parts])


_KINDS: dict[str, Callable[[list[Call], LocalGroup], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
