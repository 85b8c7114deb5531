"""Messages of rows by owner (plan.rows), bound once: counts, then ids, then rows.

How many travel is known only when the ids are, so `wait` exchanges twice more, on memory that the
plan keeps for the most that can come. All members wait in the same order, that of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from mpiflow.exec.arena import Arena
from mpiflow.exec.transport import Group, Message
from mpiflow.graph.sbp import shard_box
from mpiflow.ops.rows import PADDING
from mpiflow.plan.records import Register, Task
from mpiflow.plan.rows import COUNT, FETCH, joint, owned_span
from mpiflow.plan.slice import RankPlan

Check = Callable[[], None] | None


class _Rows:
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

    def _start(self, ids: np.ndarray) -> None:
        """Tell each member how many of these ids, which ascend, are its own."""
        places = np.searchsorted(ids, self._edges)
        np.subtract(places[1:], places[:-1], out=self._leaving)
        self._begin, self._end = int(places[0]), int(places[-1])
        self._request = self._tell()

    def _exchange(
        self,
        leaving: np.ndarray,
        counts: np.ndarray,
        coming: np.ndarray,
        expected: np.ndarray,
        check: Check,
    ) -> int:
        """Send so many rows, or ids, to each member; gives how many came, at the front."""
        width = prod(coming.shape[1:])
        total = int(expected.sum())
        self._group.all_to_all_once(
            leaving.reshape(-1),
            (counts * width).tolist(),
            coming[:total].reshape(-1),
            (expected * width).tolist(),
        ).wait(check)
        return total


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

    def start(self) -> None:
        """Find the distinct ids, and say how many."""
        self._wanted, self._place = np.unique(
            self._ids.reshape(-1).astype(np.int64, copy=False), return_inverse=True
        )
        self._start(self._wanted)

    def wait(self, check: Check) -> None:
        """Ask for the rows, give what is asked for, and put what came where it belongs."""
        self._request.wait(check)
        wanted = self._wanted[self._begin : self._end]
        count = self._exchange(wanted, self._leaving, self._asked, self._coming, check)
        asked, given = self._asked[:count], self._given[:count]
        np.subtract(asked, self._first, out=asked)
        np.take(self._table, asked, axis=0, out=given, mode="clip")
        self._exchange(given, self._coming, self._found, self._leaving, check)
        if not len(wanted):
            self._out.fill(0)
            return
        np.subtract(self._place, self._begin, out=self._place)
        np.take(self._found[: len(wanted)], self._place, axis=0, out=self._out, mode="clip")
        if len(wanted) < len(self._wanted):  # some ids are of no row
            self._out[(self._place < 0) | (self._place >= len(wanted))] = 0


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

    def start(self) -> None:
        """Say how many rows each member gets."""
        self._start(self._ids)

    def wait(self, check: Check) -> None:
        """Send them; behind those that came is padding."""
        self._request.wait(check)
        part = slice(self._begin, self._end)
        self._exchange(self._ids[part], self._leaving, self._found, self._coming, check)
        count = self._exchange(self._values[part], self._leaving, self._made, self._coming, check)
        self._found[count:] = PADDING  # nobody reads the values of padding


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
