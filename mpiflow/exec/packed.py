"""Collectives on several tensors at once, packed in the task's workspace.

    [ what the members have jointly: part 0 | part 1 | ... ][ the part of this rank ]

A part is what one member has of each tensor, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from mpiflow.exec.arena import Arena
from mpiflow.exec.transport import Group, Request
from mpiflow.graph.sbp import Box
from mpiflow.plan.records import Register, Task
from mpiflow.plan.slice import RankPlan, parts_of

Piece = tuple[np.ndarray, np.ndarray]
"""A stretch of a buffer, and its place in a tensor."""


def bind(
    task: Task,
    rank: RankPlan,
    registers: dict[str, Register],
    views: dict[str, np.ndarray],
    arena: Arena,
    group: Group,
) -> tuple[Callable[[], Request], list[Piece], list[Piece]]:
    """What starts an all_gather or reduce_scatter; what it sends, and receives, where."""
    gathers = task.op == "all_gather"
    parts = [registers[name] for name in parts_of(task)]
    wholes = task.outputs if gathers else task.inputs
    counts = rank.counts(task, registers)
    elements = sum(counts), counts[group.index]
    buffer = arena.view(task.workspace[0], (sum(elements),), parts[0].dtype)
    joint, own = buffer[: elements[0]], buffer[elements[0] :]
    bases = [rank.box(registers[name]) for name in wholes]
    joint_places = [
        _place(views[name], base, peer.box(part))
        for peer in rank.peers(task.axis)
        for name, base, part in zip(wholes, bases, parts, strict=True)
    ]
    joint_pieces = _pieces(joint, joint_places)
    own_pieces = _pieces(own, [views[part.name] for part in parts])
    if gathers:
        return group.bind_all_gather(own, joint, counts), own_pieces, joint_pieces
    reduce, work = task.attributes["reduce"], received(task, arena)
    start = group.bind_reduce_scatter(joint, own, counts, reduce, work)
    return start, joint_pieces, own_pieces


def received(task: Task, arena: Arena) -> Any:
    """The end of the workspace of a reduction of route mpi, for what is to be summed; else None."""
    if (first := task.attributes.get("received")) is None:
        return None
    offset, size = task.workspace
    return arena.scratch(offset + first, size - first)


def _place(whole: np.ndarray, base: Box, box: Box) -> np.ndarray:
    """The part of an array, which begins at `base`, that a box covers."""
    return whole[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, base, strict=True))]


def _pieces(buffer: np.ndarray, places: Sequence[np.ndarray]) -> list[Piece]:
    """The stretches of a buffer for these places, one after another."""
    pieces = []
    first = 0
    for place in places:
        count = prod(place.shape)
        if count:
            pieces.append((buffer[first : first + count].reshape(place.shape), place))
        first += count
    return pieces
