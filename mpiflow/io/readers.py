"""Readers: what one rank reads of the data sets of a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mpiflow.io.reader import DatasetReader, open_reader
from mpiflow.plan.records import Plan


def open_readers(plan: Plan, rank: int, folder: Path) -> dict[str, Any]:
    """A reader of each data set, for the rows that a rank reads of it."""
    number, place = plan.mesh.stage_of(rank)
    stage = plan.at_stage(number)
    readers: dict[str, DatasetReader] = {}
    for data in plan.data:
        # The full batches say which rows of each this rank reads; a set may have a tail only.
        program = next(p for p in stage.programs if p.data == data.name)
        view = stage.slice(place, program)
        reads = [t for t in program.tasks if t.kind == "read"]
        field = stage.tensors(program)[reads[0].outputs[0]] if reads else None
        micro_batches = range(program.micro_batches)
        spans = [view.box(replace(field, micro=k))[0] for k in micro_batches] if field else [(0, 0)]
        readers[data.name] = open_reader(data, folder, spans=spans, tail=data.name != "train")
    return readers
