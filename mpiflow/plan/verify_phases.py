"""Verify: the loops over micro-batches are loops, and mean the same on every rank.

An odd phase is a loop. Its tasks handle one micro-batch at a time, and only what gathers over the
micro-batches outlives a turn; a task of an even phase fires once, and sees no part of a batch.
"""

from __future__ import annotations

from itertools import pairwise, product

from mpiflow.errors import VerifyError
from mpiflow.graph.sbp import B, layout_text
from mpiflow.plan.places import AHEAD
from mpiflow.plan.records import COMPUTE, MOST_FIRINGS, WRITE, Program, Register, Task
from mpiflow.plan.verify_layout import label

GATHERING = ("Accumulate", "Collect")
"""What a loop may write that is there for all micro-batches."""


def check_count(program: Program, context: str) -> None:
    """VerifyError unless the rows can be cut into the micro-batches, of which there may be so many.

    Whoever writes the loops out may do so after that.
    """
    count = program.micro_batches
    if count < 1 or program.rows % count:
        raise VerifyError(
            f"{context} has {count} micro-batches, which do not divide its {program.rows} rows"
        )
    tasks = sum(task.phase % 2 for task in program.tasks) or 1
    if count > 1 and count * tasks > MOST_FIRINGS:
        raise VerifyError(
            f"{context} does {tasks} tasks for each of {count} micro-batches; a step may have"
            f" {MOST_FIRINGS} firings"
        )


def check_phases(program: Program, context: str) -> None:
    """VerifyError where a task is in a phase that it cannot be in."""
    count = program.micro_batches
    micros = {item.name: item.micro for item in program.registers}
    micros |= {item.name: item.micro for item in program.tasks if item.micro}
    for name, micro in micros.items():
        if micro:
            raise VerifyError(
                f"{context}: {name} is of micro-batch {micro}; a plan lists what all of them do"
            )
    _check_names(program, context)
    registers = {register.name: register for register in program.registers}
    phases = {task.name: task.phase for task in program.tasks}
    made = {name: task for task in program.tasks for name in task.outputs}
    for task in program.tasks:
        _check_kind(task, count, context)
        for name in task.after:
            _in_turn(task, phases[name], name, context)
        for name in task.inputs:
            if name in made and name in registers:
                _check_input(task, registers[name], made[name], context)
        for name in task.outputs:
            _check_output(task, registers.get(name), name, context, count)
    for stream, order in program.order:
        for first, second in pairwise(order):
            if program.tasks[first].phase > program.tasks[second].phase:
                a, b = (label(program.tasks[i]) for i in (first, second))
                raise VerifyError(
                    f"{context}: stream {stream} fires {a} of a later phase before {b}"
                )
    _check_sequence(program, context)


def _check_names(program: Program, context: str) -> None:
    """No name is one that `unroll` gives to a firing or its register."""
    registers = {register.name for register in program.registers}
    looped = {task.name for task in program.tasks if task.phase % 2}
    looped |= {n for task in program.tasks if task.phase % 2 for n in task.outputs} & registers
    for name in sorted(registers | {task.name for task in program.tasks}):
        base, _, micro = name.rpartition("#")
        if base in looped and micro.isdecimal():
            raise VerifyError(f"{context}: {name} has the name of {base} in a micro-batch")


def _check_kind(task: Task, micro_batches: int, context: str) -> None:
    what = f"{context}: {label(task)}"
    if micro_batches == 1:
        if task.phase:
            raise VerifyError(f"{what} is in phase {task.phase}, but the step has one micro-batch"
                              " and so one phase")  # fmt: skip
    elif task.stream in AHEAD and task.phase % 2 == 0:
        raise VerifyError(f"{what} fires once a step; rows are read for each micro-batch")
    elif task.stream == WRITE:
        raise VerifyError(f"{what} stores what a step gives, which must have one micro-batch")


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
    if parts and maker.phase != task.phase and maker.stream not in AHEAD:
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


def _check_sequence(program: Program, context: str) -> None:
    """Segments are done of every micro-batch, once each and in their order."""
    loop = max((task.phase for task in program.tasks if task.phase % 2), default=0)
    segments = sorted({task.segment for task in program.tasks if task.phase == loop and loop})
    if not program.sequence:
        if any(task.segment for task in program.tasks) or any(
            r.rewound or r.pool for r in program.registers
        ):
            raise VerifyError(
                f"{context} has segments or slots of them, but no order to do them in"
            )
        return
    place = {turn: i for i, turn in enumerate(program.sequence)}
    count = program.micro_batches
    for segment, micro in product(segments, range(count)):
        if (segment, micro) not in place:
            raise VerifyError(f"{context}: segment {segment} of micro-batch {micro} is never done")
    if len(place) != len(program.sequence) or any(
        segment < 0 or not 0 <= micro < count for segment, micro in place
    ):
        raise VerifyError(f"{context} does a segment twice, or of a micro-batch that is not there")
    for (segment, micro), turn in place.items():
        before = [(other, micro) for other in segments if other < segment]
        for other in (*before, (segment, micro - 1)):
            if place.get(other, -1) > turn:
                raise VerifyError(
                    f"{context}: segment {segment} of micro-batch {micro} is done before segment"
                    f" {other[0]} of micro-batch {other[1]}"
                )
    read = {name for task in program.tasks if task.stream in AHEAD for name in task.outputs}
    for register in program.registers:
        if register.rewound and (register.name in read or register.layout[0] == B):
            raise VerifyError(
                f"{context}: the slots of {register.name} begin anew with each step, but it is read"
                " ahead of steps, or the same for all micro-batches"
            )
    _check_pools(program, loop, context)


def _check_pools(program: Program, loop: int, context: str) -> None:
    """Registers of a pool have the same slots, and only kernels of the last loop use them."""
    pooled = {r.name: r for r in program.registers if r.pool}
    first: dict[str, Register] = {}
    for name, register in pooled.items():
        other = first.setdefault(register.pool, register)
        mine, its = ((r.space, r.offset, r.nbytes, r.slots) for r in (register, other))
        if mine != its or register.aliases or not register.rewound:
            raise VerifyError(
                f"{context}: {name} and {other.name} take turns in the slots of"
                f" {register.pool}, but do not have the same, beginning anew with each step"
            )
    for task in program.tasks:
        for name in (*task.inputs, *task.outputs):
            if name in pooled and (task.stream != COMPUTE or task.phase != loop):
                raise VerifyError(
                    f"{context}: {name} takes turns with others in the slots of"
                    f" {pooled[name].pool}, so only kernels of the last loop may use it, not"
                    f" {label(task)}"
                )
