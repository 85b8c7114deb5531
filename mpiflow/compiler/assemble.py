"""The plan of what was decided: a record, before it is priced and proven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mpiflow.compiler.account import identity, idle_ranks, quality, settings
from mpiflow.compiler.arrange import NUMERICS, Target, arenas_of, relative_line
from mpiflow.compiler.memory import Packed
from mpiflow.compiler.parts import Step
from mpiflow.compiler.routes import route_notes
from mpiflow.compiler.userops import identity_section, user_ops
from mpiflow.job import Job
from mpiflow.plan.records import DataSet, Plan, Program, Settings
from mpiflow.version import __version__


def assemble(
    job: Job,
    data: dict[str, DataSet],
    target: Target,
    step: Step,
    packed: list[Packed],
    *,
    model: str,
    process_bytes: int,
    notes: list[str],
    folder: Path,
) -> Plan:
    """The plan of the programs of all stages, with notes on what a user might not expect.

    `model` is the hash of the forward graph; lines are named relative to `folder`.
    """
    train, placed, programs = data["train"], step.placed, programs_of(packed)
    notes += dict.fromkeys(note for stage in packed for note in stage.notes)
    notes += dict.fromkeys(idle_ranks(programs, target.mesh))
    notes += route_notes(programs, target.mesh, target.route)
    dropped = train.rows % train.batch
    if dropped:
        notes.append(
            f"training drops the incomplete last batch: {dropped} of {train.rows} rows an epoch"
        )
    made = plan_of(
        job,
        target,
        packed,
        identity=identity(job, model, placed.graph, train),
        data=[data[name] for name in ("train", *job.evaluations)],
        settings=settings(job, train, programs),
        process_bytes=process_bytes,
        notes=notes,
        folder=folder,
    )
    return replace(made, layouts=quality(placed, target.memory))


def programs_of(packed: Sequence[Packed]) -> tuple[Program, ...]:
    """The programs of all stages."""
    return tuple(program for stage in packed for program in stage.programs)


def plan_of(
    job: Job,
    target: Target,
    packed: Sequence[Packed],
    *,
    identity: Iterable[tuple[str, str]],
    data: Iterable[DataSet],
    settings: Settings,
    process_bytes: int,
    notes: Iterable[str],
    folder: Path,
) -> Plan:
    """The record of what the stages have, whatever the plan is for."""
    programs = programs_of(packed)
    ops = user_ops(programs, folder)
    return Plan(
        job=job.name,
        version=__version__,
        numpy=np.__version__,
        mesh=target.mesh,
        device=target.device,
        machine=target.machine.name,
        overlap=target.machine.overlap,
        numerics=NUMERICS,
        seed=job.seed,
        identity=(*identity, *identity_section(ops)),
        variables=tuple(v for stage in packed for v in stage.variables),
        arenas=arenas_of(packed, target.device),
        process_bytes=process_bytes,
        data=tuple(data),
        settings=settings,
        programs=programs,
        notes=tuple(dict.fromkeys(relative_line(note, folder) for note in notes)),
        ops=ops,
    )
