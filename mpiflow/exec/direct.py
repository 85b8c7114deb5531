"""Collectives of route mpi: messages between devices, by an MPI that takes their memory.

    all_gather, all_to_all    a message between each two
    reduce_scatter            each sums, in the order of the members, the part of it that all send
    all_reduce                the same; then each sends what it has summed to all

MPI is asked for messages alone: libraries that take memory of GPUs in those do not take it in
collectives that do not block (Open MPI says so), and sums of the device's own have one order.
What is received before it is summed has a place in the workspace of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpiflow.errors import TaskError
from mpiflow.exec.transport import (
    DONE,
    Call,
    Group,
    InTurn,
    Operation,
    Request,
    Start,
    Steps,
    Together,
    in_parts,
)
from mpiflow.graph.sbp import span

_SUMS = {"sum": "add", "max": "maximum"}


class Side(Protocol):
    """What a device does between messages: a stream of its own, which the host waits for."""

    pending: bool
    """Whether something was asked for since the last `mark`."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy on the device."""

    def combine(self, ufunc: str, x: Any, y: Any, out: Any) -> None:
        """A ufunc of that name, on the device."""

    def mark(self) -> Request:
        """Done when all that was asked for so far is."""


class HostSide:
    """That of devices whose memory is the host's: all is done at once."""

    pending = False

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        """Copy now."""
        np.copyto(target, source)

    def combine(self, ufunc: str, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
        """Compute now."""
        getattr(np, ufunc)(x, y, out=out)

    def mark(self) -> Request:
        """Done."""
        return DONE


class DirectGroup(Group):
    """The members of a group of the host, whose messages are given memory of the device.

    A message starts when what the device had to do for it is done, as MPI does not look at
    streams; the plan keeps kernels from its memory until it is over. The group of the host counts
    what is sent.
    """

    def __init__(self, group: Group, side: Side) -> None:
        super().__init__(group.label, group.size, group.index)
        self.side = side
        self._group = group
        self._tag = 0

    def copy(self, target: Any, source: Any) -> None:
        """On the device; `settled` says when it is done."""
        self.side.copy(target, source)

    def settled(self) -> Request:
        """Done when the copies made so far are."""
        return self.side.mark() if self.side.pending else DONE

    def _bind(self, call: Call, nbytes: int) -> Operation:
        if not (call.send.flags.c_contiguous and call.receive.flags.c_contiguous):
            raise TaskError(
                f"{self.label}: {call}: MPI is given contiguous memory of devices, and this is a"
                " part of an array, as stages with unequal ranks send; make the plan with --route"
                " staged"
            )
        if call.peer >= 0:
            bind = self._group.bind_send if call.kind == "send" else self._group.bind_receive
            return _Direct(self, call, [bind(call.send, call.peer, call.tag)])
        return _BOUND[call.kind](self, call)

    def between_all(self, leaving: Sequence[Any], coming: Sequence[Any]) -> list[Start]:
        """Messages between this member and each other one, which binds the same; receives first."""
        self._tag += 1  # 0 is that of the group's own exchanges
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        receives = [
            self._group.bind_receive(coming[peer], peer, self._tag)
            for peer in reversed(others)
            if coming[peer].size
        ]
        sends = [
            self._group.bind_send(leaving[peer], peer, self._tag)
            for peer in others
            if leaving[peer].size
        ]
        return receives + sends


class _Direct(Operation):
    """Messages that start together, and what the device does before and after them."""

    def __init__(self, group: DirectGroup, call: Call, starts: list[Start]) -> None:
        super().__init__(group, call, 0)
        self._direct, self._starts = group, starts

    def _begin(self) -> None:
        self._request = InTurn(self._steps())

    def _is_done(self) -> bool:
        return self._request.test()

    def _steps(self) -> Steps:
        """What is waited for, one after another."""
        if self._direct.side.pending:
            yield self._direct.side.mark()
        yield Together([start() for start in self._starts])
        self._end()
        if self._direct.side.pending:
            yield self._direct.side.mark()
        yield from self._after()

    def _end(self) -> None:
        """What the device does with what has come."""

    def _after(self) -> Steps:
        """What follows that."""
        return iter(())


class _Gather(_Direct):
    def __init__(self, group: DirectGroup, call: Call) -> None:
        coming = in_parts(call.receive, call.receive_counts)
        super().__init__(group, call, group.between_all([call.send] * group.size, coming))
        self._own = coming[group.index]

    def _end(self) -> None:
        if self._own.size:
            self._direct.copy(self._own, self._call.send)


class _Exchange(_Direct):
    def __init__(self, group: DirectGroup, call: Call) -> None:
        leaving = in_parts(call.send, call.send_counts)
        coming = in_parts(call.receive, call.receive_counts)
        super().__init__(group, call, group.between_all(leaving, coming))
        self._own = coming[group.index], leaving[group.index]

    def _end(self) -> None:
        if self._own[0].size:
            self._direct.copy(*self._own)


class _ReduceScatter(_Direct):
    """Sums the parts that come, with this member's own between them, into `out`."""

    def __init__(self, group: DirectGroup, call: Call) -> None:
        leaving = in_parts(call.send, call.send_counts)
        self._reduce(group, call, leaving, call.receive)

    def _reduce(self, group: DirectGroup, call: Call, leaving: list[Any], out: Any) -> None:
        own, count = group.index, leaving[group.index].size
        others = group.size - 1
        work = call.work[: others * count * out.dtype.itemsize].view(out.dtype)
        came = in_parts(work, (count,) * others)
        self._sources = [*came[:own], leaving[own], *came[own:]]
        self._out, self._ufunc = out, _SUMS[call.reduce]
        _Direct.__init__(self, group, call, group.between_all(leaving, self._sources))

    def _end(self) -> None:
        out, own, side = self._out, self._direct.index, self._direct.side
        if not out.size:
            return
        total, *rest = self._sources
        if not rest:
            side.copy(out, total)
        for number, source in enumerate(rest, 1):
            into = out if number >= own else self._sources[0]  # `out` may be this member's own part
            side.combine(self._ufunc, total, source, into)
            total = into


class _AllReduce(_ReduceScatter):
    def __init__(self, group: DirectGroup, call: Call) -> None:
        sizes = [span(call.send.size, group.size, i) for i in range(group.size)]
        parts = in_parts(call.send, tuple(stop - start for start, stop in sizes))
        own = parts[group.index]
        self._reduce(group, call, parts, own)
        self._gather = group.between_all([own] * group.size, parts)

    def _after(self) -> Steps:
        yield Together([start() for start in self._gather])


_BOUND = {
    "all_gather": _Gather,
    "all_to_all": _Exchange,
    "reduce_scatter": _ReduceScatter,
    "all_reduce": _AllReduce,
}
