"""What a simulation says of a step, in figures: for each stage, and of all; the items are the step.

step = computing + waiting for other stages + for collectives + for copies to or from the device +
       for input + for writes + other
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpiflow.plan.records import Plan
from mpiflow.plan.simulator import LaneTimes, Simulation, simulate

ITEMS = ("computing", "stages", "collectives", "copies", "input", "writes", "idle")
"""What a step is made of, as compute sees it: its own work, and what it waits for."""


@dataclass(frozen=True, slots=True)
class Row:
    """A step of ranks that do the same: seconds by item, and the bytes of their arena."""

    label: str
    ranks: int
    items: tuple[tuple[str, float], ...]
    arena: int

    @property
    def seconds(self) -> float:
        """The step: the sum of the items."""
        return sum(seconds for _, seconds in self.items)


@dataclass(frozen=True, slots=True)
class Outlook:
    """A step in figures. `ready` is how long variables take to be initialised before the first."""

    step: float
    first: float
    ready: float
    rows: tuple[Row, ...]

    @property
    def mean(self) -> Row:
        """All ranks taken together; its arena is the largest."""
        ranks = sum(row.ranks for row in self.rows)
        items = tuple(
            (name, sum(dict(row.items)[name] * row.ranks for row in self.rows) / ranks)
            for name in ITEMS
        )
        return Row("all", ranks, items, max(row.arena for row in self.rows))

    def plain(self) -> dict[str, Any]:
        """As `mpiflow simulate --json` gives it."""
        return {
            "step_seconds": self.step,
            "first_step_seconds": self.first,
            "initialise_seconds": self.ready,
            "bubble_seconds": dict(self.mean.items)["stages"],
            "items": dict(self.mean.items),
            "stages": [
                {"name": r.label, "ranks": r.ranks, "arena_bytes": r.arena, "items": dict(r.items)}
                for r in self.rows
            ],
        }


def outlook(plan: Plan, simulation: Simulation) -> Outlook:
    """The figures of a simulation's last step."""
    first = plan.program("initialise")
    ready = simulate(plan, "initialise", 1).step_seconds if first and first.tasks else 0.0
    rows = tuple(_row(plan, one) for one in simulation.lanes)
    return Outlook(simulation.step_seconds, simulation.first_step_seconds, ready, rows)


def _row(plan: Plan, one: LaneTimes) -> Row:
    waits = dict(one.exposed)
    items = (
        one.computing,
        waits["receive"] + waits["send"],
        waits["comm"],
        waits["h2d"] + waits["d2h"],
        waits["read"],
        waits["write"],
        waits["compute"],
    )
    arena = plan.at_stage(one.lane.stage).arena()
    return Row(one.lane.label, one.lane.ranks, tuple(zip(ITEMS, items, strict=True)), arena)
