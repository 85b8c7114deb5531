"""Step 8: boxing turns one layout of a tensor into another.

A conversion is the cheapest path of hops, see `hops`; solver and lowering ask the same table.

On the axis of time a hop from what is S or P in time is done, and priced, for each micro-batch. No
path goes from S or P by B to S: what is gathered is whole only when the loop is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from math import inf

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.hops import LOCAL, Hop, firings, hop_seconds, local_shape, move
from mpiflow.compiler.machine import Machine
from mpiflow.errors import CompileError
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Layout, Partial, S, Sbp

__all__ = ["LOCAL", "Hop", "is_legal", "local_shape", "path", "prices", "without_units"]

_LEAST = 1e-13
"""Seconds that a hop counts at least, so that of paths that cost the same the shortest is taken."""


@cache
def path(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: str, mesh: Mesh, machine: Machine
) -> tuple[Hop, ...]:
    """The cheapest hops from one layout to another (Dijkstra 1959; ties by position)."""
    choices = _choices((source,), (target,), shape, mesh)
    layouts, each, total = _hop_table(shape, dtype, choices, mesh, machine)
    start, end = layouts.index(source), layouts.index(target)
    best = np.full(len(layouts), inf)
    best[start] = 0.0
    before = [start] * len(layouts)
    settled = np.zeros(len(layouts), bool)
    while not settled[end]:
        i = int(np.where(settled, inf, best).argmin())
        if settled[i] or best[i] == inf:
            text = f"from layout {source} to {target} of shape {shape}"
            raise CompileError(f"no conversion leads {text}")
        settled[i] = True
        for j in np.flatnonzero(best[i] + total[i] + _LEAST < best).tolist():
            best[j], before[j] = best[i] + total[i, j] + _LEAST, i
    hops: list[Hop] = []
    while end != start:
        a, b = layouts[before[end]], layouts[end]
        found = move(a, b, dtype, mesh)
        assert found is not None
        seconds = float(each[before[end], end])
        hops.append(Hop(*found, a, b, seconds, firings(a, b, mesh)))
        end = before[end]
    return tuple(reversed(hops))


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
    choices = _choices(sources, targets, shape, mesh)
    index, table = _all_prices(shape, dtype, choices, mesh, machine)
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
    layouts, _, total = _hop_table(shape, dtype, choices, mesh, machine)
    table = total.copy()
    for i in range(len(layouts)):
        np.minimum(table, table[:, i, None] + table[i], out=table)
    return {layout: i for i, layout in enumerate(layouts)}, table


@cache
def _hop_table(
    shape: tuple[int, ...],
    dtype: str,
    choices: tuple[tuple[Sbp, ...], ...],
    mesh: Mesh,
    machine: Machine,
) -> tuple[tuple[Layout, ...], NDArray[np.float64], NDArray[np.float64]]:
    """The legal layouts of these choices, the seconds of the hops between them, and in a step."""
    layouts = tuple(x for x in product(*choices) if is_legal(x, shape, mesh))
    each = hop_seconds(layouts, shape, dtype, mesh, machine)
    if not mesh.timed:
        return layouts, each, each
    times = np.array([[firings(a, b, mesh) for b in layouts] for a in layouts])
    return layouts, each, each * times


def _choices(
    sources: Sequence[Layout], targets: Sequence[Layout], shape: tuple[int, ...], mesh: Mesh
) -> tuple[tuple[Sbp, ...], ...]:
    """What each axis may have on the way: B, any split, and what is used at the ends.

    On the axis of time: what is used there, and that of the target first.
    """
    used: Iterable[Sbp] = {x for y in (*sources, *targets) for x in y[mesh.timed :]}
    splits = [S(dim) for dim in range(len(shape))]
    choices = [tuple(dict.fromkeys([B, *splits, *sorted(used, key=str)]))] * len(mesh.axes)
    if mesh.timed:
        choices[0] = tuple(dict.fromkeys(x[0] for x in (*targets, *sources)))
    return tuple(choices)


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
