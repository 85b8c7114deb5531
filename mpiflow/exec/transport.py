"""What moves bytes between ranks, whatever does the moving (`local`, `mpi`).

    Transport      one a rank: control messages, and the making of groups
      └─ Group     one communicator: the collectives along one mesh axis, or several
           └─ Start      a collective bound to its buffers; calling it begins one exchange
                └─ Request     that exchange: done yet?

Everything is bound before the first step, so a step only starts and tests. All members of a group
bind and start the same collectives in the same order. Only the thread that connected may call.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from mpiflow import errors
from mpiflow.errors import LaunchError, MpiflowError, TaskError
from mpiflow.plan.records import RECEIVE, SEND
from mpiflow.plan.slice import itemsize
from mpiflow.plan.volume import sent_elements

Check = Callable[[], None]
REDUCTIONS = ("sum", "max")

DRAIN_SECONDS = 0.2
"""mpiexec forwards what a rank writes, and may drop what it has not read when the rank aborts."""
_SPIN_SECONDS = 50e-6
_YIELD_SECONDS = 1e-3
_LONGEST_SLEEP_SECONDS = 200e-6


class Aborted(BaseException):
    """Another rank of this process failed; raised where this one waits, and never printed."""


class Pause:
    """What to do between two polls: spin 50 us, yield the core up to 1 ms, then sleep to 200 us.

    A short wait stays short, and a long one leaves the core to the rank that is waited for.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._sleep = 20e-6

    def __call__(self) -> None:
        """Pass some time, the longer the longer it has taken."""
        waited = time.perf_counter() - self._began
        if waited < _SPIN_SECONDS:
            return
        if waited < _YIELD_SECONDS:
            os.sched_yield()
            return
        time.sleep(self._sleep)
        self._sleep = min(2 * self._sleep, _LONGEST_SLEEP_SECONDS)


class Request(ABC):
    """Something that was started and will be done."""

    @abstractmethod
    def test(self) -> bool:
        """Make progress; whether it is done. Cheap, and true ever after."""

    def wait(self, check: Check | None = None) -> None:
        """Poll until done, without burning the core; `check` may raise to end the wait."""
        pause = Pause()
        while not self.test():
            if check:
                check()
            pause()


Start = Callable[[], Request]


class Done(Request):
    """Nothing."""

    def test(self) -> bool:
        """It is."""
        return True


DONE = Done()


class Together(Request):
    """Several, done when all are."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def test(self) -> bool:
        """Make progress; whether all are over."""
        while self._requests and self._requests[-1].test():
            self._requests.pop()
        return not self._requests


Steps = Iterator[Request]
"""Requests, each made when the one before is done."""


class InTurn(Request):
    """Several, one after another."""

    def __init__(self, steps: Steps) -> None:
        self._rest, self._request = steps, next(steps, DONE)

    def test(self) -> bool:
        """Make progress, and make the next where one is done; whether all are."""
        while self._request.test():
            following = next(self._rest, None)
            if following is None:
                return True
            self._request = following
        return False


class Message(Protocol):
    """What a collective task does in a step: it is started, and later waited for."""

    def start(self) -> None:
        """Pack and begin."""

    def test(self) -> bool:
        """Make progress; whether it is over and unpacked, and true ever after."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective with its buffers, flat and contiguous; counts are in elements.

    One that is to be done `once` leaves nothing behind in the communicator. It may also be a
    message to or from member `peer`, which knows it by the same `tag`; its buffer may be a part of
    an array, of the same shape at either end. `work` is memory for a reduction, of route mpi alone.
    """

    kind: str
    send: np.ndarray
    receive: np.ndarray
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    reduce: str = ""
    once: bool = False
    peer: int = -1
    tag: int = 0
    work: Any = None

    def __str__(self) -> str:
        if self.peer >= 0:
            way = "to" if self.kind == SEND else "from"
            return f"{self.kind} {way} member {self.peer} {self.send.size} {self.send.dtype}"
        counts = ",".join(map(str, self.send_counts or self.receive_counts))
        return f"{self.kind} {self.reduce}({counts}) {self.send.dtype}"


@dataclass(frozen=True, slots=True)
class Source:
    """A part of what a member shows: which of its arrays, of what shape, and where in that."""

    member: int
    number: int
    shape: tuple[int, ...]
    where: Any


@dataclass(frozen=True, slots=True)
class Take:
    """An array of a member's own that becomes a copy of the source, or the reduction of several."""

    target: np.ndarray
    sources: tuple[Source, ...]


class Operation(Request):
    """A bound collective; it is its own request, as there is one exchange at a time."""

    def __init__(self, group: Group, call: Call, nbytes: int) -> None:
        self._group = group
        self._call = call
        self._nbytes = nbytes
        self._active = False

    def start(self) -> Request:
        """Begin an exchange; the buffers belong to it until `test` is true."""
        if self._active:
            raise TaskError(f"{self._group.label}: {self._call} was started again before its end")
        self._active = True
        self._group.sent += self._nbytes
        self._begin()
        return self

    def test(self) -> bool:
        """Make progress; whether the exchange is over."""
        if self._active and self._is_done():
            self._active = False
        return not self._active

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _is_done(self) -> bool: ...


