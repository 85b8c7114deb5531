"""Join: what all pipeline stages do in a step, as one program without loops.

A stage's tasks and registers have its number before their names, and its streams behind theirs. A
message is a send and a receive that follows it; nothing is buffered on the way: a send starts only
when the stage that receives has come to it, and has room. So what is true of this program, of its
order and of its times, is true of the stages together.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from mpiflow.plan.records import RECEIVE, SEND, Plan, Program, Register, Task
from mpiflow.plan.unroll import unroll


def joined(plan: Plan, name: str, micro_batches: int | None = None) -> Program:
    """The program of that name of all stages, with the first so many micro-batches of its loops.

    Of a plan without stages, its program as `unroll` gives it.
    """
    programs = [program for program in plan.programs if program.name == name]
    if plan.mesh.stages == 1:
        return unroll(programs[0], micro_batches)
    stages = [_numbered(unroll(program, micro_batches)) for program in programs]
    tasks = _meet(stages)
    order: list[tuple[str, tuple[int, ...]]] = []
    first = 0
    for program in stages:
        order += [(stream, tuple(first + i for i in places)) for stream, places in program.order]
        first += len(program.tasks)
    return replace(
        stages[0],
        registers=tuple(register for program in stages for register in program.registers),
        tasks=tuple(tasks),
        order=tuple(order),
        outputs=tuple(output for program in stages for output in program.outputs),
    )


def _numbered(program: Program) -> Program:
    """With the stage in all names but those of variables."""
    stage, known = program.stage, {register.name for register in program.registers}

    def named(name: str) -> str:
        return f"stage {stage}: {name}"

    def tensors(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(named(name) if name in known else name for name in names)

    def renamed(register: Register) -> Register:
        aliases = tensors((register.aliases,))[0]
        return replace(register, name=named(register.name), aliases=aliases)

    return replace(
        program,
        registers=tuple(map(renamed, program.registers)),
        tasks=tuple(
            replace(
                task,
                name=named(task.name),
                stream=f"{task.stream}@{stage}",
                inputs=tensors(task.inputs),
                outputs=tensors(task.outputs),
                after=tuple(map(named, task.after)),
            )
            for task in program.tasks
        ),
        order=tuple((f"{stream}@{stage}", places) for stream, places in program.order),
        outputs=tuple(replace(o, register=named(o.register)) for o in program.outputs),
    )


def _meet(stages: list[Program]) -> list[Task]:
    """The tasks of all stages, sends and receives waiting for each other."""
    earlier = _earlier_receives(stages)
    sends: dict[tuple[Any, ...], Task] = {}
    receives: dict[tuple[Any, ...], Task] = {}
    for program in stages:
        for task in program.tasks:
            stage = program.stage, task.attributes.get("stage")
            if task.kind == SEND:
                sends[(*stage, task.attributes["message"], task.micro)] = task
            elif task.kind == RECEIVE:
                receives[(*reversed(stage), task.attributes["message"], task.micro)] = task
    changed: dict[str, Task] = {}
    for key, send in sends.items():
        if key not in receives:
            continue
        receive = receives[key]
        waits = (*send.after, *receive.after, *earlier.get(receive.name, ()))
        changed[send.name] = replace(send, after=tuple(dict.fromkeys(waits)))
        changed[receive.name] = replace(receive, after=(*receive.after, send.name), seconds=0.0)
    return [changed.get(task.name, task) for program in stages for task in program.tasks]


def _earlier_receives(stages: list[Program]) -> dict[str, tuple[str, ...]]:
    """By receive: the one before it on its stream, if any."""
    found: dict[str, tuple[str, ...]] = {}
    for program in stages:
        for _, places in program.order:
            for first, second in pairwise(places):
                if program.tasks[second].kind == RECEIVE:
                    found[program.tasks[second].name] = (program.tasks[first].name,)
    return found
