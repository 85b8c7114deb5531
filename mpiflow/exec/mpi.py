"""MPI, through mpi4py: the only file that imports it.

    COMM_WORLD               never used for messages, which may belong to someone else
      └─ private duplicate   control messages; made by MpiTransport, freed by close()
           └─ groups         split from it, in plan order; freed by close()

MPI is called by the thread that made the transport and by no other, so that the level `funneled`
is enough. Data collectives are persistent requests where the library has them (MPI 4), and
non-blocking calls elsewhere.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from mpiflow.errors import LaunchError, TaskError
from mpiflow.exec.gpu_aware import takes_gpus
from mpiflow.exec.shared import Neighbours
from mpiflow.exec.transport import (
    DRAIN_SECONDS,
    Call,
    Check,
    Group,
    Operation,
    Request,
    Start,
    Take,
    Transport,
    in_parts,
)

Piece = Callable[[], Any]


def load() -> Any:
    """mpi4py's MPI module, without starting MPI. ImportError or RuntimeError where it is absent."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def implementation(mpi: Any) -> str:
    """The MPI library that mpi4py is linked to, for messages."""
    return " ".join(mpi.Get_library_version().strip("\0 \n").splitlines()[0].split())


def start(mpi: Any) -> None:
    """Collective. Start MPI, unless the program already did; it ends when the process ends well."""
    if not mpi.Is_initialized():
        level = os.environ.get("MPI4PY_RC_THREAD_LEVEL", "funneled").lower()
        mpi.Init_thread(getattr(mpi, f"THREAD_{level.upper()}", mpi.THREAD_FUNNELED))
        atexit.register(mpi.Finalize)
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED and not mpi.Is_thread_main():
        raise LaunchError(
            "MPI was started by another thread, at a level that forbids calls from this one; "
            "connect from the thread that starts MPI, or set MPI4PY_RC_THREAD_LEVEL=serialized"
        )


