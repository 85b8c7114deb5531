"""Verify: pipeline stages fit together.

Each stage is proven as a plan of its own. What is left: they do the same steps, every message that
one sends another receives, as what it is, and all of them together come to the end of a step even
if nothing is buffered on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpiflow.errors import VerifyError
from mpiflow.graph.sbp import Partial, layout_text
from mpiflow.plan.marked import Step
from mpiflow.plan.pieces import all_pieces, most_elements
from mpiflow.plan.places import arena_names
from mpiflow.plan.records import RECEIVE, SEND, Plan, Program, Register, Task, Variable
from mpiflow.plan.slice import itemsize
from mpiflow.plan.verify_layout import label
from mpiflow.plan.walk import Walk

Message = tuple[int, int, Any]
"""From which stage, to which, and its number."""


def check_parts(plan: Plan) -> None:
    """VerifyError unless every stage has the same programs, and a place for its memory."""
    count = plan.mesh.stages
    kinds = arena_names(plan.device)
    found = {name for name, _ in plan.arenas}
    as_many = len(plan.arenas) == (count + 1) * len(kinds)
    if not as_many or found != {
        *kinds, *(f"{kind}.{stage}" for kind in kinds for stage in range(count))
    }:  # fmt: skip
        raise VerifyError(
            f"the plan has {count} stages and the arenas {', '.join(n for n, _ in plan.arenas)};"
            f" it needs {', '.join(kinds)} for all of them, and one for each, as {kinds[0]}.0"
        )
    sizes = dict(plan.arenas)
    for kind in kinds:
        if sizes[kind] != max(sizes[f"{kind}.{stage}"] for stage in range(count)):
            raise VerifyError(
                f"the plan's arena {kind!r} is not as large as that of the largest stage"
            )
    for what, records in (("program", plan.programs), ("variable", plan.variables)):
        for record in records:
            if not 0 <= record.stage < count:
                raise VerifyError(
                    f"{what} {record.name} is of stage {record.stage}; there are {count} stages"
                )
    shared: dict[str, Variable] = {}
    for variable in plan.variables:
        first = shared.setdefault(variable.name, variable)
        alike = plan.mesh.within_stage(first.stage) == plan.mesh.within_stage(variable.stage)
        same = _kind(first) == _kind(variable) if alike else _tensor(first) == _tensor(variable)
        if not same or first.trainable != variable.trainable:
            raise VerifyError(
                f"variable {variable.name} is {_kind(first)} on stage {first.stage} and"
                f" {_kind(variable)} on stage {variable.stage}"
            )


def _kind(register: Register) -> str:
    return f"{_tensor(register)} {layout_text(register.layout)}"


def _tensor(register: Register) -> str:
    """What does not depend on the ranks that hold it."""
    return f"{register.dtype} {register.shape}"


def check_together(plan: Plan) -> None:
    """VerifyError where a message is not received as it is sent, or stages wait in a circle."""
    names = [program.name for program in plan.programs if program.stage == 0]
    for stage in range(1, plan.mesh.stages):
        found = [program.name for program in plan.programs if program.stage == stage]
        if found != names:
            raise VerifyError(
                f"stage 0 has the programs {', '.join(names)}, stage {stage} {', '.join(found)}"
            )
    for name in names:
        programs = [program for program in plan.programs if program.name == name]
        _check_same_steps(programs)
        _check_messages(plan, programs)
        for _ in Walk([Step(program) for program in programs]).run():
            pass  # it raises where they wait for each other


def _check_same_steps(programs: list[Program]) -> None:
    first = programs[0]
    for program in programs[1:]:
        ours, theirs = (
            (p.rows, p.data, p.micro_batches, tuple((o.name, o.total) for o in p.outputs))
            for p in (first, program)
        )
        if ours != theirs:
            raise VerifyError(
                f"program {first.name} has (rows, data, micro-batches, outputs) {ours} on stage"
                f" {first.stage}, and {theirs} on stage {program.stage}"
            )


def _check_messages(plan: Plan, programs: list[Program]) -> None:
    sends = dict(_messages(programs, SEND))
    receives = dict(_messages(programs, RECEIVE))
    for key, (program, task) in receives.items():
        if key not in sends:
            raise VerifyError(
                f"program {program.name}: stage {key[1]} waits for ever for {task.outputs[0]},"
                f" message {key[2]} from stage {key[0]}, which does not send it"
            )
    tensors = {program.stage: plan.tensors(program) for program in programs}
    for key, (program, task) in sends.items():
        if key not in receives:
            raise VerifyError(
                f"program {program.name}: stage {key[0]} sends {task.inputs[0]} as message {key[2]}"
                f" to stage {key[1]}, which does not receive it"
            )
        other, received = receives[key]
        sent = tensors[program.stage][task.inputs[0]]
        made = tensors[other.stage][received.outputs[0]]
        alike = plan.mesh.within_stage(key[0]) == plan.mesh.within_stage(key[1])
        if (_kind(sent) != _kind(made)) if alike else (_tensor(sent) != _tensor(made)):
            raise VerifyError(
                f"program {program.name}: stage {key[0]} sends {sent.name} as {_kind(sent)}, stage"
                f" {key[1]} receives {_kind(made)}"
            )
        _check_end(plan, program, task, sent, made)
        _check_end(plan, other, received, made, sent)
        if (task.phase, task.nbytes) != (received.phase, received.nbytes):
            raise VerifyError(
                f"program {program.name}: {label(task)} is of phase {task.phase} and"
                f" {task.nbytes} bytes, {label(received)} of phase {received.phase} and"
                f" {received.nbytes} bytes"
            )
        if task.route != received.route:
            raise VerifyError(
                f"program {program.name}: {label(task)} goes by route {task.route!r},"
                f" {label(received)} waits for it by route {received.route!r}"
            )


def _check_end(plan: Plan, program: Program, task: Task, here: Register, there: Register) -> None:
    """A task between stages of different ranks knows how the other holds the tensor."""
    other = task.attributes["stage"]
    inside, theirs = (plan.mesh.within_stage(stage) for stage in (program.stage, other))
    named = task.attributes.get("mesh"), task.attributes.get("layout")
    is_right: tuple[str | None, str | None] = (None, None)
    if inside != theirs:
        is_right = str(theirs), layout_text(there.layout)
    if named != is_right:
        raise VerifyError(
            f"program {program.name}: {label(task)} of stage {program.stage} takes stage {other} to"
            f" hold {there.name} as {named[1]} on mesh {named[0]}, which is {is_right[1]} on"
            f" {is_right[0]}"
        )
    if inside == theirs:
        return
    mesh = plan.mesh_of(program)
    if any(isinstance(sbp, Partial) for sbp in here.layout[mesh.timed :]) or (
        mesh.timed and here.layout[0] != there.layout[0]
    ):
        raise VerifyError(
            f"program {program.name}: {label(task)} moves {_kind(here)} to or from"
            f" {_kind(there)}: between stages of different ranks only whole values can be sent, of"
            " one micro-batch"
        )
    nbytes = most_elements(all_pieces(task, here, mesh)) * itemsize(here.dtype)
    if task.nbytes != nbytes:
        raise VerifyError(
            f"program {program.name}: {label(task)} is of {task.nbytes} bytes; a rank sends or"
            f" receives up to {nbytes}"
        )


def _messages(programs: list[Program], kind: str) -> Iterable[tuple[Message, tuple[Program, Task]]]:
    """The messages of one kind, each of which occurs once."""
    seen: set[Message] = set()
    for program in programs:
        for task in program.tasks:
            if task.kind != kind:
                continue
            other, number = task.attributes.get("stage"), task.attributes.get("message")
            ends = (program.stage, other) if kind == SEND else (other, program.stage)
            key = (*ends, number)
            if (len(task.inputs), len(task.outputs)) != ((1, 0) if kind == SEND else (0, 1)):
                raise VerifyError(
                    f"program {program.name}: {label(task)} takes {len(task.inputs)} and gives"
                    f" {len(task.outputs)} tensors; a message is one tensor, sent or received"
                )
            if type(number) is not int:
                raise VerifyError(f"program {program.name}: {label(task)} is message {number!r}")
            if not isinstance(other, int) or other == program.stage:
                raise VerifyError(
                    f"program {program.name}: {label(task)} is to or from stage {other!r}"
                )
            if key in seen:
                raise VerifyError(
                    f"program {program.name}: {label(task)} is message {number} between stages"
                    f" {ends[0]} and {ends[1]}, as another task is"
                )
            seen.add(key)
            yield key, (program, task)
