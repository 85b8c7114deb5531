"""What every plan goes through, whatever it is for: from tasks to their order and prices."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from mpiflow.compiler.boxing import local_shape
from mpiflow.compiler.bucket import bucket
from mpiflow.compiler.copies import with_copies
from mpiflow.compiler.cost import kernel_seconds, overhead_seconds, rounded
from mpiflow.compiler.fuse import fuse
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.memory import Packed, plan_memory
from mpiflow.compiler.pace import pace
from mpiflow.compiler.pipeline import ONE_FORWARD_ONE_BACKWARD, Pipeline, with_slots
from mpiflow.compiler.schedule import hastened, schedule_together
from mpiflow.compiler.updates import join_updates
from mpiflow.graph.graph import Graph
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import REGISTRY
from mpiflow.graph.sbp import Layout
from mpiflow.plan.places import ACCELERATOR, HOST, arena_names
from mpiflow.plan.records import COMPUTE, RECEIVE, SEND, Plan, Program, Task, Variable
from mpiflow.plan.simulator import simulate
from mpiflow.plan.slice import itemsize
from mpiflow.plan.traffic import firing_bytes

Result = TypeVar("Result")
Observer = Callable[[str, str, Any], None]
"""Called after a step with its name, the program's, and what it made."""

NUMERICS = "deterministic"
"""The same plan gives the same bits; sums over ranks depend on how many there are."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a job is compiled for.

    `zero` is the level of ZeRO that it is to have; where that is None, it is 0, or what a limit on
    memory asks for, by variable. `memory` is that limit, in bytes of a rank's arena, 0 for none.
    `pipeline` says how pipeline stages share the work. `recompute` is the level of the blocks of
    the model (recompute.py); where that is None, it is none, or what a limit on memory asks for.
    `device` is the kind that computes, and `route` how accelerators reach one another.
    """

    mesh: Mesh
    machine: Machine
    device: str = HOST
    route: str = ""
    zero: int | None = None
    memory: int = 0
    pipeline: Pipeline = ONE_FORWARD_ONE_BACKWARD
    recompute: str | None = None

    @property
    def inside(self) -> tuple[Mesh, ...]:
        """The mesh of the ranks of each pipeline stage."""
        return tuple(self.mesh.within_stage(stage) for stage in range(self.mesh.stages))

    def on_each(self, make: Callable[[Mesh], Result]) -> tuple[Result, ...]:
        """What `make` gives for the ranks of each stage: once for stages with equal ones."""
        made = {mesh: make(mesh) for mesh in dict.fromkeys(self.inside)}
        return tuple(made[mesh] for mesh in self.inside)


Variables = Mapping[str, Variable]


def arrange(
    parts: Sequence[tuple[Program, Variables]],
    target: Target,
    folder: Path,
    observe: Observer = lambda step, program, result: None,
) -> list[Program]:
    """Lowered programs with fewer tasks and messages, in order, equal on every machine.

    They are those of the stages of one step, each with its variables. Prices are rounded, and lines
    named from the job's folder.
    """
    programs = schedule_together([_fewer(*part, target, observe) for part in parts])
    for program in programs:
        observe("schedule", program.name, program)
    return [_equal_everywhere(program, folder) for program in programs]


def arrange_stages(
    parts: Sequence[tuple[Sequence[Program], Mapping[str, Variable]]],
    target: Target,
    folder: Path,
    observe: Observer = lambda step, program, result: None,
) -> list[Packed]:
    """Where each stage has what it holds; `parts` are the programs of each, and its variables.

    Those of a step are put in order together, and placed in the memory of each stage for itself.
    """
    kept = [variables for _, variables in parts]
    steps = [
        arrange(list(zip(step, kept, strict=True)), target, folder, observe)
        for step in zip(*(programs for programs, _ in parts), strict=True)
    ]
    packed = [
        _free_views(plan_memory(tuple(variables.values()), programs), target.machine)
        for programs, variables in zip(zip(*steps, strict=True), kept, strict=True)
    ]
    for stage, memory in enumerate(packed):
        observe("memory", f"stage {stage}" if len(packed) > 1 else "all", memory)
    return packed


def _free_views(memory: Packed, machine: Machine) -> Packed:
    """What lies where it is read from costs no more than the call."""
    return replace(memory, programs=tuple(_priced_views(p, machine) for p in memory.programs))


