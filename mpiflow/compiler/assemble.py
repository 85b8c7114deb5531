"""The plan of what was decided: a record, before it is priced and proven."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpiflow.compiler.account import identity, idle_ranks, quality, settings
from mpiflow.compiler.arrange import NUMERICS, Target, arenas_of, relative_line
from mpiflow.compiler.memory import Packed
from mpiflow.compiler.parts import Step
from mpiflow.compiler.routes import route_notes
from mpiflow.compiler.userops import identity_section, user_ops
from mpiflow.job import Job
from mpiflow.plan.records import DataSet, Plan
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
    train, placed, graph = data["train"], step.placed, step.placed.graph
    programs = tuple(program for stage in packed for program in stage.programs)
    notes += dict.fromkeys(note for stage in packed for note in stage.notes)
    ops = user_ops(programs, folder)
    notes += dict.fromkeys(idle_ranks(programs, target.mesh))
    notes += route_notes(programs, target.mesh, target.route)
    dropped = train.rows % train.batch
    if dropped:
        notes.append(
            f"training drops the incomplete last batch: {dropped} of {train.rows} rows an epoch"
        )
    return Plan(
        job=job.name,
        version=__version__,
        numpy=np.__version__,
        mesh=target.mesh,
        device=target.device,
        machine=target.machine.name,
        overlap=target.machine.overlap,
        layouts=quality(placed, target.memory),
        numerics=NUMERICS,
        seed=job.seed,
        identity=(*identity(job, model, graph, train), *identity_section(ops)),
        variables=tuple(v for stage in packed for v in stage.variables),
        arenas=arenas_of(packed, target.device),
        process_bytes=process_bytes,
        data=tuple(data[name] for name in ("train", *job.evaluations)),
        settings=settings(job, train, programs),
        programs=programs,
        notes=tuple(dict.fromkeys(relative_line(note, folder) for note in notes)),
        ops=ops,
    )