class MpiTransport(Transport):
    """One rank of COMM_WORLD."""

    def __init__(self, mpi: Any) -> None:
        super().__init__(mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
        self._mpi = mpi
        self._owner = threading.get_ident()
        self._world = mpi.COMM_WORLD.Dup()
        self._world.Set_name("mpiflow")
        self._groups: list[MpiGroup] = []
        self.neighbours = Neighbours(self, mpi, self._world, self.all_gather_in)
        atexit.register(self._left_open)

    def group(self, members: tuple[int, ...], label: str) -> MpiGroup:
        """Collective. A communicator of its own for each group."""
        self.check_thread()
        self.entered, self.waiting = self.entered + 1, True
        communicator = self._world.Split(members[0], members.index(self.rank))
        self.waiting = False
        communicator.Set_name(f"mpiflow {label}")
        group = MpiGroup(self, self._mpi, communicator, label, members)
        self._groups.append(group)
        return group

    def are_neighbours(self, members: Sequence[int]) -> bool:
        """Whether they are all ranks of this host, and there are several."""
        return len(members) > 1 and set(members) <= set(self.neighbours.ranks)

    def share(self, memory: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        """Collective. See `exec.shared`."""
        self.neighbours.share(memory, ranges)

    def unshare(self, memory: np.ndarray) -> None:
        """See `exec.shared`."""
        self.neighbours.unshare(memory)

    def seen_bytes(self) -> int:
        """What of theirs this rank has touched in collectives."""
        return self.neighbours.seen_bytes()

    @property
    def remark(self) -> str:
        """That collectives are slower than they might be, and why."""
        if not self.neighbours.refused:
            return ""
        return (
            "collectives within a host, or some of them, go by messages and not in memory that its"
            f" ranks share: {self.neighbours.refused}"
        )

    def broadcast(self, data: bytes | None) -> bytes:
        """Collective. The data of rank 0."""
        self.entered += 1
        size = np.array([len(data or b"")], np.int64)
        self._finish(self._world.Ibcast(size))
        buffer = np.empty(size[0], np.uint8)
        if data is not None and self.rank == 0:
            buffer[:] = np.frombuffer(data, np.uint8)
        self._finish(self._world.Ibcast(buffer))
        return buffer.tobytes()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Collective. The data of all ranks."""
        self.entered += 1
        return self.all_gather_in(self._world, data)

    def all_gather_in(self, communicator: Any, data: bytes) -> list[bytes]:
        """Collective over a communicator. The data of its members, which wait as for all ranks.

        It does not count as `entered`, since not all ranks make as many of these.
        """
        sizes = self._sizes(communicator, data)
        receive = np.empty(sum(sizes), np.uint8)
        self._finish(communicator.Iallgatherv(_octets(data), [receive, sizes]))
        return _cut(receive, sizes)

    def gather(self, data: bytes) -> list[bytes] | None:
        """Collective. The data of all ranks, on rank 0."""
        self.entered += 1
        sizes = self._sizes(self._world, data)
        receive = np.empty(sum(sizes) if self.rank == 0 else 0, np.uint8)
        target = [receive, sizes] if self.rank == 0 else None
        self._finish(self._world.Igatherv(_octets(data), target))
        return _cut(receive, sizes) if self.rank == 0 else None

    def takes_device_memory(self) -> str:
        """What the library says of itself, if not that it takes it."""
        self.check_thread()
        if takes_gpus(self._mpi):
            return ""
        return (
            f"{implementation(self._mpi)} does not say that it takes memory of GPUs"
            " (MPIX_Query_cuda_support, mpi_memory_alloc_kinds)"
        )

    def barrier(self) -> Request:
        """Collective. Done once all ranks have come."""
        self.check_thread()
        self.entered += 1
        return _Once(self, self._world.Ibarrier())

    def abort(self, code: int) -> None:
        """End the job. Alone, there is nobody to end, and this rank may leave as it likes."""
        if self.size > 1:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            self._mpi.COMM_WORLD.Abort(code)
        self._release()

    def close(self) -> None:
        """Collective. Free every communicator, once no rank needs them."""
        self.check_thread()
        self.barrier().wait(self.check)
        self.neighbours.close()
        self._release()

    def check_thread(self) -> None:
        """Raise where the caller is not the thread that may call MPI."""
        if threading.get_ident() != self._owner:
            name = threading.current_thread().name
            raise TaskError(f"{self.name}: MPI was called from thread {name!r}, not from its own")

    def explain(self, error: Exception, where: str) -> TaskError:
        """An error of MPI, with who met it and where."""
        return TaskError(f"{self.name}: {where}: MPI failed: {str(error).strip()}")

    def _sizes(self, communicator: Any, data: bytes) -> list[int]:
        sizes = np.empty(communicator.Get_size(), np.int64)
        self._finish(communicator.Iallgather(np.array([len(data)], np.int64), sizes))
        return sizes.tolist()

    def _finish(self, request: Any) -> None:
        _Once(self, request).wait(self.check)

    def _release(self) -> None:
        atexit.unregister(self._left_open)
        for group in self._groups:
            group.free()
        self._groups.clear()
        if self._world != self._mpi.COMM_NULL:
            self._world.Free()

    def _left_open(self) -> None:
        # The program ends while other ranks may still wait for this one, and would for ever: a
        # normal exit waits for them in MPI_Finalize. What it has printed says why.
        if self.size > 1:
            time.sleep(DRAIN_SECONDS)
        self.abort(1)


_BITS = {"bool": np.uint8, "float16": np.uint16, "bfloat16": np.uint16}


class MpiGroup(Group):
    """A communicator. A single message or collective has at most `limit` elements."""

    limit = 2**31 - 1
    synchronous = False
    """Whether a send is over only once it is received, as on networks that buffer nothing."""

    def __init__(
        self,
        transport: MpiTransport,
        mpi: Any,
        communicator: Any,
        label: str,
        members: tuple[int, ...],
    ) -> None:
        super().__init__(label, communicator.Get_size(), communicator.Get_rank())
        self.transport, self._members = transport, members
        self._mpi = mpi
        self._communicator = communicator
        self._persistent: list[Any] = []
        self._types: list[Any] = []
        self._reduce = {"sum": mpi.SUM, "max": mpi.MAX}

    def free(self) -> None:
        """Collective. Give back the requests and the communicator."""
        for handle in (*self._persistent, *self._types):
            handle.Free()
        self._persistent.clear()
        self._types.clear()
        self._communicator.Free()

    @property
    def sees_memory(self) -> bool:
        """Whether all are ranks of this host, and there are several."""
        return self.transport.are_neighbours(self._members)

    def bind_take(
        self, call: Call, shown: Sequence[np.ndarray], takes: Sequence[Take], nbytes: int
    ) -> Start | None:
        """Collective. See `exec.shared`."""
        self.transport.check_thread()
        bound = self.transport.neighbours.bind_take(
            self, self._members, self._communicator, call, shown, takes, nbytes
        )
        return bound.start if bound is not None else None

    def _bind(self, call: Call, nbytes: int) -> Operation:
        self.transport.check_thread()
        if call.peer < 0 and not call.once and self.sees_memory:
            neighbours = self.transport.neighbours
            shared = neighbours.bind(self, self._members, self._communicator, call, nbytes)
            if shared is not None:
                return shared
        try:
            pieces = getattr(self, f"_{call.kind}")(call)
        except self._mpi.Exception as error:
            raise self.transport.explain(error, f"{self.label}: {call}") from error
        return _MpiOperation(self, call, nbytes, pieces, self._mpi)

    def _all_reduce(self, call: Call) -> list[Piece]:
        return [
            self._collective("Allreduce", self._mpi.IN_PLACE, self._buffer(part), self._op(call))
            for part in self._segments(call.send)
        ]

    def _all_gather(self, call: Call) -> list[Piece]:
        if call.receive.size > self.limit:
            return self._exchange(
                [call.send] * self.size, in_parts(call.receive, call.receive_counts)
            )
        target = self._buffer(call.receive, call.receive_counts)
        return [self._collective("Allgatherv", self._buffer(call.send), target)]

    def _reduce_scatter(self, call: Call) -> list[Piece]:
        operation = self._op(call)
        if call.send.size <= self.limit:
            send, receive = self._buffer(call.send), self._buffer(call.receive)
            counts = list(call.send_counts)
            return [self._collective("Reduce_scatter", send, receive, counts, operation)]
        targets = list(self._segments(call.receive))
        return [
            self._collective(
                "Reduce",
                self._buffer(part),
                self._buffer(targets[index]) if root == self.index else None,
                operation,
                root,
            )
            for root, whole in enumerate(in_parts(call.send, call.send_counts))
            for index, part in enumerate(self._segments(whole))
        ]

    def _all_to_all(self, call: Call) -> list[Piece]:
        send, receive = (
            in_parts(call.send, call.send_counts), in_parts(call.receive, call.receive_counts)
        )  # fmt: skip
        return self._exchange(send, receive, once=call.once)

    def _send(self, call: Call) -> list[Piece]:
        bind = self._communicator.Ssend_init if self.synchronous else self._communicator.Send_init
        return [self._persist(bind(part, call.peer, call.tag)) for part in self._parts(call.send)]

    def _receive(self, call: Call) -> list[Piece]:
        return [
            self._persist(self._communicator.Recv_init(part, call.peer, call.tag))
            for part in self._parts(call.receive)
        ]

    def _parts(self, array: np.ndarray) -> list[list[Any]]:
        """The buffers of a message: one, with strides, of what has several dims."""
        if array.ndim == 1 and array.flags.c_contiguous:
            return [self._buffer(part) for part in self._segments(array)]
        wire = self._wire(array)
        for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
            wire = wire.Create_hvector(size, 1, stride)
            self._types.append(wire)
        wire.Commit()
        last = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
        memory = self._mpi.memory.fromaddress(_address(array), last + array.itemsize)
        return [[memory, 1, wire]]

    def _exchange(
        self, send: list[np.ndarray], receive: list[np.ndarray], *, once: bool = False
    ) -> list[Piece]:
        """Messages between all pairs, receives first; sends begin with the next neighbour."""
        own = self.index
        others = [(own + step) % self.size for step in range(1, self.size)]
        away = "Ssend" if self.synchronous else "Send"
        pieces = [
            self._message(name, part, peer, once)
            for name, peers, parts in (("Recv", reversed(others), receive), (away, others, send))
            for peer in peers
            for part in self._segments(parts[peer])
        ]
        return [*pieces, partial(self._copy, send[own], receive[own])]

    def _message(self, name: str, part: np.ndarray, peer: int, once: bool) -> Piece:
        """A message to or from a member: a request that lasts, unless it is made but once."""
        buffer = self._buffer(part)
        if once:
            return partial(getattr(self._communicator, f"I{name.lower()}"), buffer, peer)
        return self._persist(getattr(self._communicator, f"{name}_init")(buffer, peer))

    def _copy(self, source: np.ndarray, target: np.ndarray) -> Any:
        target[...] = source
        return self._mpi.REQUEST_NULL

    def _collective(self, name: str, *arguments: Any) -> Piece:
        try:
            return self._persist(getattr(self._communicator, f"{name}_init")(*arguments))
        except NotImplementedError:
            return partial(getattr(self._communicator, f"I{name.lower()}"), *arguments)

    def _persist(self, request: Any) -> Piece:
        self._persistent.append(request)
        return partial(_restart, request)

    def _segments(self, array: np.ndarray) -> Iterator[np.ndarray]:
        for begin in range(0, array.size, self.limit):
            yield array[begin : begin + self.limit]

    def _op(self, call: Call) -> Any:
        return self._reduce[call.reduce]

    def _buffer(self, array: np.ndarray, counts: tuple[int, ...] | None = None) -> list[Any]:
        # By its address, so that MPI looks at no stream of a device, and at no dtype: it knows some
        # of NumPy's alone. What is empty is nowhere: its address may be that of another buffer of
        # the call, which MPI refuses.
        address = _address(array) if array.nbytes else 0
        memory = self._mpi.memory.fromaddress(address, array.nbytes)
        return [memory, array.size if counts is None else list(counts), self._wire(array)]

    def _wire(self, array: np.ndarray) -> Any:
        # MPI knows neither 16-bit floats nor NumPy's bools; where nothing is reduced, bits will do.
        dtype = np.dtype(_BITS.get(array.dtype.name, array.dtype))
        return self._mpi.Datatype.fromcode(dtype.char)


class _MpiOperation(Operation):
    """The requests of one collective: usually one, several where it was cut or is an exchange."""

    _group: MpiGroup

    def __init__(
        self, group: MpiGroup, call: Call, nbytes: int, pieces: list[Piece], mpi: Any
    ) -> None:
        super().__init__(group, call, nbytes)
        self._pieces = pieces
        self._transport = group.transport
        self._failure = mpi.Exception
        self._running: list[Any] = []

    def _begin(self) -> None:
        self._transport.check_thread()
        try:
            self._running = [piece() for piece in self._pieces]
        except self._failure as error:
            raise self._explained(error) from error

    def _is_done(self) -> bool:
        # One by one: any test makes progress for all, and Testall fails in MPICH 5.0 on persistent
        # collectives that are fine.
        self._transport.check_thread()
        running = self._running
        try:
            while running and running[-1].Test():
                running.pop()
        except self._failure as error:
            raise self._explained(error) from error
        return not running

    def _explained(self, error: Exception) -> TaskError:
        return self._transport.explain(error, f"{self._group.label}: {self._call}")


class _Once(Request):
    """A control collective, which is made once."""

    def __init__(self, transport: MpiTransport, request: Any) -> None:
        self._transport = transport
        self._request = request

    def wait(self, check: Check | None = None) -> None:
        self._transport.waiting = True
        super().wait(check)
        self._transport.waiting = False

    def test(self) -> bool:
        self._transport.check_thread()
        return self._request.Test()


def _address(array: Any) -> int:
    """Where an array begins, in the memory of the host or of a device."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _restart(request: Any) -> Any:
    request.Start()
    return request


def _octets(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _cut(received: np.ndarray, sizes: list[int]) -> list[bytes]:
    return [part.tobytes() for part in in_parts(received, tuple(sizes))]
