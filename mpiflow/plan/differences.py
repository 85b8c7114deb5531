"""Which tasks took longest beyond what was predicted of them, or fell shortest of it, in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpiflow.plan.records import COMPUTE, READ, Program
from mpiflow.plan.tracefile import RankTrace

_MOST = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """A task on a rank: the seconds of all its firings in a step, predicted and measured."""

    task: str
    op: str
    where: str
    rank: int
    predicted: float
    measured: float

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def differences(program: Program, trace: RankTrace) -> list[Difference]:
    """Of each kernel and read of a program that was recorded: the median over the steps.

    What ranks do together is left out: how long that takes depends on who comes last.
    """
    tasks = {task.name: task for task in program.tasks}
    taken: dict[str, list[np.ndarray]] = {}
    for i, (name, _) in enumerate(trace.firings):
        if tasks[name].kind in (COMPUTE, READ):
            taken.setdefault(name, []).append(trace.times[:, i, 1] - trace.times[:, i, 0])
    found = []
    for name, firings in taken.items():
        task, steps = tasks[name], np.sum(firings, axis=0)
        seen = steps[~np.isnan(steps)]
        if seen.size:
            predicted = task.seconds * len(firings)
            measured = float(np.median(seen))
            found.append(Difference(name, task.op, task.where, trace.rank, predicted, measured))
    return found


def most_different(found: Iterable[Difference]) -> list[Difference]:
    """The three whose measured seconds are furthest from the predicted ones.

    Of each task, that of the rank where it differs most.
    """
    worst: dict[str, Difference] = {}
    for each in sorted(found, key=lambda d: (-abs(d.measured - d.predicted), d.task, d.rank)):
        worst.setdefault(each.task, each)
    return list(worst.values())[:_MOST]
