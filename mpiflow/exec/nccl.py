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
from dataclasses import replace
from itertools import accumulate
from typing import Any

from mpiflow.errors import LaunchError, MpiflowError, TaskError
from mpiflow.exec.cuda_driver import Driver
from mpiflow.exec.transport import Call, Group, Operation, Transport
from mpiflow.plan.records import SEND


def share_id(transport: Transport, driver: Driver, members: tuple[int, ...]) -> bytes:
    """Collective over all ranks. An id for the communicator of `members`, made by their first.

    The sets that the ranks name in one call are the same, or have nothing in common.
    """
    mine = members[0] == transport.rank
    return transport.all_gather(driver.unique_id() if mine else b"")[members[0]]


def join(
    transport: Transport, driver: Driver, members: tuple[int, ...], unique_id: bytes, label: str
) -> Any:
    """Collective over the members, this rank among them. Their communicator."""
    try:
        return driver.communicator(len(members), unique_id, members.index(transport.rank))
    except MpiflowError:
        raise
    except Exception as error:
        raise LaunchError(
            f"{transport.name}: {label}: NCCL gave no communicator of ranks"
            f" {', '.join(map(str, members))}: {error}; NCCL_DEBUG=INFO says more, and"
            " --route staged does without it"
        ) from error


class NcclGroup(Group):
    """A communicator of NCCL.

    All that it starts is done in the order of the stream of the driver, with the kernels there: an
    exchange counts as over for what follows on that stream as soon as it has begun.
    """

    def __init__(
        self, transport: Transport, driver: Driver, members: tuple[int, ...], label: str
    ) -> None:
        """Collective over all ranks, which name parts of all, as for `Transport.group`."""
        super().__init__(label, len(members), members.index(transport.rank))
        self.driver, self._name = driver, transport.name
        unique_id = share_id(transport, driver, members)
        self.communicator = join(transport, driver, members, unique_id, label)

    def copy(self, target: Any, source: Any) -> None:
        """In turn with what is sent and received."""
        self.driver.arrays.copyto(target, source)

    def check(self) -> None:
        """TaskError where NCCL has failed beside this thread; what it had begun is ended."""
        _check(self.driver, self.communicator, f"{self._name}: {self.label}")

    def free(self) -> None:
        """Collective. Give back the communicator; nothing may be under way."""
        self.driver.destroy(self.communicator)

    def _validate_reduction(self, call: Call) -> None:
        """NCCL reduces 16-bit floats too."""
        if call.send.dtype.name == "bool":
            raise TaskError(f"{self.label}: {call}: NCCL cannot reduce bool; cast to int32 before")

    def _bind(self, call: Call, nbytes: int) -> Operation:
        return NcclOperation(self, self.driver, self.communicator, call, nbytes)


class NcclStages(Group):
    """All ranks, for messages between stages.

    Each direction between two stages has a communicator of its own, as NCCL does what it is given
    for one in turn, and a send must not wait for a receive.
    """

    def __init__(
        self,
        transport: Transport,
        driver: Driver,
        stages: Sequence[int],
        links: Sequence[tuple[int, int]],
    ) -> None:
        """Collective over all ranks. The stage of each rank; which stage sends to which."""
        super().__init__("stage", transport.size, transport.rank)
        self.driver, self._stages = driver, stages
        self._links: dict[tuple[int, int], tuple[Any, tuple[int, ...]]] = {}
        self._name = transport.name
        for link in links:
            members = tuple(rank for rank, stage in enumerate(stages) if stage in link)
            unique_id = share_id(transport, driver, members)
            if transport.rank in members:
                label = f"stage {link[0]} to {link[1]}"
                self._links[link] = join(transport, driver, members, unique_id, label), members

    def copy(self, target: Any, source: Any) -> None:
        """In turn with what is sent and received."""
        self.driver.arrays.copyto(target, source)

    def check(self) -> None:
        """TaskError where NCCL has failed beside this thread; what it had begun is ended."""
        for (first, last), (comm, _) in self._links.items():
            _check(self.driver, comm, f"{self._name}: stage {first} to {last}")

    def free(self) -> None:
        """Collective. Give back the communicators; nothing may be under way."""
        for comm, _ in self._links.values():
            self.driver.destroy(comm)

    def _bind(self, call: Call, nbytes: int) -> Operation:
        ends = self._stages[self.index], self._stages[call.peer]
        comm, members = self._links[ends if call.kind == SEND else ends[::-1]]
        inner = replace(call, peer=members.index(call.peer))
        return NcclOperation(self, self.driver, comm, inner, nbytes)


def _check(driver: Driver, communicator: Any, who: str) -> None:
    failure = driver.error(communicator)
    if failure:
        driver.abort(communicator)
        raise TaskError(f"{who}: NCCL failed: {failure}")


class NcclOperation(Operation):
    """What is started on the stream of the driver."""

    def __init__(
        self, group: Group, driver: Driver, communicator: Any, call: Call, nbytes: int
    ) -> None:
        super().__init__(group, call, nbytes)
        if not (call.send.flags.c_contiguous and call.receive.flags.c_contiguous):
            raise TaskError(
                f"{group.label}: {call}: NCCL takes contiguous memory, and this is a part of an"
                " array, as stages with unequal ranks send; make the plan with --route staged"
            )
        self._driver, self._communicator = driver, communicator
        self._start = getattr(self, f"_{call.kind}")

    def _begin(self) -> None:
        self._start()

    def _is_done(self) -> bool:
        return True

    def _all_reduce(self) -> None:
        call, comm = self._call, self._communicator
        self._driver.all_reduce(comm, call.receive, call.send, call.reduce)

    def _all_gather(self) -> None:
        call, driver, comm = self._call, self._driver, self._communicator
        if len(set(call.receive_counts)) == 1:
            driver.all_gather(comm, call.receive, call.send)
            return
        with driver.group():
            for root, part in enumerate(_parts(call.receive, call.receive_counts)):
                source = call.send if root == self._group.index else part
                if part.size:
                    driver.broadcast(comm, part, source, root)

    def _reduce_scatter(self) -> None:
        call, driver, comm = self._call, self._driver, self._communicator
        if len(set(call.send_counts)) == 1:
            driver.reduce_scatter(comm, call.receive, call.send, call.reduce)
            return
        with driver.group():
            for root, part in enumerate(_parts(call.send, call.send_counts)):
                out = call.receive if root == self._group.index else part
                if part.size:
                    driver.reduce(comm, out, part, call.reduce, root)

    def _all_to_all(self) -> None:
        call, driver, comm = self._call, self._driver, self._communicator
        leaving = _parts(call.send, call.send_counts)
        coming = _parts(call.receive, call.receive_counts)
        self._group.copy(coming[self._group.index], leaving[self._group.index])
        with driver.group():
            for peer, (part, other) in enumerate(zip(leaving, coming, strict=True)):
                if peer != self._group.index and part.size:
                    driver.send(comm, part, peer)
                if peer != self._group.index and other.size:
                    driver.receive(comm, other, peer)

    def _send(self) -> None:
        call, comm = self._call, self._communicator
        self._driver.send(comm, call.send, call.peer)

    def _receive(self) -> None:
        call, comm = self._call, self._communicator
        self._driver.receive(comm, call.receive, call.peer)


def _parts(array: Any, counts: tuple[int, ...]) -> list[Any]:
    """An array, flat, in parts of so many elements."""
    stops = list(accumulate(counts))
    return [array[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
