"""What more ranks bring: a job compiled and simulated for several numbers of nodes.

The batch stays as it is (strong scaling), so there is an end to it: a step is at best as short as
what every rank has to do however many there are, and what they send one another comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpiflow.compiler.domains import DATA
from mpiflow.errors import UsageError
from mpiflow.graph.mesh import Mesh, parse_mesh
from mpiflow.plan.outlook import Outlook
from mpiflow.plan.text import size_text, time_text

SHORTER = 0.99
"""A step that takes more than this share of another's time is no shorter."""


@dataclass(frozen=True, slots=True)
class Point:
    """A job on so many nodes: its mesh, and its step; or why there is no plan for it."""

    nodes: int
    mesh: Mesh
    rows: int = 0
    outlook: Outlook | None = None
    refused: str = ""

    def plain(self) -> dict[str, Any]:
        """As --json gives it."""
        about = {"nodes": self.nodes, "ranks": self.mesh.size, "mesh": self.mesh.described()}
        if self.outlook is None:
            return {**about, "refused": self.refused}
        return {**about, "rows": self.rows, **self.outlook.plain()}


def numbers_of(texts: Sequence[str]) -> list[int]:
    """The numbers that `1,2,4` or several of such name, in order; UsageError for others."""
    found: set[int] = set()
    for part in ",".join(texts).split(","):
        if not part.strip().isdecimal() or not int(part):
            raise UsageError(f"--nodes {part!r}: give numbers of nodes, as in --nodes 1,2,4,8")
        found.add(int(part))
    return sorted(found)


def mesh_for(text: str | None, ranks: int) -> Mesh:
    """The mesh of --mesh with as many ranks along `data` as there are; UsageError if none fits."""
    if text is None:
        return Mesh(((DATA, ranks),))
    mesh = parse_mesh(text)
    if mesh.by_stage:
        raise UsageError(f"--nodes: give a --mesh whose stages are alike; {mesh} is not one")
    axes = dict(mesh.axes)
    axes.setdefault(DATA, 1)
    others = Mesh(tuple(axis for axis in axes.items() if axis[0] != DATA)).size
    if ranks % others:
        raise UsageError(
            f"--nodes: {ranks} ranks cannot be shared out over the axes of --mesh {text} besides"
            f" {DATA!r}, which take {others}"
        )
    axes[DATA] = ranks // others
    return Mesh(tuple(axes.items()))


def scaling_rows(points: Sequence[Point]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The table of some numbers of nodes, in their order, and its heads.

    `of linear` compares with the smallest of them that has a plan.
    """
    heads = (
        ">nodes", ">ranks", "mesh", ">step", ">rows a second", ">of linear", ">computing",
        ">other stages", ">collectives", ">input", ">arena",
    )  # fmt: skip
    base = next((p for p in points if p.outlook), None)
    return [_row(point, base) for point in points], heads


def _row(point: Point, base: Point | None) -> tuple[str, ...]:
    about = str(point.nodes), str(point.mesh.size), str(point.mesh)
    if point.outlook is None or base is None or base.outlook is None:
        return *about, *("-",) * 8
    found = point.outlook
    items, step = dict(found.mean.items), found.step or 1.0
    linear = base.outlook.step * base.mesh.size / (step * point.mesh.size)
    shares = (items[name] / step for name in ("computing", "stages", "collectives", "input"))
    return (
        *about,
        time_text(found.step),
        f"{point.rows / step:,.0f}",
        f"{linear:.0%}",
        *(f"{share:.0%}" for share in shares),
        size_text(found.mean.arena),
    )


def conclusion(points: Sequence[Point]) -> str:
    """Where a step is no shorter for more ranks, and what it is made of there."""
    known = [(p, p.outlook) for p in points if p.outlook is not None]
    if not known:
        return "there is no plan for any of these"
    best = min(known, key=lambda pair: pair[1].step)
    first = next(pair for pair in known if best[1].step > SHORTER * pair[1].step)
    point, found = first
    if first is known[-1]:
        return (
            f"a step is still shorter with more ranks, up to the {point.mesh.size} tried:"
            f" {time_text(found.step)}"
        )
    later = ", ".join(f"{time_text(o.step)} on {p.mesh.size}" for p, o in known
                      if p.mesh.size > point.mesh.size)  # fmt: skip
    items = dict(known[-1][1].mean.items)
    largest = max(items, key=lambda name: items[name])
    share = items[largest] / (known[-1][1].step or 1.0)
    return (
        f"beyond {point.mesh.size} ranks a step is no shorter: {time_text(found.step)} there,"
        f" {later}; on {known[-1][0].mesh.size}, {share:.0%} of it is {_WORDS[largest]}"
    )


_WORDS = {
    "computing": "computation", "stages": "waiting for other stages",
    "collectives": "waiting for collectives", "input": "waiting for reads",
    "writes": "waiting for writes", "idle": "idle",
}  # fmt: skip
