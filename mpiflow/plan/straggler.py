"""Ranks that are slower than others: who waits for them, in as few lanes as tell it exactly.

One slow rank makes different lanes of the ranks of each stage: on every axis a rank stands where
the slow one does, or does not. All that differ on the same axes wait for the same things, as the
plan treats the positions on an axis alike; with three axes that makes eight lanes a stage. A stage
with ranks of another number is one lane, of which all wait for all of the others.
"""

from __future__ import annotations

import re
from itertools import product
from math import isfinite, prod

from mpiflow.errors import UsageError
from mpiflow.plan.records import Plan
from mpiflow.plan.runs import Lane

_FORM = "give FACTOR@RANK, as in 1.3@5, or FACTOR@stage=STAGE"


def straggler_lanes(plan: Plan, text: str) -> tuple[Lane, ...]:
    """The lanes where a rank, or a stage, computes so many times slower: 1.3@5, 1.3@stage=2.

    UsageError for what names no rank of the plan.
    """
    match = re.fullmatch(r"([0-9.]+)@(stage=)?(\d+)", text.strip())
    if match is None:
        raise UsageError(f"--straggler {text}: {_FORM}")
    try:
        factor = float(match[1])
    except ValueError as error:
        raise UsageError(f"--straggler {text}: {match[1]} is no number; {_FORM}") from error
    if not isfinite(factor) or factor <= 0:
        raise UsageError(f"--straggler {text}: the factor must be more than 0")
    number, stages, ranks = int(match[3]), plan.mesh.stages, plan.mesh.size
    if match[2] and number >= stages:
        raise UsageError(f"--straggler {text}: the plan has {stages} stages, 0 to {stages - 1}")
    if not match[2] and number >= ranks:
        raise UsageError(f"--straggler {text}: the plan has {ranks} ranks, 0 to {ranks - 1}")
    return _slow_stage(plan, number, factor) if match[2] else _slow_rank(plan, number, factor)


def _slow_stage(plan: Plan, slow: int, factor: float) -> tuple[Lane, ...]:
    inside = plan.mesh.within_stage
    return tuple(
        Lane(stage, f"stage {stage}", inside(stage).size, factor if stage == slow else 1.0)
        for stage in range(plan.mesh.stages)
    )


def _slow_rank(plan: Plan, rank: int, factor: float) -> tuple[Lane, ...]:
    slow = plan.mesh.stage_of(rank)[0]
    lanes: list[Lane] = []
    for stage in range(plan.mesh.stages):
        inside = plan.mesh.within_stage(stage)
        alike = inside == plan.mesh.within_stage(slow)
        classes = [(0, 1) if size > 1 and alike else (0,) for size in inside.sizes]
        for place in product(*classes):
            ranks = (size - 1 if at else 1 for at, size in zip(place, inside.sizes, strict=True))
            lanes.append(
                Lane(
                    stage,
                    _label(plan, stage, place, rank) if alike else f"stage {stage}",
                    prod(ranks) if alike else inside.size,
                    factor if stage == slow and not any(place) else 1.0,
                    place,
                )
            )
    return tuple(lanes)


def _label(plan: Plan, stage: int, place: tuple[int, ...], rank: int) -> str:
    """The ranks of a class in words: those along the axes on which they stand elsewhere."""
    inside = plan.mesh.within_stage(stage)
    away = [name for name, at in zip(inside.names, place, strict=True) if at]
    within = plan.mesh.stage_of(rank)[1]
    who = f"others along {','.join(away)}" if away else ""
    who = who or f"rank {plan.mesh.rank_in_stage(stage, within)}"
    return f"stage {stage}, {who}" if plan.mesh.stages > 1 else who
