"""From a job to the plan of its predictions: what its model gives for each row of a data set.

A step reads a batch, computes, and hands the rows to the write stream as they lie on the ranks:

    read -> compute ... -> stage (2 slots) -> write: rows [start, stop) of each output

With pipeline stages, each writes the outputs that it makes. Batches stream through them: what is
sent waits for nothing but the next batch, so a stage computes one while the next has that before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

from mpiflow.compiler.account import reading_bytes
from mpiflow.compiler.arrange import (
    NUMERICS,
    Target,
    arrange_stages,
    priced,
    stored,
)
from mpiflow.compiler.assemble import plan_of
from mpiflow.compiler.build import Builder
from mpiflow.compiler.lower import PREFETCH, lower_initialise
from mpiflow.compiler.memory import Packed
from mpiflow.compiler.parts import Step, make_step
from mpiflow.compiler.signature import Placed, choose
from mpiflow.compiler.stages import Stages, assign_equally, assign_stages
from mpiflow.compiler.trace import take_rows, trace
from mpiflow.errors import DataError, UsageError
from mpiflow.graph.check import check
from mpiflow.graph.graph import Graph, building
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import REGISTRY
from mpiflow.graph.sbp import B, Layout, S
from mpiflow.graph.tensor import Tensor, is_narrow
from mpiflow.job import Job
from mpiflow.ops.shape import cast
from mpiflow.plan.records import WRITE, DataSet, Field, Plan, Program, Settings, Task, Variable
from mpiflow.plan.verify import verify

PREDICT = "predict"
"""The data set, and the program of full batches; that of the rest ends with "_tail"."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to predict: outputs by name (empty: all that have rows), for the rows of a data set.

    `absent` are fields that the model may ask for and the data do not have, labels say; no output
    may depend on them.
    """

    data: DataSet
    outputs: Sequence[str] = ()
    absent: Sequence[Field] = ()


def compile_predict(
    job: Job,
    wanted: Wanted,
    target: Target,
    *,
    folder: Path,
    cache_bytes: Callable[..., int] = lambda data, *spans: 0,
) -> Plan:
    """The plan, proven. It has the variables that the outputs need, and no others."""
    data = wanted.data
    steps = _steps(job, wanted, target)
    graph = steps[0].placed.graph
    parts = [_part(stage, steps, folder) for stage in range(target.mesh.stages)]
    packed = arrange_stages(parts, target, folder)
    plan = plan_of(
        job,
        target,
        packed,
        identity=_identity(graph, job, data),
        data=[data],
        settings=Settings(epochs=1, steps_per_epoch=ceil(data.rows / data.batch)),
        process_bytes=max(_process_bytes(one, target, data, cache_bytes) for one in packed),
        notes=[note for stage in packed for note in stage.notes],
        folder=folder,
    )
    plan = priced(plan, target.machine)
    verify(plan)
    return plan


def _steps(job: Job, wanted: Wanted, target: Target) -> list[Step]:
    """A step for full batches, then one for the rows that are left, if there are any of each."""
    data = wanted.data
    tail = data.rows % data.batch
    sizes = [(PREDICT, data.batch)] if data.rows >= data.batch else []
    sizes += [(f"{PREDICT}_tail", tail)] if tail else []
    stages: Stages | None = None
    layouts: dict[Mesh, dict[str, Layout]] = {}
    steps = []
    for name, rows in sizes:
        graph = _graph(job, wanted, name, rows)
        placed = target.on_each(partial(_placed, graph, target, layouts))
        for mesh, one in zip(target.inside, placed, strict=True):
            layouts[mesh] = {name: one.sources[v.tensor] for name, v in graph.variables.items()}
        if stages is not None:
            stages = assign_equally(graph, stages)
        elif target.mesh.stages > 1:
            stages = assign_stages(graph, [one.kernel_seconds() for one in placed])
        steps.append(make_step(placed, data.name, rows, target, None, stages, forward=True))
    return steps


def _placed(
    graph: Graph, target: Target, layouts: dict[Mesh, dict[str, Layout]], mesh: Mesh
) -> Placed:
    """The graph with layouts for the ranks of a stage; of variables those that are known."""
    return choose(graph, mesh, target.machine, layouts.get(mesh))


def _part(stage: int, steps: list[Step], folder: Path) -> tuple[list[Program], dict[str, Variable]]:
    """What a stage does in each program, and its variables."""
    target, placed = steps[0].target, steps[0].part(stage)
    graph, mesh = placed.graph, target.inside[stage]
    kept = {
        name: replace(stored(graph, name, placed.sources[v.tensor], mesh, folder), stage=stage)
        for name, v in graph.variables.items()
    }
    programs = [
        lower_initialise(graph, kept, mesh, target.machine),
        *(_program(step, stage, kept) for step in steps),
    ]
    return [replace(program, stage=stage) for program in programs], kept


def _graph(job: Job, wanted: Wanted, name: str, rows: int) -> Graph:
    """What the wanted outputs need of the model, in evaluation."""
    data = wanted.data
    held = {field.name for field in data.fields}
    absent = [field for field in wanted.absent if field.name not in held]
    graph = trace(job, replace(data, fields=(*data.fields, *absent)), name=name, rows=rows,
                  training=False)  # fmt: skip
    by_row = take_rows(graph, rows)
    check(graph)
    graph.outputs = _chosen(job, wanted, by_row, list(graph.outputs))
    graph.totals.clear()
    with building(graph):
        for output, tensor in graph.outputs.items():
            if is_narrow(
                tensor.dtype
            ):  # HDF5 has no bfloat16, and nobody wants 16 bits of a result
                graph.outputs[output] = cast(tensor, "float32")
    read = {tensor for node in graph.live() for tensor in node.inputs}
    for field in absent:
        if graph.inputs.get(field.name) in read:
            raise DataError(
                f"{', '.join(graph.outputs)} need the field {field.name!r}, which"
                f" {data.pattern} does not have; choose outputs with --outputs"
            )
    graph.drop_unread_inputs()
    graph.variables = {n: v for n, v in graph.variables.items() if v.tensor in read}
    return graph


def _chosen(
    job: Job, wanted: Wanted, by_row: dict[str, Tensor], scalars: list[str]
) -> dict[str, Tensor]:
    """The outputs that are wanted, all of them with a value for each row."""
    if not by_row:
        raise UsageError(
            f"job {job.name}: the model gives {', '.join(scalars)}, scalars of a whole batch; to"
            ' predict, let it also return what it has for each row, as in {"logits": logits}'
        )
    for name in wanted.outputs:
        if name not in by_row:
            why = "is a scalar of a whole batch" if name in scalars else "is none of the outputs"
            raise UsageError(f"--outputs {name}: {why}; for each row there are {', '.join(by_row)}")
    chosen = {name: by_row[name] for name in wanted.outputs or by_row}
    for name, tensor in chosen.items():
        if tensor.node is None or "/" in name or name.startswith("."):
            raise UsageError(
                f"output {name!r}, {tensor}, is not computed, or cannot name a dataset"
            )
    return chosen


def _program(step: Step, stage: int, variables: dict[str, Variable]) -> Program:
    """The tasks of a stage in a step; the last ones hand out the rows of each output it makes."""
    placed, target = step.layouts[stage], step.target
    graph, mesh = placed.graph, target.inside[stage]
    program = step.program(stage, variables)
    registers = {register.name: register for register in program.registers}
    build = Builder(mesh, target.machine, registers, list(program.tasks))
    split = next((placed.sources[tensor] for tensor in graph.inputs.values()), ())
    # Rows lie where their batch was read, so that few have to move.
    layout = tuple(S(0) if sbp == S(0) else B for sbp in split) or (B,) * len(mesh.axes)
    for name, tensor in graph.outputs.items():
        if step.stages and step.stages.first(step.stages.of(tensor)) != stage:
            continue
        held = build.convert(registers[tensor.name], layout, tensor.where)
        staged = build.register(
            f"{PREDICT}/{name}", tensor.shape, tensor.dtype, layout, slots=PREFETCH
        )
        build.compute(f"stage {name}", REGISTRY["Slice"](), [held], [staged], tensor.where)
        build.tasks.append(
            Task(
                f"write {name}", "write", WRITE, "write",
                inputs=(staged.name,),
                attributes={"output": name},
                nbytes=staged.nbytes,
                seconds=staged.nbytes / target.machine.storage,
                where=tensor.where,
            )
        )  # fmt: skip
    return replace(program, registers=tuple(build.registers.values()), tasks=tuple(build.tasks))


def _process_bytes(
    packed: Packed, target: Target, data: DataSet, cache_bytes: Callable[..., int]
) -> int:
    """The memory of a process: Python, MPI and HDF5, the arena, what reading keeps."""
    read = reading_bytes(packed.programs, {data.name: data}, target.mesh, cache_bytes)
    return target.machine.process_bytes + packed.in_process(target.device) + read


def _identity(graph: Graph, job: Job, data: DataSet) -> tuple[tuple[str, str], ...]:
    """What is computed, by section; that of `account.identity` where it means the same."""
    return (
        ("data", f"{data.rows} rows, fingerprint {data.fingerprint}"),
        ("fields", ", ".join(f"{f.name} {f.dtype}{list(f.shape)}" for f in data.fields)),
        ("model", hashlib.sha256(str(graph).encode()).hexdigest()),
        ("numerics", NUMERICS),
        ("outputs", ", ".join(map(str, graph.outputs.values()))),
        ("precision", job.precision),
        ("variables", "; ".join(str(v.tensor) for v in graph.variables.values())),
    )
