"""Step 8: boxing turns one layout of a tensor into another.

A hop changes the SBP on one mesh axis:

    S(i) -> B   all_gather        P -> B     all_reduce      B -> S(j)  slice, local
    P -> S(j)   reduce_scatter    S(i)->S(j) all_to_all      B -> P     keep first, local

It is legal if no inner axis splits the dim that changes (the shards would interleave). S -> P is
left out: it would hold the whole tensor on every rank. A conversion is the cheapest path of hops.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache
from math import inf, prod

from mpiflow.compiler.cost import collective_seconds, compute_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.errors import CompileError
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Broadcast, Layout, Partial, S, Sbp, box_shape, shard_box
from mpiflow.graph.tensor import is_narrow
from mpiflow.plan.slice import itemsize

LOCAL = {"slice": "Slice", "keep_first": "KeepFirst", "copy": "Identity"}
"""Hops without a message, and the op that does each."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One change on one axis; `kind` is a collective or a key of LOCAL."""

    kind: str
    axis: int
    source: Layout
    target: Layout
    seconds: float


@cache
def path(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: str, mesh: Mesh, machine: Machine
) -> tuple[Hop, ...]:
    """The cheapest hops from one layout to another (Dijkstra; ties by position)."""
    queue: list[tuple[float, int, Layout, tuple[Hop, ...]]] = [(0.0, 0, source, ())]
    settled: set[Layout] = set()
    pushed = 0
    while queue:
        seconds, _, layout, hops = heapq.heappop(queue)
        if layout == target:
            return hops
        if layout in settled:
            continue
        settled.add(layout)
        for hop in _hops(layout, source, target, shape, dtype, mesh, machine):
            if hop.target not in settled:
                pushed += 1
                heapq.heappush(queue, (seconds + hop.seconds, pushed, hop.target, (*hops, hop)))
    raise CompileError(f"no conversion leads from layout {source} to {target} of shape {shape}")


@cache
def seconds(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: str, mesh: Mesh, machine: Machine
) -> float:
    """The predicted time of a conversion; infinite where there is none."""
    try:
        return sum(hop.seconds for hop in path(source, target, shape, dtype, mesh, machine))
    except CompileError:
        return inf


def is_legal(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether a tensor can have this layout: dims exist, units divide, one kind of partial."""
    kinds = {sbp.reduce for sbp in layout if isinstance(sbp, Partial)}
    units: dict[int, int] = {}
    for sbp in layout:
        if isinstance(sbp, S):
            if sbp.dim >= len(shape) or shape[sbp.dim] % sbp.unit:
                return False
            if units.setdefault(sbp.dim, sbp.unit) != sbp.unit:
                return False
    return len(kinds) <= 1


def without_units(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout with unit 1 for every dim whose spans are the same with and without units.

    So a weight that is split by whole heads meets a product that knows no heads without a message.
    """
    parts: dict[int, int] = {}
    for sbp, size in zip(layout, mesh.sizes, strict=True):
        if isinstance(sbp, S):
            parts[sbp.dim] = parts.get(sbp.dim, 1) * size
    return tuple(
        S(sbp.dim)
        if isinstance(sbp, S) and not shape[sbp.dim] % (sbp.unit * parts[sbp.dim])
        else sbp
        for sbp in layout
    )


def _hops(
    layout: Layout,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    dtype: str,
    mesh: Mesh,
    machine: Machine,
) -> list[Hop]:
    found = []
    for axis in range(len(layout)):
        for sbp in _candidates(axis, source, target, shape):
            kind = _kind(layout[axis], sbp, target[axis], dtype)
            hop = _hop(kind, axis, layout, sbp, shape, dtype, mesh, machine) if kind else None
            if hop is not None:
                found.append(hop)
    return found


@cache
def _hop(
    kind: str,
    axis: int,
    layout: Layout,
    sbp: Sbp,
    shape: tuple[int, ...],
    dtype: str,
    mesh: Mesh,
    machine: Machine,
) -> Hop | None:
    """The hop that changes one axis to `sbp`; None where it is not legal."""
    changed = (*layout[:axis], sbp, *layout[axis + 1 :])
    if not is_legal(changed, shape, mesh) or _interleaved(layout, sbp, axis):
        return None
    price = _price(kind, axis, layout, changed, shape, dtype, mesh, machine)
    return Hop(kind, axis, layout, changed, price)


def _candidates(axis: int, source: Layout, target: Layout, shape: tuple[int, ...]) -> list[Sbp]:
    units = {sbp for sbp in (*source, *target) if isinstance(sbp, S)}
    splits = [S(dim) for dim in range(len(shape))]
    return list(dict.fromkeys([target[axis], source[axis], B, *splits, *sorted(units, key=str)]))


def _kind(a: Sbp, b: Sbp, wanted: Sbp, dtype: str) -> str:
    match a, b:
        case _ if a == b:
            return ""
        case S(), Broadcast():
            return "all_gather"
        case S(), S():
            return "all_to_all"
        case Partial(), _ if is_narrow(dtype):
            return ""  # the sum over many ranks of 16-bit floats would be rounded many times
        case Partial(), Broadcast():
            return "all_reduce"
        case Partial(), S():
            return "reduce_scatter"
        case Broadcast(), S():
            return "slice"
        case Broadcast(), Partial() if b == wanted and dtype != "bool":
            return "keep_first" if b.reduce == "sum" else "copy"
    return ""


def _interleaved(layout: Layout, sbp: Sbp, axis: int) -> bool:
    dims = {x.dim for x in (layout[axis], sbp) if isinstance(x, S)}
    return any(isinstance(x, S) and x.dim in dims for x in layout[axis + 1 :])


def _price(
    kind: str,
    axis: int,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    dtype: str,
    mesh: Mesh,
    machine: Machine,
) -> float:
    """Priced on what the group holds jointly: the tensor split by the other axes only."""
    if kind in LOCAL:
        nbytes = prod(local_shape(shape, target, mesh)) * itemsize(dtype)
        return compute_seconds(machine, 0, 2 * nbytes, dtype)
    joint = (*source[:axis], B, *source[axis + 1 :])
    nbytes = prod(local_shape(shape, joint, mesh)) * itemsize(dtype)
    return collective_seconds(machine, kind, nbytes, mesh.sizes[axis])


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest shard, that of coordinate 0."""
    return box_shape(shard_box(shape, layout, mesh.sizes, (0,) * len(mesh.axes)))
