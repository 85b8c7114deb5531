"""Hops: the single steps between layouts, and the seconds that each takes.

One axis changes, or several in the same way at once, in one call on the group along all of them:

    S(i) -> B   all_gather        P -> B     all_reduce      B -> S(j)  slice, local
    P -> S(j)   reduce_scatter    S(i)->S(j) all_to_all      B -> P     keep first, local

That is legal if no other axis further inside splits the dim that changes (the shards would
interleave), and all_to_all is for one axis alone. Whatever else is to change between S and B, an
`exchange` of slices changes in one hop, see `plan.exchange`. S -> P is left out: it would hold the
whole tensor on every rank.

On the axis of time all hops are local, and only those to and from B are left:

    S(i) -> B   collect           P -> B     accumulate      B -> S(j)  slice
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.cost import collective_seconds, compute_seconds, exchange_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import UNION, B, Broadcast, Layout, Partial, S, Sbp, box_shape, shard_box
from mpiflow.graph.tensor import is_narrow
from mpiflow.plan.exchange import exchange_axes
from mpiflow.plan.slice import itemsize

LOCAL = {
    "slice": "Slice",
    "keep_first": "KeepFirst",
    "copy": "Identity",
    "accumulate": "Accumulate",
    "collect": "Collect",
}
"""Hops without a message, and the op that does each."""

_IN_TIME = {"all_gather": "collect", "all_reduce": "accumulate", "slice": "slice"}
"""What takes the place of a hop on the axis of time."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One step; `kind` is a collective or a key of LOCAL, `axes` are those that it runs along.

    `seconds` are those of one firing; there are `times` of them in a step.
    """

    kind: str
    axes: tuple[int, ...]
    source: Layout
    target: Layout
    seconds: float
    times: int = 1


def move(
    source: Layout, target: Layout, dtype: str, mesh: Mesh
) -> tuple[str, tuple[int, ...]] | None:
    """The kind of the hop between two layouts, and its axes; None where one hop does not do it."""
    pairs = list(zip(source, target, strict=True))
    axes = tuple(axis for axis, (a, b) in enumerate(pairs) if a != b)
    if not axes:
        return None
    change = pairs[axes[0]]
    alike = all(pairs[axis] == change for axis in axes)
    kind = _kind(*change, dtype) if alike else ""
    clear = not _interleaved(pairs, axes)
    if mesh.timed and not axes[0]:
        kind = _IN_TIME.get(kind, "")
        return (kind, axes) if kind and clear and len(axes) == 1 else None
    if kind and clear and (len(axes) == 1 or kind != "all_to_all"):
        return kind, axes
    if any(isinstance(sbp, Partial) for axis in axes for sbp in pairs[axis]):
        return None
    exchanged = exchange_axes(source, target)
    return ("exchange", exchanged) if exchanged else None


def _kind(a: Sbp, b: Sbp, dtype: str) -> str:
    if UNION in (a, b):
        return ""  # what an owner has of a list is of use for its rows alone
    match a, b:
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


def _interleaved(pairs: list[tuple[Sbp, Sbp]], axes: tuple[int, ...]) -> bool:
    """Whether an axis that stays splits a dim that changes on an axis further outside."""
    dims: set[int] = set()
    for axis, pair in enumerate(pairs):
        if axis in axes:
            dims |= {sbp.dim for sbp in pair if isinstance(sbp, S)}
        elif isinstance(pair[0], S) and pair[0].dim in dims:
            return True
    return False


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest shard, that of coordinate 0."""
    return box_shape(shard_box(shape, layout, mesh.sizes, (0,) * len(mesh.axes)))


def firings(source: Layout, target: Layout, mesh: Mesh) -> int:
    """How often a step makes a hop: for each micro-batch, if either end is one's own."""
    return mesh.micro_batches if mesh.timed and not source[0] == target[0] == B else 1


