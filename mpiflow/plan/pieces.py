"""Messages between pipeline stages: which rank sends which part of a tensor to which.

Stages of equal ranks hold a tensor in one layout, and each rank sends its shard to the one with the
same place in the other stage. Where the ranks of two stages differ, either has the tensor in a
layout of its own, and the task names the other's mesh and layout. Then what travels are the parts
that a shard of the sender and one of the receiver have in common. Of ranks that hold the same, one
sends to each that needs it, in turn:

    data=3, S(0)  ->  data=1, B      each of three sends its rows
    data=2, B     ->  data=3, S(0)   the first sends to ranks 0 and 2, the second to rank 1
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from mpiflow.graph.mesh import Mesh, parse_mesh
from mpiflow.graph.sbp import Box, Layout, box_shape, parse_layout, shard_box
from mpiflow.plan.records import SEND, Register, Task
from mpiflow.plan.slice import RankPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, and the places in their stages of who sends and who receives it."""

    sender: int
    receiver: int
    box: Box


def is_in_pieces(task: Task) -> bool:
    """Whether a send or a receive is between stages that hold the tensor in different ways."""
    return "mesh" in task.attributes


def pieces_of(task: Task, register: Register, rank: RankPlan) -> tuple[tuple[int, Box], ...]:
    """What a rank sends or receives: the place of the other in its stage, and the part."""
    if not is_in_pieces(task):
        return ((rank.rank, rank.box(register)),)
    sides = _sides(task, register, rank.mesh)
    return _by_rank(*sides, register.micro, task.kind == SEND).get(rank.rank, ())


def most_pieces(task: Task, register: Register, mesh: Mesh) -> int:
    """How many messages a rank sends or receives for a task, of any on either side."""
    if not is_in_pieces(task):
        return 1
    return messages_of_one(all_pieces(task, register, mesh))


def is_strided(task: Task, register: Register, mesh: Mesh) -> bool:
    """Whether anybody sends or receives a piece that does not lie in one run of its shard."""
    if not is_in_pieces(task):
        return False
    source, source_mesh, target, target_mesh = _sides(task, register, mesh)[1:]
    return any(
        not _is_run(piece.box, shard_box(register.shape, layout, of.sizes, of.coordinates(place)))
        for piece in all_pieces(task, register, mesh)
        for layout, of, place in (
            (source, source_mesh, piece.sender),
            (target, target_mesh, piece.receiver),
        )
    )


def _is_run(box: Box, base: Box) -> bool:
    """Whether a part of an array, in row-major order, has its elements side by side."""
    sizes, whole = box_shape(box), box_shape(base)
    cut = [dim for dim in range(len(sizes)) if sizes[dim] < whole[dim]]
    return not cut or prod(sizes[: cut[-1]]) == 1


def all_pieces(task: Task, register: Register, mesh: Mesh) -> tuple[Piece, ...]:
    """What all ranks send each other in a message between stages of different ranks."""
    return pieces_between(*_sides(task, register, mesh))


def messages_of_one(pieces: tuple[Piece, ...]) -> int:
    """How many pieces a rank sends or receives, the one with most on either side."""
    counts = Counter(("from", piece.sender) for piece in pieces)
    counts.update(("to", piece.receiver) for piece in pieces)
    return max(counts.values(), default=0)


def most_elements(pieces: tuple[Piece, ...]) -> int:
    """The elements that a rank sends or receives, of the one with most on either side."""
    counts = Counter[tuple[str, int]]()
    for piece in pieces:
        count = prod(box_shape(piece.box))
        counts.update({("from", piece.sender): count, ("to", piece.receiver): count})
    return max(counts.values(), default=0)


def _sides(
    task: Task, register: Register, mesh: Mesh
) -> tuple[tuple[int, ...], Layout, Mesh, Layout, Mesh]:
    """The arguments of `pieces_between` for a task on a register of a stage."""
    theirs = parse_mesh(task.attributes["mesh"]).in_time(mesh.micro_batches)
    sides = [(register.layout, mesh), (parse_layout(task.attributes["layout"]), theirs)]
    source, target = sides if task.kind == SEND else reversed(sides)
    return (register.shape, *source, *target)


@lru_cache(maxsize=4096)
def _by_rank(
    shape: tuple[int, ...],
    source: Layout,
    source_mesh: Mesh,
    target: Layout,
    target_mesh: Mesh,
    micro: int,
    sends: bool,
) -> dict[int, tuple[tuple[int, Box], ...]]:
    """What each rank sends, or receives, as `pieces_of` gives it."""
    found: dict[int, tuple[tuple[int, Box], ...]] = {}
    for piece in pieces_between(shape, source, source_mesh, target, target_mesh, micro):
        ends = piece.sender, piece.receiver
        mine, other = ends if sends else reversed(ends)
        found[mine] = (*found.get(mine, ()), (other, piece.box))
    return found


@lru_cache(maxsize=4096)
def pieces_between(
    shape: tuple[int, ...],
    source: Layout,
    source_mesh: Mesh,
    target: Layout,
    target_mesh: Mesh,
    micro: int = 0,
) -> tuple[Piece, ...]:
    """All pieces of a tensor that goes from one stage to another, by receiver."""
    holders: dict[Box, list[int]] = {}
    for place in range(source_mesh.size):
        box = shard_box(shape, source, source_mesh.sizes, source_mesh.coordinates(place, micro))
        holders.setdefault(box, []).append(place)
    held = list(holders)
    bounds = np.array(held, np.int64).reshape(len(held), len(shape), 2)
    taken = [0] * len(held)
    found = []
    for place in range(target_mesh.size):
        box = shard_box(shape, target, target_mesh.sizes, target_mesh.coordinates(place, micro))
        wanted = np.array(box, np.int64).reshape(len(shape), 2)
        starts = np.maximum(bounds[:, :, 0], wanted[:, 0])
        stops = np.minimum(bounds[:, :, 1], wanted[:, 1])
        for i in np.flatnonzero((starts < stops).all(axis=1)).tolist():
            senders = holders[held[i]]
            common = tuple(zip(starts[i].tolist(), stops[i].tolist(), strict=True))
            found.append(Piece(senders[taken[i] % len(senders)], place, common))
            taken[i] += 1
    return tuple(found)