class Group(ABC):
    """One communicator. `sent` is the payload of its data collectives so far, in bytes."""

    def __init__(self, label: str, size: int, index: int) -> None:
        self.label = label
        self.size = size
        self.index = index
        self.sent = 0

    def copy(self, target: Any, source: Any) -> None:
        """Bring what an exchange takes, or gives, to its place."""
        np.copyto(target, source)

    def settled(self) -> Request:
        """Done when all that was copied is there."""
        return DONE

    def bind_all_reduce(self, buffer: np.ndarray, reduce: str = "sum", work: Any = None) -> Start:
        """Collective. Gives every member the sum or maximum of all buffers, in place."""
        count = (buffer.size,)
        call = Call("all_reduce", buffer, buffer, count, count, reduce, work=work)
        return self._bound(call, count)

    def bind_all_gather(
        self, send: np.ndarray, receive: np.ndarray, counts: Sequence[int]
    ) -> Start:
        """Collective. Gives every member what all sent, in order; member i sends `counts[i]`."""
        counts = tuple(counts)
        own = (counts[self.index],)
        return self._bound(Call("all_gather", send, receive, own, counts), counts)

    def bind_reduce_scatter(
        self,
        send: np.ndarray,
        receive: np.ndarray,
        counts: Sequence[int],
        reduce: str = "sum",
        work: Any = None,
    ) -> Start:
        """Collective. Reduces what all sent; member i receives part i, of `counts[i]` elements."""
        counts = tuple(counts)
        own = (counts[self.index],)
        call = Call("reduce_scatter", send, receive, counts, own, reduce, work=work)
        return self._bound(call, counts)

    def bind_all_to_all(
        self,
        send: np.ndarray,
        send_counts: Sequence[int],
        receive: np.ndarray,
        receive_counts: Sequence[int],
    ) -> Start:
        """Collective. Sends part j to member j, and receives one part from each, in order."""
        call = Call("all_to_all", send, receive, tuple(send_counts), tuple(receive_counts))
        return self._bound(call, call.send_counts)

    def bind_send(self, buffer: np.ndarray, peer: int, tag: int) -> Start:
        """Sends to member `peer`, which receives it by the same tag, those of a tag in order."""
        return self._bound_message(SEND, buffer, peer, tag)

    def bind_receive(self, buffer: np.ndarray, peer: int, tag: int) -> Start:
        """Receives what member `peer` sends by the same tag."""
        return self._bound_message(RECEIVE, buffer, peer, tag)

    @property
    def sees_memory(self) -> bool:
        """Whether members see memory of one another, and `bind_take` can be called."""
        return False

    def bind_take(
        self, call: Call, shown: Sequence[np.ndarray], takes: Sequence[Take], nbytes: int
    ) -> Start | None:
        """Collective. Members take parts of the arrays that each shows, from where they lie.

        They may lie apart, and in any shape. `call` says what it is for messages, and how several
        sources are reduced; `nbytes` counts as sent. None, on all members alike, where some memory
        cannot be seen: then it has to be packed.
        """
        return None

    def _bound_message(self, kind: str, buffer: np.ndarray, peer: int, tag: int) -> Start:
        count = (buffer.size,)
        call = Call(kind, buffer, buffer, count, count, peer=peer, tag=tag)
        self._validate(call)
        return self._bind(call, buffer.nbytes if kind == SEND else 0).start

    def all_to_all_once(
        self,
        send: np.ndarray,
        send_counts: Sequence[int],
        receive: np.ndarray,
        receive_counts: Sequence[int],
    ) -> Request:
        """Collective. As `bind_all_to_all`, of counts that are this exchange's own; starts it."""
        counts = tuple(send_counts), tuple(receive_counts)
        call = Call("all_to_all", send, receive, *counts, once=True)
        return self._bound(call, call.send_counts)()

    def _bound(self, call: Call, counts: tuple[int, ...]) -> Start:
        self._validate(call)
        elements = sent_elements(call.kind, counts, self.size, self.index)
        return self._bind(call, elements * call.send.dtype.itemsize).start

    def _validate(self, call: Call) -> None:
        for name, array, counts in (
            ("send", call.send, call.send_counts),
            ("receive", call.receive, call.receive_counts),
        ):
            where = f"{self.label}: {call}: the {name} buffer"
            if call.peer < 0 and (array.ndim != 1 or not array.flags.c_contiguous):
                raise TaskError(f"{where} has shape {array.shape}; it must be flat and contiguous")
            if array.size != sum(counts):
                raise TaskError(f"{where} has {array.size} elements, the counts say {sum(counts)}")
        if call.send.dtype != call.receive.dtype:
            raise TaskError(f"{self.label}: {call} receives into {call.receive.dtype}")
        members = max(len(call.send_counts), len(call.receive_counts))
        if call.kind not in ("all_reduce", SEND, RECEIVE) and members != self.size:
            raise TaskError(f"{self.label}: {call} has {members} counts for {self.size} members")
        itemsize(str(call.send.dtype))
        if call.reduce:
            self._validate_reduction(call)

    def _validate_reduction(self, call: Call) -> None:
        if call.reduce not in REDUCTIONS:
            raise TaskError(f"{self.label}: {call}: a reduction is one of {', '.join(REDUCTIONS)}")
        if call.send.dtype.name in ("bool", "float16", "bfloat16"):
            raise TaskError(
                f"{self.label}: {call}: MPI cannot reduce {call.send.dtype}; "
                "cast to float32 (or int32) before it"
            )

    @abstractmethod
    def _bind(self, call: Call, nbytes: int) -> Operation: ...


