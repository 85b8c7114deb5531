"""Collectives and messages of NCCL: from GPU to GPU, started and finished on a stream of the GPU.

    NCCL has                                 made of a group of
    all_reduce                               all_gather of uneven parts      broadcasts
    all_gather, reduce_scatter, even parts   reduce_scatter of uneven parts  reductions
    send, receive                            all_to_all                      sends and receives

The ids by which members find each other travel by the transport of the ranks, which also carries
what NCCL is not for: digests, barriers, heartbeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from mpiflow.errors import LaunchError, MpiflowError, TaskError
from mpiflow.exec.cuda_driver import Driver
from mpiflow.exec.transport import Call, Group, Operation, Transport


def share_ids(
    transport: Transport, driver: Driver, members: Sequence[tuple[int, ...]]
) -> list[bytes]:
    """Collective. An id for each of these sets of ranks, which every rank gives in one order.

    That of a set is made by its first member; sets that this rank is no member of have one too.
    """
    own = b"".join(driver.unique_id() for ranks in members if ranks[0] == transport.rank)
    found = transport.all_gather(own)
    taken = dict.fromkeys(range(transport.size), 0)
    ids = []
    for ranks in members:
        first = ranks[0]
        count = sum(other[0] == first for other in members)
        size = len(found[first]) // count
        ids.append(found[first][taken[first] : taken[first] + size])
        taken[first] += size
    return ids


class NcclGroup(Group):
    """A communicator of NCCL.

    All that it starts is done in the order of the stream of the driver, with the kernels there: an
    exchange counts as over for what follows on that stream as soon as it has begun.
    """

    def __init__(
        self,
        transport: Transport,
        driver: Driver,
        members: tuple[int, ...],
        unique_id: bytes,
        label: str,
    ) -> None:
        """Collective over the members."""
        super().__init__(label, len(members), members.index(transport.rank))
        self.driver = driver
        self._name = transport.name
        try:
            self.communicator = driver.communicator(self.size, unique_id, self.index)
        except MpiflowError:
            raise
        except Exception as error:
            raise LaunchError(
                f"{transport.name}: {label}: NCCL gave no communicator of ranks"
                f" {', '.join(map(str, members))}: {error}; NCCL_DEBUG=INFO says more, and"
                " --route staged does without it"
            ) from error

    def copy(self, target: Any, source: Any) -> None:
        """In turn with what is sent and received."""
        self.driver.arrays.copyto(target, source)

    def check(self) -> None:
        """TaskError where NCCL has failed beside this thread; what it had begun is ended."""
        failure = self.driver.error(self.communicator)
        if failure:
            self.driver.abort(self.communicator)
            raise TaskError(f"{self._name}: {self.label}: NCCL failed: {failure}")

    def abort(self) -> None:
        """End what is under way, so that the process can end."""
        self.driver.abort(self.communicator)

    def free(self) -> None:
        """Collective. Give back the communicator; nothing may be under way."""
        self.driver.destroy(self.communicator)

    def _validate_reduction(self, call: Call) -> None:
        """NCCL reduces 16-bit floats too."""
        if call.send.dtype.name == "bool":
            raise TaskError(f"{self.label}: {call}: NCCL cannot reduce bool; cast to int32 before")

    def _bind(self, call: Call, nbytes: int) -> Operation:
        if not (call.send.flags.c_contiguous and call.receive.flags.c_contiguous):
            raise TaskError(
                f"{self.label}: {call}: NCCL takes contiguous memory, and this is a part of an"
                " array, as stages with unequal ranks send; make the plan with --route staged"
            )
        return NcclOperation(self, call, nbytes)


class NcclOperation(Operation):
    """What is started on the stream of the driver."""

    _group: NcclGroup

    def __init__(self, group: NcclGroup, call: Call, nbytes: int) -> None:
        super().__init__(group, call, nbytes)
        self._start = getattr(self, f"_{call.kind}")

    def _begin(self) -> None:
        self._start()

    def _is_done(self) -> bool:
        return True

    def _all_reduce(self) -> None:
        group, call = self._group, self._call
        group.driver.all_reduce(group.communicator, call.receive, call.send, call.reduce)

    def _all_gather(self) -> None:
        group, call, driver = self._group, self._call, self._group.driver
        if len(set(call.receive_counts)) == 1:
            driver.all_gather(group.communicator, call.receive, call.send)
            return
        with driver.group():
            for root, part in enumerate(_parts(call.receive, call.receive_counts)):
                source = call.send if root == group.index else part
                if part.size:
                    driver.broadcast(group.communicator, part, source, root)

    def _reduce_scatter(self) -> None:
        group, call, driver = self._group, self._call, self._group.driver
        if len(set(call.send_counts)) == 1:
            driver.reduce_scatter(group.communicator, call.receive, call.send, call.reduce)
            return
        with driver.group():
            for root, part in enumerate(_parts(call.send, call.send_counts)):
                out = call.receive if root == group.index else part
                if part.size:
                    driver.reduce(group.communicator, out, part, call.reduce, root)

    def _all_to_all(self) -> None:
        group, call, driver = self._group, self._call, self._group.driver
        leaving = _parts(call.send, call.send_counts)
        coming = _parts(call.receive, call.receive_counts)
        group.copy(coming[group.index], leaving[group.index])
        with driver.group():
            for peer, (part, other) in enumerate(zip(leaving, coming, strict=True)):
                if peer != group.index and part.size:
                    driver.send(group.communicator, part, peer)
                if peer != group.index and other.size:
                    driver.receive(group.communicator, other, peer)

    def _send(self) -> None:
        group, call = self._group, self._call
        group.driver.send(group.communicator, call.send, call.peer)

    def _receive(self) -> None:
        group, call = self._group, self._call
        group.driver.receive(group.communicator, call.receive, call.peer)


def _parts(array: Any, counts: tuple[int, ...]) -> list[Any]:
    """An array, flat, in parts of so many elements."""
    stops = list(accumulate(counts))
    return [array[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
