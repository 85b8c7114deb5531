"""Verify, part eight: the calls of all pipeline stages come to their ends.

That the streams of all stages do (`verify_stages`) is not enough: a rank has one thread for them,
and while it waits for a message it starts no other. So its calls are gone through as it does them:
a wait for a message is over when the other stage has started it too. Within a stage all ranks do
the same calls, so collectives hold nobody up for ever.
"""

from __future__ import annotations

from typing import Any

from mpiflow.errors import VerifyError
from mpiflow.plan.calls import START, WAIT, Calls, calls_of
from mpiflow.plan.records import RECEIVE, SEND, Plan, Program, Task
from mpiflow.plan.unroll import folded, unroll
from mpiflow.plan.verify_layout import label

_MANY = 200_000
"""Calls of all stages above which the first micro-batches stand for all."""

Message = tuple[int, int, Any, int]
"""From which stage, to which, its number, and the micro-batch."""


def check_calls(plan: Plan, programs: list[Program], micro_batches: int) -> None:
    """VerifyError where stages would wait for one another; `micro_batches` stand for any number."""
    most = sum(len(program.tasks) for program in programs) * programs[0].micro_batches
    count = None if most <= _MANY else micro_batches
    calls = [_calls(plan, program, count) for program in programs]
    places = [0] * len(programs)
    started: set[tuple[str, Message]] = set()
    moved = True
    while moved:
        moved = False
        for i, program in enumerate(programs):
            before = places[i]
            places[i] = _go_on(calls[i], before, program.stage, started)
            moved |= places[i] > before
    if any(place < len(mine) for place, mine in zip(places, calls, strict=True)):
        raise VerifyError(_describe(programs, calls, places))


def _calls(plan: Plan, program: Program, count: int | None) -> Calls:
    unrolled = unroll(program, count)
    registers = {register.name: register for register in unrolled.registers}
    return calls_of(unrolled, {**plan.tensors(program), **registers})


def _go_on(calls: Calls, place: int, stage: int, started: set[tuple[str, Message]]) -> int:
    """Do a stage's calls until one waits for what another has not started; where that is."""
    while place < len(calls):
        action, task = calls[place]
        if task.kind in (SEND, RECEIVE):
            message = _message(task, stage)
            if action == START:
                started.add((task.kind, message))
            elif action == WAIT:
                other = RECEIVE if task.kind == SEND else SEND
                if (other, message) not in started:
                    return place
        place += 1
    return place


def _message(task: Task, stage: int) -> Message:
    other, number = task.attributes["stage"], task.attributes["message"]
    ends = (stage, other) if task.kind == SEND else (other, stage)
    return (*ends, number, task.micro)


def _describe(programs: list[Program], calls: list[Calls], places: list[int]) -> str:
    lines = [f"program {programs[0].name} would hang: stages wait for messages of one another"]
    for program, mine, place in zip(programs, calls, places, strict=True):
        if place < len(mine):
            task = mine[place][1]
            other = task.attributes["stage"]
            lines.append(
                f"  stage {program.stage} waits for stage {other}: {label(task)}, which is"
                f" {folded(task)} of micro-batch {task.micro + 1}"
            )
    return "\n".join(lines)
