"""Step 8: boxing turns one layout of a tensor into another.

A hop changes the SBP on one mesh axis:

    S(i) -> B   all_gather        P -> B     all_reduce      B -> S(j)  slice, local
    P -> S(j)   reduce_scatter    S(i)->S(j) all_to_all      B -> P     keep first, local

It is legal if no inner axis splits the dim that changes (the shards would interleave). S -> P is
left out: it would hold the whole tensor on every rank. A conversion is the cheapest path of hops.

On the axis of time all hops are local, and only those to and from B are left:

    S(i) -> B   collect           P -> B     accumulate      B -> S(j)  slice

A hop from what is S or P in time is done, and priced, for each micro-batch. No path goes from S or
P by B to S: what is gathered is whole only when the loop is over.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.cost import collective_seconds, compute_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.errors import CompileError
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Broadcast, Layout, Partial, S, Sbp, box_shape, shard_box
from mpiflow.graph.tensor import is_narrow
from mpiflow.plan.slice import itemsize

LOCAL = {
    "slice": "Slice",
    "keep_first": "KeepFirst",
    "copy": "Identity",
    "accumulate": "Accumulate",
    "collect": "Collect",
}
"""Hops without a message, and the op that does each."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One change on one axis; `kind` is a collective or a key of LOCAL.

    `seconds` are those of one firing; there are `times` of them in a step.
    """

    kind: str
    axis: int
    source: Layout
    target: Layout
    seconds: float
    times: int = 1


@cache
def path(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: str, mesh: Mesh, machine: Machine
) -> tuple[Hop, ...]:
    """The cheapest hops from one layout to another (Dijkstra; ties by position)."""
    between = _choices({x for x in (*source, *target) if isinstance(x, S)}, shape)
    choices = [tuple(dict.fromkeys((b, a, *between))) for a, b in zip(source, target, strict=True)]
    if mesh.timed:
        choices[0] = tuple(dict.fromkeys((target[0], source[0])))
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
        for hop in _hops(layout, choices, shape, dtype, mesh, machine):
            if hop.target not in settled:
                pushed += 1
                cost = seconds + hop.seconds * hop.times
                heapq.heappush(queue, (cost, pushed, hop.target, (*hops, hop)))
    raise CompileError(f"no conversion leads from layout {source} to {target} of shape {shape}")


def prices(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    dtype: str,
    mesh: Mesh,
    machine: Machine,
) -> NDArray[np.float64]:
    """The predicted seconds from each source to each target; infinite where no path leads.

    On a timed mesh all sources are the same in time, and all targets.
    """
    used = {sbp for layout in (*sources, *targets) for sbp in layout[mesh.timed :]}
    choices = [_choices(used, shape)] * len(mesh.axes)
    if mesh.timed:
        choices[0] = tuple(dict.fromkeys(x[0] for x in (*targets, *sources)))
    index, table = _all_prices(shape, dtype, tuple(choices), mesh, machine)
    return table[np.ix_([index[x] for x in sources], [index[x] for x in targets])]


@cache
def _all_prices(
    shape: tuple[int, ...],
    dtype: str,
    choices: tuple[tuple[Sbp, ...], ...],
    mesh: Mesh,
    machine: Machine,
) -> tuple[dict[Layout, int], NDArray[np.float64]]:
    """Layouts of these choices an axis, numbered, and the seconds between any two (Floyd 1962)."""
    layouts = [x for x in product(*choices) if is_legal(x, shape, mesh)]
    index = {layout: i for i, layout in enumerate(layouts)}
    table = np.full((len(layouts), len(layouts)), inf)
    np.fill_diagonal(table, 0.0)
    for layout, i in index.items():
        for hop in _hops(layout, choices, shape, dtype, mesh, machine):
            table[i, index[hop.target]] = hop.seconds * hop.times
    for i in range(len(layouts)):
        np.minimum(table, table[:, i, None] + table[i], out=table)
    return index, table


def is_legal(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether a tensor can have this layout: dims exist, units divide, one kind of partial.

    Micro-batches are whole units already, so that axis need not name the unit of the others.
    """
    kinds = {sbp.reduce for sbp in layout if isinstance(sbp, Partial)}
    units: dict[int, int] = {}
    for axis, sbp in enumerate(layout):
        if isinstance(sbp, S):
            if sbp.dim >= len(shape) or shape[sbp.dim] % sbp.unit:
                return False
            if mesh.timed and not axis:
                continue
            if units.setdefault(sbp.dim, sbp.unit) != sbp.unit:
                return False
    return len(kinds) <= 1


def without_units(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout with unit 1 for every dim whose spans are the same with and without units.

    So a weight that is split by whole heads meets a product that knows no heads without a message.
    """
    if all(sbp.unit == 1 for sbp in layout if isinstance(sbp, S)):
        return layout
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
    choices: Sequence[Iterable[Sbp]],
    shape: tuple[int, ...],
    dtype: str,
    mesh: Mesh,
    machine: Machine,
) -> list[Hop]:
    """The legal hops from a layout to one of the choices of an axis."""
    found = []
    for axis, sbps in enumerate(choices):
        for sbp in sbps:
            kind = _kind(layout[axis], sbp, dtype)
            if mesh.timed and not axis:
                kind = _IN_TIME.get(kind, "")
            changed = (*layout[:axis], sbp, *layout[axis + 1 :])
            legal = kind and is_legal(changed, shape, mesh)
            if legal and not _interleaved(layout, sbp, axis):
                price = _price(kind, axis, layout, changed, shape, dtype, mesh, machine)
                looped = mesh.timed and not layout[0] == changed[0] == B
                times = mesh.micro_batches if looped else 1
                found.append(Hop(kind, axis, layout, changed, price, times))
    return found


def _choices(used: Iterable[Sbp], shape: tuple[int, ...]) -> tuple[Sbp, ...]:
    """What an axis may have on the way: B, any split, and what is used at the ends."""
    splits = [S(dim) for dim in range(len(shape))]
    return tuple(dict.fromkeys([B, *splits, *sorted(used, key=str)]))


def _kind(a: Sbp, b: Sbp, dtype: str) -> str:
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
        case Broadcast(), Partial() if dtype != "bool":
            return "keep_first" if b.reduce == "sum" else "copy"
    return ""


_IN_TIME = {"all_gather": "collect", "all_reduce": "accumulate", "slice": "slice"}
"""What takes the place of a hop on the axis of time."""


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
        part = source if kind == "collect" else target
        nbytes = prod(local_shape(shape, part, mesh)) * itemsize(dtype)
        return compute_seconds(machine, 0, 2 * nbytes, dtype)
    joint = (*source[:axis], B, *source[axis + 1 :])
    nbytes = prod(local_shape(shape, joint, mesh)) * itemsize(dtype)
    return collective_seconds(machine, kind, nbytes, mesh, (axis,))


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest shard, that of coordinate 0."""
    return box_shape(shard_box(shape, layout, mesh.sizes, (0,) * len(mesh.axes)))