def _priced_views(program: Program, machine: Machine) -> Program:
    registers = {r.name: r for r in program.registers}
    tasks = []
    for task in program.tasks:
        name = task.outputs[0] if task.kind == COMPUTE and REGISTRY[task.op].view else ""
        if name in registers and registers[name].aliases in task.inputs:
            task = replace(task, nbytes=0, flops=0)
            seconds = kernel_seconds(machine, task, registers[name].dtype)
            task = replace(task, seconds=rounded(seconds))
        tasks.append(task)
    return replace(program, tasks=tuple(tasks))


def arenas_of(packed: Sequence[Packed], device: str) -> tuple[tuple[str, int], ...]:
    """The arenas of a plan: the largest, and where there are several stages those of each."""
    sizes = {
        name: [stage.nbytes if name == device else stage.pinned for stage in packed]
        for name in arena_names(device)
    }
    largest = [(name, max(each)) for name, each in sizes.items()]
    if len(packed) == 1:
        return tuple(largest)
    every = [(f"{name}.{i}", size) for name, each in sizes.items() for i, size in enumerate(each)]
    return (*largest, *every)


def _fewer(program: Program, variables: Variables, target: Target, observe: Observer) -> Program:
    """With fewer tasks and messages, and slots for what pipelines keep."""
    observe("lower", program.name, program)
    program = fuse(program, set(variables))
    observe("fuse", program.name, program)
    inside = target.mesh.within_stage(program.stage)
    program = bucket(program, inside, target.machine, variables.values())
    mesh = inside.in_time(program.micro_batches)
    program = join_updates(program, mesh, target.machine, variables.values(), target.memory)
    if target.machine.overlap and not any(t.kind in (SEND, RECEIVE) for t in program.tasks):
        program = hastened(program)
    observe("bucket", program.name, program)
    if target.device == ACCELERATOR:
        program = with_copies(program, variables.values(), mesh, target.machine, target.route)
    observe("copies", program.name, program if target.device == ACCELERATOR else "none: one memory")
    program = with_slots(program)
    return pace(program, variables.keys())


def _equal_everywhere(program: Program, folder: Path) -> Program:
    tasks = (
        replace(t, seconds=rounded(t.seconds), where=relative_line(t.where, folder))
        for t in program.tasks
    )
    return replace(program, tasks=tuple(tasks))


def stored(graph: Graph, name: str, layout: Layout, mesh: Mesh, folder: Path) -> Variable:
    """The record of a variable in a layout on the ranks of a stage; its place is still to find."""
    variable = graph.variables[name]
    tensor = variable.tensor
    nbytes = prod(local_shape(tensor.shape, layout, mesh)) * itemsize(tensor.dtype)
    return Variable(
        name, tensor.shape, tensor.dtype, layout, 0, nbytes,
        trainable=variable.trainable, where=relative_line(tensor.where, folder),
    )  # fmt: skip


def priced(plan: Plan, machine: Machine) -> Plan:
    """The plan with what its collectives send, and the predicted seconds of every program."""
    plan = replace(plan, programs=tuple(_with_traffic(plan, p, machine) for p in plan.programs))
    names = dict.fromkeys(p.name for p in plan.programs if p.tasks)
    seconds = {name: rounded(simulate(plan, name).step_seconds) for name in names}
    programs = tuple(replace(p, seconds=seconds[p.name]) if p.tasks else p for p in plan.programs)
    return replace(plan, programs=programs)


def _with_traffic(plan: Plan, program: Program, machine: Machine) -> Program:
    tensors, mesh = plan.tensors(program), plan.mesh_of(program)

    def complete(task: Task) -> Task:
        if task.kind == "collective":
            task = replace(task, nbytes=firing_bytes(task, tensors, mesh))
        elif task.kind not in (SEND, RECEIVE):
            return task
        overhead = rounded(overhead_seconds(machine, task, plan.mesh, mesh))
        return replace(task, overhead=overhead)

    return replace(program, tasks=tuple(map(complete, program.tasks)))


_LINE = re.compile(r"(\S*[/\\])?([^/\\\s]+\.py:\d+)")


@cache
def relative_line(text: str, folder: Path) -> str:
    """`text` with file names relative to the job's folder, or bare where they lie elsewhere."""

    def shorten(match: re.Match[str]) -> str:
        path = match.group(0)
        relative = os.path.relpath(path, folder) if os.path.isabs(path) else path
        return match.group(2) if relative.startswith("..") else Path(relative).as_posix()

    return _LINE.sub(shorten, text)
