"""Verify, part five: the loops over micro-batches are loops, and mean the same on every rank.

An odd phase is a loop. Its tasks handle one micro-batch at a time, and only what gathers over the
micro-batches outlives a turn; a task of an even phase fires once, and sees no part of a batch.
"""

from __future__ import annotations

from itertools import pairwise

from mpiflow.errors import VerifyError
from mpiflow.graph.sbp import B, layout_text
from mpiflow.plan.records import READ, Program, Register, Task
from mpiflow.plan.verify_layout import label

GATHERING = ("Accumulate", "Collect")
"""What a loop may write that is there for all micro-batches."""


def check_phases(program: Program, context: str) -> None:
    """VerifyError where a task is in a phase that it cannot be in."""
    if program.micro_batches < 1:
        raise VerifyError(f"{context} has {program.micro_batches} micro-batches; 1 is the least")
    micros = {item.name: item.micro for item in program.registers}
    micros |= {item.name: item.micro for item in program.tasks if item.micro}
    for name, micro in micros.items():
        if micro:
            raise VerifyError(
                f"{context}: {name} is of micro-batch {micro}; a plan lists what all of them do"
            )
    registers = {register.name: register for register in program.registers}
    phases = {task.name: task.phase for task in program.tasks}
    made = {name: task for task in program.tasks for name in task.outputs}
    for task in program.tasks:
        if program.micro_batches == 1 and task.phase:
            raise VerifyError(f"{context}: {label(task)} is in phase {task.phase}, but the step"
                              " has one micro-batch and so one phase")  # fmt: skip
        for name in task.after:
            _in_turn(task, phases[name], name, context)
        for name in task.inputs:
            if name in made and name in registers:
                _check_input(task, registers[name], made[name], context)
        for name in task.outputs:
            _check_output(task, registers.get(name), name, context, program.micro_batches)
    for stream, order in program.order:
        for first, second in pairwise(order):
            if program.tasks[first].phase > program.tasks[second].phase:
                a, b = (label(program.tasks[i]) for i in (first, second))
                raise VerifyError(
                    f"{context}: stream {stream} fires {a} of a later phase before {b}"
                )
    _check_read_slots(program, context)


def _in_turn(task: Task, phase: int, name: str, context: str) -> None:
    if phase > task.phase:
        raise VerifyError(
            f"{context}: {label(task)} of phase {task.phase} needs {name} of phase {phase}"
        )


def _check_input(task: Task, register: Register, maker: Task, context: str) -> None:
    _in_turn(task, maker.phase, register.name, context)
    what = f"{context}: {label(task)}"
    parts = _is_part(register, maker)
    if parts and not task.phase % 2:
        raise VerifyError(f"{what} fires once a step, but takes {register.name}, which is"
                          f" {layout_text(register.layout)}: one micro-batch's")  # fmt: skip
    if parts and maker.phase != task.phase and maker.stream != READ:
        raise VerifyError(f"{what} takes {register.name} of another loop, of which only the last"
                          " micro-batch is left")  # fmt: skip
    if not parts and maker.phase % 2 and maker.phase == task.phase:
        raise VerifyError(f"{what} takes {register.name} in the loop that gathers it; it is whole"
                          " only after the last micro-batch")  # fmt: skip


def _check_output(
    task: Task, register: Register | None, name: str, context: str, micro_batches: int
) -> None:
    what = f"{context}: {label(task)}"
    if register is None:
        if task.phase % 2:
            raise VerifyError(f"{what} writes variable {name} once a micro-batch; once a step")
        return
    if micro_batches == 1:
        return
    if task.phase % 2 == 0 and register.layout[0] != B:
        raise VerifyError(f"{what} fires once a step, but gives {name}, which is"
                          f" {layout_text(register.layout)}: one micro-batch's")  # fmt: skip
    if task.phase % 2 and register.layout[0] == B and task.op not in GATHERING:
        raise VerifyError(f"{what} gives {name} once a micro-batch, though all share it;"
                          f" only {' and '.join(GATHERING)} do that")  # fmt: skip


def _is_part(register: Register, maker: Task) -> bool:
    return maker.phase % 2 == 1 and register.layout[0] != B


def _check_read_slots(program: Program, context: str) -> None:
    """What several loops use of a batch must all be there: the first loop needs it to its end."""
    slots = {register.name: register.slots for register in program.registers}
    for read in program.tasks:
        if read.stream == READ:
            for name in read.outputs:
                used = {t.phase for t in program.tasks if name in t.inputs}
                if len(used) > 1 and slots[name] < program.micro_batches:
                    raise VerifyError(
                        f"{context}: {len(used)} loops use {name}, which has {slots[name]} slots"
                        f" for {program.micro_batches} micro-batches: the first would wait for ever"
                    )
