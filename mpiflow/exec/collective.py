"""Collectives on shards: what has to be packed before and unpacked after, bound once.

A shard's dims other than the first are not contiguous across ranks, so such pieces go through the
task's workspace, as do those of several tensors; everything else moves straight between registers.
Ranks that see memory of one another take everything from where it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from mpiflow.exec import packed
from mpiflow.exec.arena import Arena
from mpiflow.exec.rows import bind_rows
from mpiflow.exec.transport import (
    Call,
    Group,
    InTurn,
    Message,
    Request,
    Source,
    Start,
    Steps,
    Take,
    Together,
)
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import Box, box_shape
from mpiflow.plan.pieces import is_in_pieces, pieces_of
from mpiflow.plan.records import SEND, Register, Task
from mpiflow.plan.rows import ROW_KINDS
from mpiflow.plan.slice import RankPlan, reduced_elements

Copy = tuple[np.ndarray, np.ndarray]
"""Destination and source."""


class Collective:
    """One collective of one rank; `start` it, then `test` until it is over."""

    __slots__ = ("_after", "_before", "_group", "_request", "_start")

    def __init__(
        self, group: Group, start: Callable[[], Request], before: list[Copy], after: list[Copy]
    ) -> None:
        self._start, self._before, self._after = start, before, after
        self._group = group
        self._request: Request

    def start(self) -> None:
        """Pack and begin."""
        self._request = InTurn(self._steps())

    def test(self) -> bool:
        """Make progress; whether it is over and unpacked."""
        return self._request.test()

    def _steps(self) -> Steps:
        for target, source in self._before:
            self._group.copy(target, source)
        yield self._start()
        if self._after:
            for target, source in self._after:
                self._group.copy(target, source)
            yield self._group.settled()


class Pieces:
    """A send or a receive of one rank, to or from several of another stage."""

    __slots__ = ("_starts", "_together")

    def __init__(self, starts: list[Start]) -> None:
        self._starts = starts
        self._together = Together([])

    def start(self) -> None:
        """Begin all of them."""
        self._together = Together([start() for start in self._starts])

    def test(self) -> bool:
        """Make progress; whether all are over."""
        return self._together.test()


def bind_message(
    task: Task,
    rank: RankPlan,
    registers: dict[str, Register],
    views: dict[str, np.ndarray],
    group: Group,
    whole: Mesh,
) -> Message:
    """A send or a receive: of a register, or of the pieces that ranks of another stage share.

    `group` has all ranks of the job, which are those of the mesh `whole`.
    """
    (name,) = task.inputs or task.outputs
    view, register = views[name], registers[name]
    stage, tag = task.attributes["stage"], task.attributes["message"]
    bind = group.bind_send if task.kind == SEND else group.bind_receive
    if not is_in_pieces(task):
        start = bind(_flat(view), whole.rank_in_stage(stage, rank.rank), tag)
        return Collective(group, start, [], [])
    base = rank.box(register)
    return Pieces([
        bind(_part(view, box, base), whole.rank_in_stage(stage, place), tag)
        for place, box in pieces_of(task, register, rank)
    ])  # fmt: skip


def bind_collective(
    task: Task,
    rank: RankPlan,
    registers: dict[str, Register],
    views: dict[str, np.ndarray],
    arena: Arena,
    group: Group,
) -> Message:
    """Prepare a collective task on the views of its registers."""
    if task.op in ROW_KINDS:
        return bind_rows(task, rank, registers, views, arena, group)
    source, target = registers[task.inputs[0]], registers[task.outputs[0]]
    send, receive = views[source.name], views[target.name]
    if task.op == "all_reduce":
        return _all_reduce(task, rank, registers, views, arena, group)
    if group.sees_memory:
        call, (shown, takes) = _call_of(task, send, receive), _takes(task, rank, registers, views)
        taking = group.bind_take(call, shown, takes, rank.sent_bytes(task, registers))
        if taking is not None:
            return Collective(group, taking, [], [])
    if len(task.inputs) > 1:
        start, sent, received = packed.bind(task, rank, registers, views, arena, group)
        return Collective(group, start, sent, [(place, piece) for piece, place in received])
    peers, counts = rank.peers(task.axis), rank.counts(task, registers)
    match task.op:
        case "all_gather":
            boxes = [peer.box(source) for peer in peers]
            flat, pieces = _pieces(task, arena, receive, rank.box(target), boxes)
            after = [(part, piece) for piece, part in pieces]
            return Collective(group, group.bind_all_gather(_flat(send), flat, counts), [], after)
        case "reduce_scatter":
            boxes = [peer.box(target) for peer in peers]
            flat, pieces = _pieces(task, arena, send, rank.box(source), boxes)
            reduce, work = task.attributes["reduce"], packed.received(task, arena)
            start = group.bind_reduce_scatter(flat, _flat(receive), counts, reduce, work)
            return Collective(group, start, pieces, [])
    return _exchange(task, rank, source, target, send, receive, peers, arena, group)


def _call_of(task: Task, send: np.ndarray, receive: np.ndarray) -> Call:
    """What a collective is, for messages: that of its first tensor."""
    sent, received = _flat(send), _flat(receive)
    reduce = task.attributes.get("reduce", "")
    return Call(task.op, sent, received, (sent.size,), (received.size,), reduce)


def _takes(
    task: Task, rank: RankPlan, registers: dict[str, Register], views: dict[str, np.ndarray]
) -> tuple[list[np.ndarray], list[Take]]:
    """What this rank shows, and what it takes: each part of what it is to have, from who has it."""
    peers = rank.peers(task.axis)
    shown, takes = [], []
    for number, names in enumerate(zip(task.inputs, task.outputs, strict=True)):
        (given, made), target = (registers[name] for name in names), views[names[1]]
        shown.append(views[names[0]])
        boxes, wanted = [peer.box(given) for peer in peers], rank.box(made)
        if task.op == "reduce_scatter":  # all have the same box, of which this rank gets a part
            takes.append(
                Take(target, tuple(_source(i, number, b, wanted) for i, b in enumerate(boxes)))
            )
            continue
        for i, box in enumerate(boxes):
            common = _common(box, wanted)
            part = target[_within(common, wanted)]
            takes.append(Take(part, (_source(i, number, box, common),)))
    return shown, takes


def _source(member: int, number: int, box: Box, part: Box) -> Source:
    """A part of what a member shows of the tensor of that number, which is this box of it."""
    return Source(member, number, box_shape(box), _within(part, box))


def exchanged(task: Task, registers: dict[str, Register]) -> list[tuple[int, int]]:
    """The bytes of the arena (start, stop) that other members see, where they see any.

    Of rows these are the counts, of a sum what it is written to, else what is taken.
    """
    if task.op in ROW_KINDS:
        return [(task.workspace[0], sum(task.workspace))]
    names = task.outputs if task.op == "all_reduce" else task.inputs
    members = [registers[name] for name in names]
    return [(each.offset, each.offset + each.slots * each.nbytes) for each in members]


def _all_reduce(
    task: Task,
    rank: RankPlan,
    registers: dict[str, Register],
    views: dict[str, np.ndarray],
    arena: Arena,
    group: Group,
) -> Collective:
    """In place over the whole bucket; a copy first where the input is still needed."""
    members = [registers[name] for name in task.inputs]
    target = registers[task.outputs[0]]
    before: list[Copy] = []
    if len(members) == 1:
        buffer = _flat(views[target.name])
        if not target.aliases:
            before.append((buffer, _flat(views[members[0].name])))
    else:
        elements = reduced_elements(members, rank)
        buffer = arena.view(members[0].offset, (elements,), target.dtype)
    reduce, work = task.attributes["reduce"], packed.received(task, arena)
    return Collective(group, group.bind_all_reduce(buffer, reduce, work), before, [])


def _exchange(
    task: Task,
    rank: RankPlan,
    source: Register,
    target: Register,
    send: np.ndarray,
    receive: np.ndarray,
    peers: list[RankPlan],
    arena: Arena,
    group: Group,
) -> Collective:
    """all_to_all and exchange: to each what its target has of this shard, from each the same."""
    mine, wanted = rank.box(source), rank.box(target)
    leaving = [_common(mine, peer.box(target)) for peer in peers]
    coming = [_common(peer.box(source), wanted) for peer in peers]
    offset, size = task.workspace
    out, before = _staged(arena, offset, send, mine, leaving)
    back, after = _staged(arena, offset + size - target.nbytes, receive, wanted, coming)
    assert out.nbytes <= size - target.nbytes
    start = group.bind_all_to_all(
        out, [_elements(box) for box in leaving], back, [_elements(box) for box in coming]
    )
    return Collective(group, start, before, [(part, piece) for piece, part in after])


def _pieces(
    task: Task, arena: Arena, whole: np.ndarray, base: Box, boxes: list[Box]
) -> tuple[np.ndarray, list[Copy]]:
    """The whole as one flat run of its pieces: itself if the first dim is cut, else staged."""
    if not task.attributes["dim"]:
        return _flat(whole), []
    return _staged(arena, task.workspace[0], whole, base, boxes)


def _staged(
    arena: Arena, offset: int, whole: np.ndarray, base: Box, boxes: list[Box]
) -> tuple[np.ndarray, list[Copy]]:
    """Scratch memory for the pieces one after another, each paired with its place in `whole`."""
    total = sum(map(_elements, boxes))
    flat = arena.view(offset, (total,), whole.dtype.name)
    copies: list[Copy] = []
    first = 0
    for box in boxes:
        shape = tuple(stop - start for start, stop in box)
        piece = flat[first : first + prod(shape)].reshape(shape)
        if piece.size:
            copies.append((piece, whole[_within(box, base)]))
        first += prod(shape)
    return flat, copies


def _part(view: np.ndarray, box: Box, base: Box) -> np.ndarray:
    """A part of a shard that begins at `base`: a view, with a dim even of a scalar."""
    where: Any = (*_within(box, base), ...)
    part = view[where]
    return part if part.ndim else part.reshape(1)


def _within(box: Box, base: Box) -> tuple[slice, ...]:
    """Where a part of a tensor lies in a shard that begins at `base`."""
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, base, strict=True))


def _common(a: Box, b: Box) -> Box:
    """The intersection, of size 0 in every dim that does not meet."""
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    box = tuple((start, max(start, stop)) for start, stop in pairs)
    empty = any(start == stop for start, stop in box)
    return tuple((x[0], x[0]) for x in a) if empty else box


def _elements(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)
