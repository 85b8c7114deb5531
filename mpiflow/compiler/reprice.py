"""A plan as it would run on another machine: the same tasks in the same order, priced anew.

Prices come from what the plan says of each task. Those of compute are the roofline of its
operations and bytes, or the measured multiple of it where the machine knows the op; collectives and
messages are priced by their links. Two things are not in a plan: what a kernel copies besides its
operands, which only measured ops count, and how an exchange of slices spreads over its partners,
which is taken to be even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mpiflow.compiler.arrange import priced
from mpiflow.compiler.cost import (
    collective_seconds,
    compute_seconds,
    copy_seconds,
    exchange_seconds,
    kernel_seconds,
    message_seconds,
    packing_seconds,
    read_seconds,
    rounded,
)
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.owners import fetch_seconds, rows_seconds
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.exchange import packing_bytes
from mpiflow.plan.pieces import most_pieces
from mpiflow.plan.places import D2H, H2D
from mpiflow.plan.records import READ, RECEIVE, SEND, WRITE, Plan, Program, Register, Task
from mpiflow.plan.rows import FETCH, ROW_KINDS


def repriced(plan: Plan, machine: Machine) -> Plan:
    """The plan with the seconds of another machine, and the memory of a process there."""
    programs = tuple(_program(plan, program, machine) for program in plan.programs)
    return priced(
        replace(plan, programs=programs, machine=machine.name, overlap=machine.overlap), machine
    )


def _program(plan: Plan, program: Program, machine: Machine) -> Program:
    tensors, mesh = plan.tensors(program), plan.mesh_of(program)
    tasks = (
        replace(task, seconds=rounded(_seconds(task, tensors, mesh, plan.mesh, machine)))
        for task in program.tasks
    )
    return replace(program, tasks=tuple(tasks))


def _seconds(
    task: Task, tensors: Mapping[str, Register], mesh: Mesh, whole: Mesh, machine: Machine
) -> float:
    if task.kind in (SEND, RECEIVE):
        pieces = most_pieces(task, tensors[(*task.inputs, *task.outputs)[0]], mesh)
        return message_seconds(machine, task.nbytes, whole, pieces)
    if task.kind == READ:
        return read_seconds(machine, task.nbytes)
    if task.kind == WRITE:
        stored = tensors[task.inputs[0]]
        handed = compute_seconds(machine, 0, task.nbytes, stored.dtype)
        return handed + task.nbytes / machine.storage
    if task.kind in (H2D, D2H):
        return copy_seconds(machine, task.nbytes)
    if task.kind == "collective":
        return _collective(task, tensors, mesh, machine)
    return kernel_seconds(machine, task, tensors[(*task.inputs, *task.outputs)[-1]].dtype)


def _collective(task: Task, tensors: Mapping[str, Register], mesh: Mesh, machine: Machine) -> float:
    axes = mesh.along(task.axis)
    pairs = [(tensors[a], tensors[b]) for a, b in zip(task.inputs, task.outputs, strict=False)]
    if task.op in ROW_KINDS:
        values = pairs[0][1] if task.op == FETCH else pairs[0][0]
        price = fetch_seconds if task.op == FETCH else rows_seconds
        return price(machine, values.shape, values.dtype, values.layout, mesh, axes)
    if task.op == "exchange":
        return exchange_seconds(machine, task.nbytes, mesh.extent(axes) - 1, mesh, axes)
    joint = sum(max(a.nbytes, b.nbytes) for a, b in pairs)
    seconds = collective_seconds(machine, task.op, joint, mesh, axes)
    if len(pairs) > 1 and task.op != "all_reduce":  # its members are packed, and unpacked
        seconds += packing_seconds(machine, packing_bytes(task), mesh, axes)
    return seconds
