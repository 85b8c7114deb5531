"""What ranks hold when their arenas are fullest: a line for each stage, and a report of it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpiflow.garbage import no_collection
from mpiflow.plan.peak import Peak, peak
from mpiflow.plan.places import HOST, PINNED
from mpiflow.plan.records import Plan
from mpiflow.plan.text import size_text, table

_LARGEST = 10
"""The tensors of a stage that a report names."""
_HEADS = {
    "optimizer state": "optimizer", "read slots": "reads", "staging of saves": "staging",
    "communication": "messages", "unused then": "unused",
}  # fmt: skip
"""Shorter names of classes, for the heads of columns."""


@no_collection()
def peaks(plan: Plan) -> tuple[Peak, ...]:
    """The fullest moment of each stage; of the one there is, without stages."""
    return tuple(map(peak, plan.stages()))


def figures(plan: Plan) -> list[dict[str, Any]]:
    """The memory of each stage as `mpiflow plan --json` gives it; classes add up to the arena."""
    return [
        {
            "stage": stage,
            "arena_bytes": _arena(at),
            **_pinned_figure(plan, stage),
            "classes": dict(at.classes),
            "program": at.program,
            "task": at.task,
            "line": at.where,
            "largest": [
                {"name": t.name, "class": t.kind, "bytes": t.nbytes, "times": t.times,
                 "line": t.where}
                for t in at.tensors[:_LARGEST]
            ],
        }
        for stage, at in enumerate(peaks(plan))
    ]  # fmt: skip


def show_memory(plan: Plan) -> str:
    """A line for each stage: what its arena holds at the fullest moment, by class."""
    return "\n".join(_classes(plan, peaks(plan)))


def memory_report(plan: Plan) -> str:
    """Of each stage the classes, the fullest moment, and the largest tensors in memory then."""
    every = peaks(plan)
    lines = [f"{plan.job} for {plan.mesh.size} ranks, mesh {plan.mesh}"]
    if plan.layouts.limit:
        lines[0] += f", at most {size_text(plan.layouts.limit)} a rank"
    lines += _classes(plan, every)
    lines += [
        f"  whole process: {size_text(plan.process_bytes)}, with Python, MPI, HDF5 and what reading"
        " keeps"
    ]
    for stage, at in enumerate(every):
        lines += ["", *_largest(f"stage {stage}: " if len(every) > 1 else "", at)]
    return "\n".join(lines)


def _arena(at: Peak) -> int:
    return sum(nbytes for _, nbytes in at.classes)


def _pinned_figure(plan: Plan, stage: int) -> dict[str, int]:
    """The pinned memory of a stage, in plans that have any."""
    return {"pinned_bytes": plan.at_stage(stage).arena(PINNED)} if plan.device != HOST else {}


def _classes(plan: Plan, every: Sequence[Peak]) -> list[str]:
    """A table of classes; those that are empty everywhere are left out."""
    held = [dict(at.classes) for at in every]
    kinds = [kind for kind in held[0] if any(classes[kind] for classes in held)]
    heads = [">arena", *(f">{_HEADS.get(kind, kind)}" for kind in kinds)]
    rows = [
        [size_text(_arena(at)), *(size_text(classes[kind]) for kind in kinds)]
        for at, classes in zip(every, held, strict=True)
    ]
    if plan.device != HOST:
        heads.append(">pinned")
        sizes = (size_text(stage.arena(PINNED)) for stage in plan.stages())
        rows = [[*row, size] for row, size in zip(rows, sizes, strict=True)]
    if plan.mesh.stages > 1:
        heads, rows = [">stage", *heads], [[str(i), *row] for i, row in enumerate(rows)]
    return ["memory of a rank, at the fullest moment", *table(rows, heads)]


def _largest(title: str, at: Peak) -> list[str]:
    """When most is held, and a line for each of the largest tensors then."""
    if not at.task:
        return [f"{title}holds variables only"]
    shown, others = at.tensors[:_LARGEST], at.tensors[_LARGEST:]
    rows = [
        (size_text(t.nbytes), f"x {t.times}" if t.times > 1 else "", t.name, t.kind, _line(t.where))
        for t in shown
    ]
    lines = [
        f"{title}fullest in {at.program} while {at.task} runs  {_line(at.where)}".rstrip(),
        *table(rows, (">held", "slots", "tensor", "class", "line")),
    ]
    if others:
        rest = size_text(sum(tensor.nbytes for tensor in others))
        lines.append(f"  and {len(others):,} more, {rest} together")
    return lines


def _line(where: str) -> str:
    return where.rpartition("/")[2]
