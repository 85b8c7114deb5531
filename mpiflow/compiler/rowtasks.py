"""The tasks of rows that travel by owner, see `owners`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpiflow.compiler.build import Builder
from mpiflow.compiler.owners import as_owned, fetch_seconds, rows_seconds
from mpiflow.ops.rows import SumRows
from mpiflow.plan.records import Register, Task, communication_stream
from mpiflow.plan.rows import FETCH, SEND, row_staging


def fetch(
    build: Builder, inputs: list[Register], out: Register, axes: tuple[int, ...], where: str
) -> None:
    """The message that is a lookup, of a table and the ids that this rank has."""
    _message(build, out.name, FETCH, inputs, [out], axes, {}, where)


def send(
    build: Builder, inputs: list[Register], rows: int, axes: tuple[int, ...], where: str
) -> list[Register]:
    """Values by rows, and their ids, as those have them that have the rows of the table.

    What this rank has of a row is added up first. Users of both share it.
    """
    values, ids = inputs
    name = f"{values.name}>{ids.name}"
    given = (values.layout, ids.layout)
    owned = [as_owned(layout, axes) for layout in given]
    pairs = []
    for kind, layouts in (("sums", given), ("owned", owned)):
        pairs.append(
            [
                build.registers.get(f"{name}:{kind}")
                or build.register(f"{name}:{kind}", values.shape, values.dtype, layouts[0]),
                build.registers.get(f"{name}:{kind}.ids")
                or build.register(f"{name}:{kind}.ids", ids.shape, "int64", layouts[1]),
            ]
        )
    sums, made = pairs
    if not any(task.name == made[0].name for task in build.tasks):
        build.compute(sums[0].name, SumRows(rows, clears=False), inputs, sums, where)
        _message(build, made[0].name, SEND, sums, made, axes, {"rows": rows}, where)
    return made


def _message(
    build: Builder,
    name: str,
    kind: str,
    inputs: list[Register],
    outputs: list[Register],
    axes: tuple[int, ...],
    attributes: dict[str, Any],
    where: str,
) -> None:
    axis = build.mesh.joined(axes)
    tensors = {register.name: register for register in (*inputs, *outputs)}
    task = Task(
        name,
        "collective",
        communication_stream(axis),
        kind,
        inputs=tuple(register.name for register in inputs),
        outputs=tuple(register.name for register in outputs),
        attributes=attributes,
        axis=axis,
        where=where,
    )
    # What travels is the output of a fetch, and what a send is given.
    values, price = (outputs[0], fetch_seconds) if kind == FETCH else (inputs[0], rows_seconds)
    seconds = price(build.machine, values.shape, values.dtype, values.layout, build.mesh, axes)
    staging = row_staging(task, tensors, build.mesh)
    build.add(
        replace(task, workspace=(0, staging), seconds=seconds),
        *(register.layout for register in (*inputs, *outputs)),
    )
