"""Messages of rows by owner (plan.rows), bound once: counts, then ids, then rows.

How many travel is known only when the ids are, so there are two exchanges more, on memory that the
plan keeps for the most that can come. No other message of the group is under way meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

import numpy as np

from mpiflow.exec.arena import Arena
from mpiflow.exec.transport import Group, InTurn, Message, Request, Steps
from mpiflow.graph.sbp import shard_box
from mpiflow.ops.rows import PADDING
from mpiflow.plan.records import Register, Task
from mpiflow.plan.rows import COUNT, FETCH, joint, owned_span
from mpiflow.plan.slice import RankPlan

"""What a message does next, each time that the request which it gave last is done."""


class _Rows(ABC):
    """Common to both: which rows each member has, and the counts that it tells the others."""

    def __init__(self, task: Task, rank: RankPlan, arena: Arena, group: Group, rows: int) -> None:
        self._group = group
        spans = [owned_span(peer, task.axis, rows) for peer in rank.peers(task.axis)]
        self._edges = np.array([0, *(stop for _, stop in spans)], np.int64)
        self._first = spans[group.index][0]
        offset, members = task.workspace[0], len(spans)
        self._leaving = arena.view(offset, (members,), "int64")
        self._coming = arena.view(offset + COUNT * members, (members,), "int64")
        self._work = offset + 2 * COUNT * members
        ones = (1,) * members
        self._tell = group.bind_all_to_all(self._leaving, ones, self._coming, ones)

    @abstractmethod
    def _steps(self) -> Steps:
        """All that there is to do, from one request to the next."""

    def start(self) -> None:
        """Find which rows have to travel, and begin to say so."""
        self._request = InTurn(self._steps())

    def test(self) -> bool:
        """Make progress; whether all is where it belongs."""
        return self._request.test()

    def _count(self, ids: np.ndarray) -> Request:
        """Tell each member how many of these ids, which ascend, are its own."""
        places = np.searchsorted(ids, self._edges)
        np.subtract(places[1:], places[:-1], out=self._leaving)
        self._begin, self._end = int(places[0]), int(places[-1])
        return self._tell()

    def _exchange(
        self, leaving: np.ndarray, counts: np.ndarray, coming: np.ndarray, expected: np.ndarray
    ) -> Request:
        """Send so many rows, or ids, to each member, and receive those expected, at the front."""
        width = prod(coming.shape[1:])
        return self._group.all_to_all_once(
            leaving.reshape(-1),
            (counts * width).tolist(),
            coming[: int(expected.sum())].reshape(-1),
            (expected * width).tolist(),
        )


class Fetch(_Rows):
    """Rows of a table by ids, each distinct one asked for once; zeros for ids of no row."""

    def __init__(
        self,
        task: Task,
        rank: RankPlan,
        tensors: dict[str, Register],
        views: dict[str, np.ndarray],
        arena: Arena,
        group: Group,
    ) -> None:
        table, ids = (tensors[name] for name in task.inputs)
        super().__init__(task, rank, arena, group, table.shape[0])
        self._table, self._ids = (views[name] for name in task.inputs)
        width = self._table.shape[1]
        self._out = views[task.outputs[0]].reshape(self._ids.size, width)  # width may be 0
        axes = rank.mesh.along(task.axis)
        box = shard_box(ids.shape, joint(ids.layout, axes), rank.mesh.sizes, rank.coordinates)
        most = prod(stop - start for start, stop in box)
        self._asked = arena.view(self._work, (most,), "int64")
        self._given = arena.view(self._work + COUNT * most, (most, width), table.dtype)
        after = self._work + COUNT * most + self._given.nbytes
        self._found = arena.view(after, (len(self._out), width), table.dtype)

    def _steps(self) -> Steps:
        """Ask for the rows, give what is asked for, and put what came where it belongs."""
        distinct, place = np.unique(
            self._ids.reshape(-1).astype(np.int64, copy=False), return_inverse=True
        )
        yield self._count(distinct)
        wanted = distinct[self._begin : self._end]
        yield self._exchange(wanted, self._leaving, self._asked, self._coming)
        count = int(self._coming.sum())
        asked, given = self._asked[:count], self._given[:count]
        np.subtract(asked, self._first, out=asked)
        np.take(self._table, asked, axis=0, out=given, mode="clip")
        yield self._exchange(given, self._coming, self._found, self._leaving)
        if not len(wanted):
            self._out.fill(0)
            return
        np.subtract(place, self._begin, out=place)
        np.take(self._found[: len(wanted)], place, axis=0, out=self._out, mode="clip")
        if len(wanted) < len(distinct):  # some ids are of no row
            self._out[(place < 0) | (place >= len(wanted))] = 0


class Send(_Rows):
    """Sums by row, for ids that ascend, to the owners of the rows."""

    def __init__(
        self,
        task: Task,
        rank: RankPlan,
        views: dict[str, np.ndarray],
        arena: Arena,
        group: Group,
    ) -> None:
        super().__init__(task, rank, arena, group, task.attributes["rows"])
        values, ids = (views[name] for name in task.inputs)
        made, found = (views[name] for name in task.outputs)
        width = values.shape[-1]  # 0 where the columns are split over more ranks than there are
        self._values, self._ids = values.reshape(ids.size, width), ids.reshape(-1)
        self._made, self._found = made.reshape(found.size, width), found.reshape(-1)

    def _steps(self) -> Steps:
        """Send them; behind those that came is padding."""
        yield self._count(self._ids)
        part = slice(self._begin, self._end)
        yield self._exchange(self._ids[part], self._leaving, self._found, self._coming)
        yield self._exchange(self._values[part], self._leaving, self._made, self._coming)
        self._found[int(self._coming.sum()) :] = PADDING  # nobody reads the values of padding


def bind_rows(
    task: Task,
    rank: RankPlan,
    tensors: dict[str, Register],
    views: dict[str, np.ndarray],
    arena: Arena,
    group: Group,
) -> Message:
    """Prepare a message of rows on the views of its registers."""
    if task.op == FETCH:
        return Fetch(task, rank, tensors, views, arena, group)
    return Send(task, rank, views, arena, group)