def hop_seconds(
    layouts: tuple[Layout, ...], shape: tuple[int, ...], dtype: str, mesh: Mesh, machine: Machine
) -> NDArray[np.float64]:
    """Seconds of one firing of the hop from each of these legal layouts to each; else infinite."""
    boxes = _boxes(layouts, shape, mesh)
    sizes = (boxes[..., 1] - boxes[..., 0]).prod(axis=-1)  # elements, by layout and corner
    nbytes = sizes[:, 0] * itemsize(dtype)
    table = np.full((len(layouts), len(layouts)), inf)
    np.fill_diagonal(table, 0.0)
    known = _structure(layouts, _class_of(dtype), mesh)
    for kind, axes, source, target, counted in known.alike:
        found, back = np.unique(nbytes[counted], return_inverse=True)
        if kind in LOCAL:
            each = [compute_seconds(machine, 0, 2 * int(n), dtype) for n in found]
        else:
            each = [collective_seconds(machine, kind, int(n), mesh, axes) for n in found]
        table[source, target] = np.array(each)[back]
    for axes, source, target, wanted, partners in known.exchanges:
        # Priced as the busiest rank: the most that one receives, or may have to send.
        stays = _common(boxes[source], boxes[target])
        moved = np.maximum(sizes[target], sizes[source] * wanted[:, None]) - stays
        most = moved.max(axis=1) * itemsize(dtype)
        cases, back = np.unique(np.stack([most, partners]), axis=1, return_inverse=True)
        each = [exchange_seconds(machine, int(n), int(p), mesh, axes) for n, p in cases.T]
        table[source, target] = np.array(each)[back.reshape(-1)]
    return table


def _boxes(layouts: tuple[Layout, ...], shape: tuple[int, ...], mesh: Mesh) -> NDArray[np.int64]:
    """(start, stop) by layout, corner of the mesh and dim; the first corner has largest shards.

    What stays where it is differs most between corners: they stand for all ranks.
    """
    ends = [
        (0,) if mesh.timed and not axis else tuple(dict.fromkeys((0, size - 1)))
        for axis, size in enumerate(mesh.sizes)
    ]
    corners = list(product(*ends))
    boxes = [[shard_box(shape, layout, mesh.sizes, x) for x in corners] for layout in layouts]
    return np.array(boxes, np.int64).reshape(len(layouts), len(corners), len(shape), 2)


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Elements that boxes share."""
    start, stop = np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])
    common: NDArray[np.int64] = (stop - start).clip(min=0).prod(axis=-1)
    return common


# Which hops there are between layouts does not depend on the shape, so it is found once.

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Structure:
    """The hops between layouts, by number of the source and of the target.

    `alike`: kind, axes, sources, targets, and the layouts whose largest shard is what counts: for
    a collective, what the group holds jointly. `exchanges`: axes, sources, targets, how many want
    an element, at most, and with how many ranks one exchanges.
    """

    alike: list[tuple[str, tuple[int, ...], Numbers, Numbers, Numbers]]
    exchanges: list[tuple[tuple[int, ...], Numbers, Numbers, Numbers, Numbers]]


def _class_of(dtype: str) -> str:
    """A dtype that stands for all which have the same hops."""
    return "float16" if is_narrow(dtype) else dtype if dtype == "bool" else "float32"


@cache
def _structure(layouts: tuple[Layout, ...], dtype: str, mesh: Mesh) -> _Structure:
    index = {layout: i for i, layout in enumerate(layouts)}
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, int, int]]] = {}
    free = np.ones((len(layouts), len(layouts)), bool)
    for source, target in _candidates(layouts, mesh):
        found = move(source, target, dtype, mesh)
        if found and found[0] != "exchange":
            i, j = index[source], index[target]
            free[i, j] = False
            counted = _counted(*found, source, target)
            groups.setdefault(found, []).append((i, j, index[counted]))
    alike = [
        (kind, axes, *np.array(members, np.int64).T)
        for (kind, axes), members in groups.items()
    ]  # fmt: skip
    return _Structure(alike, _exchanges(layouts, free, mesh))


def _candidates(layouts: tuple[Layout, ...], mesh: Mesh) -> Iterator[tuple[Layout, Layout]]:
    """Pairs of layouts that differ in the same way on all axes on which they differ."""
    known = set(layouts)
    axes = range(len(mesh.axes))
    sets = [c for n in axes for c in combinations(axes, n + 1) if n == 0 or not mesh.timed or c[0]]
    choices = [tuple(dict.fromkeys(layout[axis] for layout in layouts)) for axis in axes]
    for source in layouts:
        for changed in sets:
            if len({source[axis] for axis in changed}) == 1:
                for sbp in choices[changed[0]]:
                    target = tuple(sbp if a in changed else x for a, x in enumerate(source))
                    if sbp != source[changed[0]] and target in known:
                        yield source, target


def _counted(kind: str, axes: tuple[int, ...], source: Layout, target: Layout) -> Layout:
    """The layout of what a hop's price depends on."""
    if kind in LOCAL:
        return source if kind == "collect" else target
    return tuple(B if axis in axes else sbp for axis, sbp in enumerate(source))