class Transport(ABC):
    """The ranks of a job. `check`, where set, is called in every wait and may raise to end it.

    `wake`, where set, is called by a transport that is not `polled` when a request may be done.
    `entered` counts the control collectives that this rank has come to, by which ranks know who is
    behind; `waiting` is whether it waits in the last of them.
    """

    polled = True
    """Whether requests make progress, and show that they are done, only when they are tested."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.host = platform.node()
        self.check: Check | None = None
        self.entered = 0
        self.waiting = False
        self.wake: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        """This rank for messages: `rank 1 of 4 on host`."""
        return f"rank {self.rank} of {self.size} on {self.host}"

    @abstractmethod
    def group(self, members: tuple[int, ...], label: str) -> Group:
        """Collective over all ranks. The group of `members`, in that order, this rank among them.

        The groups that the ranks name in one call are a partition of all ranks.
        """

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes:
        """Collective. Gives every rank the data of rank 0; the others pass None."""

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Collective. Gives every rank the data of all, by rank."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes] | None:
        """Collective. Gives rank 0 the data of all, by rank; the others get None."""

    def are_neighbours(self, members: Sequence[int]) -> bool:
        """Whether they are ranks of one host that may see memory of one another."""
        return False

    def share(self, memory: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Collective. Let neighbours see these bytes (start, stop) of memory of the host.

        Collectives between them work there, without messages. It has been zero until now, and is
        kept until `unshare`.
        """

    def unshare(self, memory: np.ndarray) -> None:  # noqa: B027
        """Forget it: what is bound to it is not started any more, by any rank."""

    def seen_bytes(self) -> int:
        """Memory of other ranks that counts as resident in this process too."""
        return 0

    @property
    def remark(self) -> str:
        """What a user should know of how its ranks talk; "" if that is as expected."""
        return ""

    def takes_device_memory(self) -> str:
        """Why messages may not be given memory of a device; "" where they are said to take it."""
        return ""

    @abstractmethod
    def barrier(self) -> Request:
        """Collective. A request that is done once every rank has made it."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every other rank with exit code `code`, and this one where MPI can."""

    @abstractmethod
    def close(self) -> None:
        """Collective. Give back the communicators; nothing may follow."""

    def on_root(self, function: Callable[[], Any]) -> Any:
        """Collective. Call on rank 0 only and give its result, as JSON has it, to all ranks.

        An MpiflowError of it is raised on every rank, with type and message. Any other exception
        is raised on rank 0 alone, where it ends the job.
        """
        return _opened(self.broadcast(_sealed(function) if self.rank == 0 else None))

    def check_same(self, label: str, text: str) -> None:
        """Collective. Raises LaunchError on all ranks, naming them, where `text` is not equal."""
        value = text or "nothing"
        if len(value) > 80:
            digest = hashlib.sha256(value.encode()).hexdigest()
            value = f"{value[:60]}... (sha256 {digest})"
        ranks: dict[str, list[str]] = {}
        for rank, data in enumerate(self.all_gather(json.dumps([value, self.host]).encode())):
            theirs, host = json.loads(data)
            ranks.setdefault(theirs, []).append(f"{rank} on {host}")
        if len(ranks) == 1:
            return
        table = "".join(
            f"\n  {theirs}: rank {', '.join(_shortened(names))}" for theirs, names in ranks.items()
        )
        raise on_all_ranks(LaunchError(f"the ranks do not have the same {label}:{table}"))


def in_parts(array: Any, counts: Sequence[int]) -> list[Any]:
    """A flat array in parts of so many elements."""
    stops = list(accumulate(counts))
    return [array[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


def on_all_ranks(error: MpiflowError) -> MpiflowError:
    """Mark an error that every rank raises alike, so that it is printed once, by rank 0."""
    vars(error)["on_all_ranks"] = True
    return error


def is_on_all_ranks(error: BaseException) -> bool:
    """Whether every rank raises this error."""
    return bool(vars(error).get("on_all_ranks"))


def _sealed(function: Callable[[], Any]) -> bytes:
    try:
        answer = {"result": function()}
    except MpiflowError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    return json.dumps(answer).encode()


def _opened(data: bytes) -> Any:
    answer = json.loads(data)
    if "error" not in answer:
        return answer["result"]
    kind = getattr(errors, answer["error"], MpiflowError)
    raise on_all_ranks(kind(answer["message"]))


def _shortened(names: list[str], most: int = 8) -> list[str]:
    rest = len(names) - most
    return names if rest <= 0 else [*names[:most], f"and {rest} more"]
