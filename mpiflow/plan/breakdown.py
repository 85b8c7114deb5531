"""What the figures of two plans are made of, so that the changes of the items make up the whole.

Seconds are counted in units of the last digit that is told of a step, and rounded so that the
items have the sum that is told: the largest remainders are rounded up, and what that leaves is an
item too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, replace
from math import floor, log10

from mpiflow.graph.mesh import STAGE
from mpiflow.plan.peak import Peak, peak
from mpiflow.plan.records import Plan, Program
from mpiflow.plan.simulator import simulate
from mpiflow.plan.traffic import sent_each

_DIGITS = 4
"""Of a step's seconds, in plans too."""
_WAITS = {
    "compute": "idle",
    "comm": "waiting for collectives",
    "send": "waiting for messages to leave",
    "receive": "waiting for other stages",
    "h2d": "waiting for copies to the device",
    "d2h": "waiting for copies to the host",
    "read": "waiting for reads",
    "write": "waiting for writes",
}


@dataclass(frozen=True, slots=True)
class Item:
    """What two plans have of something, as multiples of the quantum of its breakdown."""

    name: str
    a: int
    b: int

    @property
    def change(self) -> int:
        """How much more the second has."""
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A figure of two plans, in parts. `unit` is "s" or "B"; an item counts `quantum` of them.

    `notes` say of what moment the figures are.
    """

    title: str
    unit: str
    quantum: float
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> Item:
        """The whole: the sum of the items."""
        return Item("total", sum(i.a for i in self.items), sum(i.b for i in self.items))


def breakdowns(a: Plan, b: Plan) -> list[Breakdown]:
    """The seconds of a training step, the bytes that it sends, and the memory at the peak."""
    found = []
    ours, theirs = a.program("train"), b.program("train")
    if ours and theirs and ours.tasks and theirs.tasks:
        found.append(_in_seconds("step of train", step_seconds(a, ours), step_seconds(b, theirs)))
        sent = _sent(a, ours), _sent(b, theirs)
        found.append(_joined("sent in a step, by the rank that sends most", "B", 1.0, *sent))
    peaks = peak(_largest(a)), peak(_largest(b))
    title = "memory of a rank, at the peak"
    memory = _joined(title, "B", 1.0, *(dict(each.classes) for each in peaks))
    moments = (f"first: {_moment(peaks[0])}", f"second: {_moment(peaks[1])}")
    found.append(replace(memory, notes=moments))
    return found


def _largest(plan: Plan) -> Plan:
    """The pipeline stage whose arena is largest."""
    return max(plan.stages(), key=lambda stage: stage.arena())


def _moment(at: Peak) -> str:
    """When the arena is fullest."""
    where = f" ({at.where.rpartition('/')[2]})" if at.where else ""
    return f"fullest in {at.program} while {at.task} runs{where}" if at.task else "variables only"


def step_seconds(plan: Plan, program: Program) -> dict[str, float]:
    """The seconds of a step by the op that computes, and by what the computation waits for.

    Of pipeline stages, the average.
    """
    seconds: dict[str, float] = {}
    for part in plan.programs:
        for task in part.tasks if part.name == program.name else ():
            if task.kind == "compute":
                firings = part.micro_batches if task.phase % 2 else 1
                spent = firings * task.seconds / plan.mesh.stages
                seconds[f"compute {task.op}"] = seconds.get(f"compute {task.op}", 0.0) + spent
    for kind, waited in simulate(plan, program.name).exposed:
        seconds[_WAITS[kind]] = waited
    return seconds


def _sent(plan: Plan, program: Program) -> dict[str, int]:
    """The bytes of each kind of collective, and what they go along."""
    sent = Counter[str]()
    for task, nbytes in sent_each(plan, program):
        sent[f"{task.op} along {task.axis or STAGE}"] += nbytes
    return dict(sent)


def _in_seconds(title: str, a: dict[str, float], b: dict[str, float]) -> Breakdown:
    largest = max(sum(a.values()), sum(b.values()))
    digits = floor(log10(largest)) + 1 - _DIGITS if largest > 0 else 0
    same = {name for name in a if a[name] == b.get(name)}
    parts = (apportioned(x, 10.0**digits, same) for x in (a, b))
    return _joined(title, "s", 10.0**digits, *parts)


def apportioned(parts: dict[str, float], quantum: float, same: Set[str]) -> dict[str, int]:
    """Each part in multiples of `quantum`, which add up to the rounded sum of the parts.

    Those of `same` are rounded by themselves, so that they do not differ over plans.
    """
    exact = {name: value / quantum for name, value in parts.items()}
    counts = {name: round(x) if name in same else floor(x) for name, x in exact.items()}
    total = round(sum(exact.values()))
    others = sorted(
        (name for name in exact if name not in same), key=lambda n: counts[n] - exact[n]
    )
    for name in others[: max(0, total - sum(counts.values()))]:
        counts[name] += 1
    return counts | {"rounding": total - sum(counts.values())}


def _joined(
    title: str, unit: str, quantum: float, a: dict[str, int], b: dict[str, int]
) -> Breakdown:
    names = [*a, *(name for name in b if name not in a)]
    items = [Item(name, a.get(name, 0), b.get(name, 0)) for name in names]
    return Breakdown(title, unit, quantum, tuple(i for i in items if i.a or i.b))
