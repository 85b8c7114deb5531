"""Plans with pipeline stages that are broken where stages meet; see mutants.py."""

import random
from dataclasses import replace
from itertools import pairwise

from mutants import Mutant, with_program, with_register, with_task, without_task

from mpiflow.compiler.pipeline import in_flight
from mpiflow.graph.sbp import B, S
from mpiflow.plan.records import RECEIVE, SEND


def stage_mutants(plan, count, seed=0):
    """`count` mutants of each kind that fits, drawn from all places where it does."""
    for kind, mutate in MUTATIONS.items():
        places = [
            Mutant(kind, f"stage {p.stage}: {what}", tuple(names), with_program(plan, p, new))
            for p in plan.programs if p.name == "train"
            for what, names, new in mutate(plan, p)
        ]  # fmt: skip
        draw = random.Random(f"{seed} {kind}")
        yield from (draw.choice(places) for _ in range(count if places else 0))


def ends(program, *kinds):
    """(place, task) of the sends and receives of a program."""
    kinds = kinds or (SEND, RECEIVE)
    return [(i, task) for i, task in enumerate(program.tasks) if task.kind in kinds]


def tensor_of(task):
    return (*task.inputs, *task.outputs)[0]


def named(task):
    """What a message may call an end: its task, its tensor, or how it is numbered."""
    return [task.name, tensor_of(task), f"message {task.attributes['message']}"]


def dropped_send(plan, program):
    for i, task in ends(program, SEND):
        other = next(
            t for p in plan.programs if p.stage == task.attributes["stage"] and p.name == "train"
            for t in p.tasks
            if t.kind == RECEIVE and t.attributes["message"] == task.attributes["message"]
        )  # fmt: skip
        # What nobody reads any more is found first, by the name of who makes it.
        maker = next((t.name for t in program.tasks if task.inputs[0] in t.outputs), task.name)
        yield f"no {task.name}", [*named(task), other.name, maker], without_task(program, i)


def dropped_receive(plan, program):
    for i, task in ends(program, RECEIVE):
        readers = [t.name for t in program.tasks if task.outputs[0] in t.inputs]
        yield f"no {task.name}", [*named(task), *readers], without_task(program, i)


def other_number(plan, program):
    for i, task in ends(program):
        for number in (task.attributes["message"] + 1000, -1):
            new = with_task(program, i, attributes={**task.attributes, "message": number})
            yield f"{task.name} is {number}", [*named(task), f"message {number}"], new


def other_stage(plan, program):
    for i, task in ends(program):
        for stage in (program.stage, plan.mesh.stages, -1, "next"):
            new = with_task(program, i, attributes={**task.attributes, "stage": stage})
            yield f"{task.name} with stage {stage}", [*named(task), f"stage {stage}"], new


def same_number(plan, program):
    """Two messages between two stages that have one number."""
    for kind in (SEND, RECEIVE):
        for i, task in ends(program, kind):
            for _, other in ends(program, kind):
                if other.name != task.name and (
                    other.attributes["stage"] == task.attributes["stage"]
                ):
                    new = with_task(program, i, attributes=other.attributes)
                    yield f"{task.name} as {other.name}", [*named(task), *named(other)], new


def other_layout(plan, program):
    registers = {r.name: r for r in program.registers}
    for _, task in ends(program, RECEIVE):
        register = registers[task.outputs[0]]
        for axis, sbp in enumerate(register.layout):
            for wrong in (B, S(0)):
                if wrong != sbp:
                    layout = (*register.layout[:axis], wrong, *register.layout[axis + 1 :])
                    new = with_register(program, register.name, layout=layout)
                    readers = [t.name for t in program.tasks if register.name in t.inputs]
                    names = [*named(task), *readers, f"sends {register.name.partition('<')[0]} as"]
                    yield f"{register.name} is {wrong}", names, new


def other_bytes(plan, program):
    for i, task in ends(program):
        new = with_task(program, i, nbytes=task.nbytes + 8)
        yield f"{task.name} of {task.nbytes + 8} bytes", named(task), new


def swapped_in_lane(plan, program):
    """Two messages of one part of the step in another order than they are awaited in."""
    for stream, order in program.order:
        for a, b in pairwise(order):
            first, second = program.tasks[a], program.tasks[b]
            parts = {(t.phase, t.segment) for t in (first, second)}
            if first.kind in (SEND, RECEIVE) and len(parts) == 1:
                exchange = {a: b, b: a}
                orders = tuple(
                    (s, tuple(exchange.get(i, i) for i in o) if s == stream else o)
                    for s, o in program.order
                )
                new = replace(program, order=orders)
                yield f"{second.name} before {first.name}", [*named(first), *named(second)], new


def backward_first(plan, program):
    """A micro-batch goes backward where it should go forward."""
    for micro in range(program.micro_batches if program.sequence else 0):
        exchange = {(0, micro): (1, micro), (1, micro): (0, micro)}
        sequence = tuple(exchange.get(turn, turn) for turn in program.sequence)
        yield (
            f"backward of {micro} before forward",
            ["segment", "would hang"],
            replace(program, sequence=sequence),
        )


def dropped_turn(plan, program):
    segments = {task.segment for task in program.tasks if task.phase % 2}
    for i, turn in enumerate(program.sequence):
        if turn[0] not in segments:
            continue
        sequence = program.sequence[:i] + program.sequence[i + 1 :]
        yield f"never {turn}", ["segment", "sequence"], replace(program, sequence=sequence)


def repeated_turn(plan, program):
    for turn in program.sequence:
        sequence = (*program.sequence, turn)
        yield f"{turn} twice", ["segment", "sequence"], replace(program, sequence=sequence)


def fewer_slots(plan, program):
    """One slot fewer than micro-batches need at once, or one for all."""
    for register in program.registers:
        users = [t for t in program.tasks if register.name in (*t.inputs, *t.outputs)]
        if not register.rewound or register.aliases or {t.kind for t in users} - {"compute"}:
            continue
        segments = [t.segment for t in users]
        if in_flight(program.sequence, min(segments), max(segments)) == register.slots:
            for slots in {register.slots - 1, 1}:
                new = with_register(program, register.name, slots=slots, rewound=slots > 1)
                names = [register.name, *(t.name for t in users)]
                yield f"{register.name} with {slots} slots", names, new


def other_step(plan, program):
    yield "no program", ["programs", "trained"], replace(program, name="trained")
    yield "other rows", ["rows", str(program.rows + 24)], replace(program, rows=program.rows + 24)
    if program.outputs:
        outputs = (replace(program.outputs[0], name="other"), *program.outputs[1:])
        yield "other outputs", ["outputs", "other"], replace(program, outputs=outputs)


def beyond_stages(plan, program):
    for stage in (plan.mesh.stages, -1):
        new = replace(program, stage=stage)
        yield f"of stage {stage}", [f"stage {stage}"], new


MUTATIONS = {
    function.__name__: function
    for function in (
        dropped_send, dropped_receive, other_number, other_stage, same_number, other_layout,
        other_bytes, swapped_in_lane, backward_first, dropped_turn, repeated_turn, fewer_slots,
        other_step, beyond_stages,
    )
}  # fmt: skip
