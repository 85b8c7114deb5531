"""Verify: programs take turns in memory, but for what outlives a step.

Reads fill their slots ahead of a program's steps, and what is stored is written behind them, while
other programs run.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiflow.errors import VerifyError
from mpiflow.plan.places import AHEAD, workspace_space
from mpiflow.plan.records import WRITE, Plan, Program
from mpiflow.plan.registers import outliving


def check_between(plan: Plan) -> None:
    """Memory that reads and writes touch outlives a step: no other program may use it.

    A sweep over each arena: of each program the piece that reaches furthest is enough to compare.
    """
    spans = sorted(span for program in plan.programs for span in _spans(program))
    furthest: dict[tuple[str, str, bool], tuple[int, str]] = {}
    for start, stop, space, program, lasting, name in spans:
        for (beside, other, other_lasts), (end, other_name) in furthest.items():
            if beside == space and other != program and (lasting or other_lasts) and end > start:
                first, second = (name, other_name) if lasting else (other_name, name)
                raise VerifyError(
                    f"{first} is filled or stored beside the steps of other programs, and shares"
                    f" bytes [{start}, {min(end, stop)}) with {second}"
                )
        key = space, program, lasting
        furthest[key] = max(furthest.get(key, (0, "")), (stop, name))


def _spans(program: Program) -> Iterator[tuple[int, int, str, str, bool, str]]:
    """Start, stop and space of all memory of a program, if it outlives a step, and its name."""
    lasting, named = outliving(program.tasks), f"of program {program.name}"
    for r in program.registers:
        if size := r.nbytes * r.slots:
            place = r.offset, r.offset + size, r.space
            yield *place, program.name, r.name in lasting, f"{r.name} {named}"
    for task in program.tasks:
        if task.workspace[1]:
            place = task.workspace[0], sum(task.workspace), workspace_space(task.route)
            lasts = task.stream in (*AHEAD, WRITE)
            yield *place, program.name, lasts, f"the workspace of {task.name} {named}"