def _exchanges(
    layouts: tuple[Layout, ...], free: NDArray[np.bool_], mesh: Mesh
) -> list[tuple[tuple[int, ...], Numbers, Numbers, Numbers, Numbers]]:
    """The exchanges between pairs that are free; as `move` and `exchange_axes`, for all at once."""
    numbers = {sbp: i for i, sbp in enumerate(dict.fromkeys(x for y in layouts for x in y))}
    code = np.array([[numbers[sbp] for sbp in layout] for layout in layouts])
    dims = np.array([[_dim(sbp) for sbp in layout] for layout in layouts])
    before, after = dims[:, None], dims[None]
    changed = code[:, None] != code[None]
    free = free & ~(changed & ((before == _PARTIAL) | (after == _PARTIAL))).any(axis=-1)
    if mesh.timed:
        free &= ~changed[..., 0]
    along = np.zeros(free.shape, np.int64)  # bit a: along axis a
    for axis in range(len(mesh.axes)):
        own = before[..., axis]
        moved = changed[..., axis].copy()
        for outer in range(axis):
            same = (before[..., outer] == own) | (after[..., outer] == own)
            moved |= changed[..., outer] & same
        along |= ((own >= 0) & moved).astype(np.int64) << axis
    found = []
    for bits in np.unique(along[free]):
        axes = tuple(axis for axis in range(len(mesh.axes)) if bits >> axis & 1)
        if axes:
            source, target = np.nonzero(free & (along == bits))
            found.append((axes, source, target, *_partners(dims, source, target, axes, mesh)))
    return found


def _partners(
    dims: Numbers, source: Numbers, target: Numbers, axes: tuple[int, ...], mesh: Mesh
) -> tuple[Numbers, Numbers]:
    """How many members want an element, and how many a rank sends to or receives from, at most.

    In each dim a shard meets as many others as theirs are smaller than it.
    """
    wanted = np.ones(len(source), np.int64)
    coming, leaving = wanted.copy(), wanted.copy()
    for axis in axes:
        wanted[dims[target, axis] == _BROADCAST] *= mesh.sizes[axis]
    for dim in range(int(dims.max()) + 1):
        here, there, sent = np.ones((3, len(source)), np.int64)
        for axis in range(mesh.timed, len(mesh.axes)):
            held, taken = dims[source, axis], dims[target, axis]
            here[held == dim] *= mesh.sizes[axis]
            there[taken == dim] *= mesh.sizes[axis]
            sent[(taken == dim) & (held != _BROADCAST)] *= mesh.sizes[axis]
        coming *= -(-here // there)
        leaving *= -(-sent // here)
    most = np.maximum(coming, leaving * wanted)
    return wanted, most.clip(max=mesh.extent(axes) - 1)


_BROADCAST, _PARTIAL = -1, -2


def _dim(sbp: Sbp) -> int:
    if isinstance(sbp, S):
        return sbp.dim
    return _BROADCAST if isinstance(sbp, Broadcast) else _PARTIAL
