"""Plans broken on purpose: `mutants(plan, count, seed)` gives each kind of fault `count` times.

Every mutant is invalid by construction: a fault is only planted where the plan itself shows that
it matters. A kind that a plan has no room for (no fused collective, say) gives none.
"""

import random
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from mpiflow.graph.sbp import B, P, Partial, S
from mpiflow.plan.records import Plan, Task


@dataclass(frozen=True)
class Mutant:
    """A broken plan; a good message about it contains one of `names`."""

    kind: str
    what: str
    names: tuple[str, ...]
    plan: Plan


def mutants(plan, count, seed=0, kinds=None):
    """`count` mutants of each kind that fits, drawn from all places where it does."""
    for kind in kinds or MUTATIONS:
        places = [
            Mutant(kind, f"{program.name}: {what}", tuple(names), with_program(plan, program, new))
            for program in plan.programs
            for what, names, new in MUTATIONS[kind](Facts(plan, program))
        ]
        draw = random.Random(f"{seed} {kind}")
        yield from (draw.choice(places) for _ in range(count if places else 0))


def with_program(plan, old, new):
    return replace(plan, programs=tuple(new if p is old else p for p in plan.programs))


def with_task(program, index, **changes):
    tasks = list(program.tasks)
    tasks[index] = replace(tasks[index], **changes)
    return replace(program, tasks=tuple(tasks))


def with_register(program, name, **changes):
    registers = [replace(r, **changes) if r.name == name else r for r in program.registers]
    return replace(program, registers=tuple(registers))


def without(names, gone):
    return tuple(name for name in names if name != gone)


def without_task(program, index):
    tasks = program.tasks[:index] + program.tasks[index + 1 :]
    order = tuple(
        (s, tuple(i - (i > index) for i in indices if i != index)) for s, indices in program.order
    )
    gone = program.tasks[index].name
    tasks = tuple(replace(t, after=without(t.after, gone)) for t in tasks)
    return replace(program, tasks=tasks, order=order)


def swapped(program, a, b):
    """The program with two tasks of a stream in each other's place."""
    exchange = {a: b, b: a}
    return replace(
        program,
        order=tuple((s, tuple(exchange.get(i, i) for i in tasks)) for s, tasks in program.order),
    )


class Facts:
    """Who reads, writes and waits for what in a program, found the plain way."""

    def __init__(self, plan, program):
        self.plan, self.program, self.tasks = plan, program, program.tasks
        self.arena = dict(plan.arenas)["host"]
        self.variables = [v.name for v in plan.variables]
        self.registers = {r.name: r for r in program.registers}
        self.tensors = plan.tensors(program)
        self.producer = {n: i for i, t in enumerate(self.tasks) for n in t.outputs}
        self.readers = {name: [] for name in self.tensors}
        for i, task in enumerate(self.tasks):
            for name in task.inputs:
                self.readers[name].append(i)

    def users(self, name):
        """Names of the tasks that use a tensor, and its own."""
        writer = [self.producer[name]] if name in self.producer else []
        return [name, *(self.tasks[i].name for i in (*writer, *self.readers[name]))]

    def waits(self, program=None, ignore=""):
        """Of each task, those complete before it starts; stream `ignore` taken as unordered."""
        program = program or self.program
        index = {t.name: i for i, t in enumerate(program.tasks)}
        direct = [
            {self.producer[n] for n in t.inputs if n in self.registers}
            | {index[n] for n in t.after}
            for t in program.tasks
        ]
        for stream, tasks in program.order:
            for a, b in pairwise(tasks):
                if stream != ignore:
                    direct[b].add(a)
        return [reached(direct, i) for i in range(len(direct))]

    def collectives(self):
        return [(i, t) for i, t in enumerate(self.tasks) if t.kind == "collective"]


def reached(direct, start):
    seen, todo = set(), [start]
    while todo:
        for other in direct[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def dropped_task(f):
    for i, task in enumerate(f.tasks):
        names = [user for n in task.outputs if n in f.registers for user in f.users(n)]
        if names:
            yield f"no {task.name}", names, without_task(f.program, i)


def dropped_output(f):
    for i, task in enumerate(f.tasks):
        for name in task.outputs:
            if name in f.registers:
                new = with_task(f.program, i, outputs=without(task.outputs, name))
                yield f"{task.name} without output {name}", f.users(name), new


def dropped_input(f):
    """Of a collective, or where nothing else that the producer gives is used."""
    kept = {*f.variables, *(o.register for o in f.program.outputs)}
    kept |= {r.name for r in f.registers.values() if r.aliases in f.variables}
    for i, task in enumerate(f.tasks):
        for name in task.inputs:
            others = f.tasks[f.producer[name]].outputs if name in f.registers else f.variables
            dead = not any(n in kept or [r for r in f.readers[n] if r != i] for n in others)
            # The producer's other outputs must not be read by this task either.
            dead = dead and not any(n in task.inputs for n in others if n != name)
            if task.kind == "collective" or dead:
                new = with_task(f.program, i, inputs=without(task.inputs, name))
                yield f"{task.name} without input {name}", [task.name, *f.users(name)], new


def dropped_from_order(f):
    for i, task in enumerate(f.tasks):
        order = tuple((s, tuple(j for j in tasks if j != i)) for s, tasks in f.program.order)
        yield f"{task.name} never fires", [task.name], replace(f.program, order=order)


def repeated_in_order(f):
    for i, task in enumerate(f.tasks):
        order = tuple(
            (s, (*tasks, i) if s == task.stream else tasks) for s, tasks in f.program.order
        )
        yield f"{task.name} fires twice", [task.name], replace(f.program, order=order)


def duplicate_task(f):
    for task in f.tasks:
        renamed = replace(task, name=f"{task.name}.again")
        tasks = (*f.tasks, renamed)
        order = tuple(
            (s, (*indices, len(f.tasks)) if s == task.stream else indices)
            for s, indices in f.program.order
        )
        if task.outputs:
            new = replace(f.program, tasks=tasks, order=order)
            yield f"{task.name} twice", [task.name], new
        new = replace(f.program, tasks=(*f.tasks, task), order=order)
        yield f"two tasks {task.name}", [task.name], new


def wrong_stream(f):
    streams = [s for s, _ in f.program.order]
    for i, task in enumerate(f.tasks):
        for stream in streams:
            if stream != task.stream:
                order = tuple(
                    (s, tuple(j for j in (*tasks, *[i][: s == stream]) if j != i or s == stream))
                    for s, tasks in f.program.order
                )
                moved = with_task(replace(f.program, order=order), i, stream=stream)
                yield f"{task.name} on {stream}", [task.name], moved


def swapped_dependent(f):
    """Two tasks of a stream of which the second needs the first by registers and `after`."""
    for stream, tasks in f.program.order:
        waits = f.waits(ignore=stream)
        for place, a in enumerate(tasks):
            for b in tasks[place + 1 :]:
                if a in waits[b]:
                    names = [f.tasks[a].name, f.tasks[b].name]
                    yield f"{names[1]} before {names[0]}", names, swapped(f.program, a, b)


def swapped_collectives(f):
    yield from (
        found for found in swapped_dependent(f)
        if {t.name for t in f.tasks if t.kind == "collective"} >= set(found[1])
    )  # fmt: skip


def overlapping(f):
    """An output moved over an input of its own task, which still reads it."""
    for task in f.tasks:
        for name in task.outputs:
            for other in task.inputs:
                a, b = f.tensors[other], f.tensors[name]
                size = b.slots * b.nbytes
                if name in f.registers and b.aliases != other and a.nbytes and size:
                    for offset in (a.offset, a.offset + a.slots * a.nbytes - 8):
                        overlaps = a.offset - size < offset <= f.arena - size
                        if offset >= 0 and overlaps and offset % 8 == 0:
                            new = with_register(f.program, name, offset=offset)
                            yield f"{name} over {other}", [task.name, name, other], new


def over_a_variable(f):
    for name, register in f.registers.items():
        for variable in f.plan.variables:
            fits = variable.offset + register.slots * register.nbytes <= f.arena
            if register.nbytes and variable.nbytes and fits and not register.aliases:
                new = with_register(f.program, name, offset=variable.offset)
                yield f"{name} over variable {variable.name}", f.users(name), new


def over_a_read_slot(f):
    """A register in the last slot of one that is read ahead."""
    for ahead in f.registers.values():
        if f.tasks[f.producer[ahead.name]].kind == "read" and ahead.nbytes:
            offset = ahead.offset + (ahead.slots - 1) * ahead.nbytes
            for name, register in f.registers.items():
                fits = offset % 8 == 0 and offset + register.slots * register.nbytes <= f.arena
                if name != ahead.name and register.nbytes and fits:
                    names = [*f.users(name), ahead.name]
                    new = with_register(f.program, name, offset=offset)
                    yield f"{name} over a slot of {ahead.name}", names, new


def live_workspace(f):
    """A workspace laid over what its own task reads or writes."""
    for i, task in enumerate(f.tasks):
        for name in (*task.inputs, *task.outputs):
            tensor = f.tensors[name]
            if tensor.nbytes:
                new = with_task(f.program, i, workspace=(tensor.offset, tensor.nbytes))
                yield f"workspace of {task.name} over {name}", [task.name], new


def removed_after(f):
    """Where no other way leads from the one to the other, and they use the same memory."""
    for i, task in enumerate(f.tasks):
        for name in task.after:
            new = with_task(f.program, i, after=without(task.after, name))
            earlier = next(j for j, t in enumerate(f.tasks) if t.name == name)
            if earlier not in f.waits(new)[i] and shares_memory(f, earlier, i):
                yield f"{task.name} not after {name}", [task.name, name], new


def shares_memory(f, earlier, later):
    """Whether the later task writes bytes that the earlier one uses."""
    used = [f.tensors[n] for n in (*f.tasks[earlier].inputs, *f.tasks[earlier].outputs)]
    wrote = [f.tensors[n] for n in f.tasks[later].outputs]
    return any(
        a.offset < b.offset + b.slots * b.nbytes and b.offset < a.offset + a.slots * a.nbytes
        for a in used
        for b in wrote
    )


def no_slots(f):
    for name in f.registers:
        yield f"{name} has no slot", [name], with_register(f.program, name, slots=0)


def beyond_arena(f):
    for name, r in f.registers.items():
        if r.nbytes:
            offset = (f.arena - r.slots * r.nbytes) // 8 * 8 + 8
            yield f"{name} at {offset}", [name], with_register(f.program, name, offset=offset)


def misaligned(f):
    for name, r in f.registers.items():
        if r.dtype not in ("bool", "int8", "uint8"):
            yield f"{name} moved by 1", [name], with_register(f.program, name, offset=r.offset + 1)


def wrong_bytes(f):
    for name, r in f.registers.items():
        yield f"{name} grown", [name], with_register(f.program, name, nbytes=r.nbytes + 8)


def missing_register(f):
    for name in f.registers:
        registers = tuple(r for r in f.program.registers if r.name != name)
        yield f"no {name}", f.users(name), replace(f.program, registers=registers)


def second_producer(f):
    for i, task in enumerate(f.tasks):
        for name, producer in f.producer.items():
            if producer != i and name not in task.inputs and task.kind == "compute":
                new = with_task(f.program, i, outputs=(*task.outputs, name))
                yield f"{task.name} gives {name} too", [task.name], new


def late_reader(f):
    """A variable read by a task that comes after its writer."""
    waits = f.waits()
    for name in f.variables:
        for i, task in enumerate(f.tasks):
            writer = f.producer.get(name)
            if task.kind == "compute" and writer in waits[i]:
                new = with_task(f.program, i, inputs=(*task.inputs, name))
                yield f"{task.name} reads {name}", [task.name, name], new


def writing_in_evaluation(f):
    if f.program.name in ("initialise", "train"):
        return
    for i, task in enumerate(f.tasks):
        for name in f.variables:
            if task.kind == "compute":
                new = with_task(f.program, i, outputs=(*task.outputs, name))
                yield f"{task.name} writes {name}", [task.name, name], new


def wrong_layout(f):
    """An operand of a collective in another layout along the axis."""
    for _, task in f.collectives():
        axis = f.plan.mesh_of(f.program).along(task.axis)[0]
        for name in (*task.inputs, *task.outputs):
            for sbp in (B, P, Partial("max"), S(0), S(1)):
                layout = f.tensors[name].layout
                if name in f.registers and sbp != layout[axis]:
                    new = (*layout[:axis], sbp, *layout[axis + 1 :])
                    yield (
                        f"{name} is {sbp}",
                        [task.name, name],
                        with_register(f.program, name, layout=new),
                    )


def wrong_axis(f):
    for i, task in f.collectives():
        for axis in (*f.plan.mesh.names, "elsewhere"):
            if axis != task.axis:
                yield f"{task.name} on {axis}", [task.name], with_task(f.program, i, axis=axis)


def moved_to_other_axes(f):
    """A collective along other axes, in the stream of these: a group with other members."""
    mesh = f.plan.mesh_of(f.program)
    names = mesh.names[mesh.timed :]
    sets = [",".join(c) for n in range(1, 4) for c in permutations(names, n)]
    for i, task in f.collectives():
        for axis in sets:
            if axis != task.axis:
                stream = f"comm.{axis}"
                order = {s: tuple(j for j in t if j != i) for s, t in f.program.order}
                order[stream] = tuple(sorted((*order.get(stream, ()), i)))
                order = tuple((s, tasks) for s, tasks in order.items() if tasks)
                moved = with_task(replace(f.program, order=order), i, axis=axis, stream=stream)
                yield f"{task.name} along {axis}", [task.name], moved


def small_workspace(f):
    """Too little memory to pack what a collective moves."""
    for i, task in f.collectives():
        offset, nbytes = task.workspace
        if nbytes:
            new = with_task(f.program, i, workspace=(offset, nbytes - 1))
            yield f"{task.name} packs into {nbytes - 1} bytes", [task.name], new


def wrong_collective(f):
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "all_join")
    for i, task in f.collectives():
        for op in kinds:
            # All that an all_to_all does is an exchange.
            if op != task.op and (task.op, op) != ("all_to_all", "exchange"):
                yield f"{task.name} is {op}", [task.name], with_task(f.program, i, op=op)


def wrong_attribute(f):
    for i, task in f.collectives():
        for key, value in task.attributes.items():
            other = {"sum": "max", "max": "sum"}.get(value, 7)
            changed = {**task.attributes, key: other}
            yield f"{key} of {task.name}", [task.name], with_task(f.program, i, attributes=changed)


def swapped_bucket(f):
    """The members of a fused collective no longer in the order of their memory."""
    for i, task in f.collectives():
        if len(task.inputs) > 1:
            new = with_task(f.program, i, inputs=task.inputs[::-1], outputs=task.outputs[::-1])
            yield f"{task.name} reversed", [task.name], new


def lost_alias(f):
    for name, r in f.registers.items():
        if r.aliases and r.nbytes:
            new = with_register(f.program, name, aliases="")
            yield f"{name} aliases nothing", f.users(name), new


def wrong_alias(f):
    """An alias of something that the producer does not read."""
    for name in f.registers:
        for other in f.registers:
            inputs = f.tasks[f.producer[name]].inputs
            if other not in (name, *inputs):
                new = with_register(f.program, name, aliases=other)
                yield f"{name} aliases {other}", f.users(name), new


def bad_output(f):
    """What a step gives is missing, no scalar, or not on every rank."""
    for place, output in enumerate(f.program.outputs):
        for name in ("nothing", *f.registers):
            r = f.registers.get(name)
            if r is None or r.shape or any(sbp != B for sbp in r.layout):
                outputs = list(f.program.outputs)
                outputs[place] = replace(output, register=name)
                new = replace(f.program, outputs=tuple(outputs))
                names = [name, output.name, output.register]  # the last one is unread now
                yield f"output {output.name} is {name}", names, new


def unread_read(f):
    """A read that nothing in the step waits for."""
    if f.program.data:
        tasks = (*f.tasks, Task("ahead", "read", "read", "read"))
        order = dict(f.program.order)
        order["read"] = (*order.get("read", ()), len(f.tasks))
        yield (
            "a read of nothing",
            ["ahead"],
            replace(f.program, tasks=tasks, order=tuple(order.items())),
        )


MUTATIONS = {
    function.__name__: function
    for function in (
        dropped_task, dropped_output, dropped_input, dropped_from_order, repeated_in_order,
        duplicate_task, wrong_stream, swapped_dependent, swapped_collectives, overlapping,
        over_a_variable, over_a_read_slot, live_workspace, removed_after, no_slots, beyond_arena,
        misaligned, wrong_bytes, missing_register, second_producer, late_reader,
        writing_in_evaluation, wrong_layout, wrong_axis, wrong_collective, wrong_attribute,
        moved_to_other_axes, small_workspace, swapped_bucket, lost_alias, wrong_alias, bad_output,
        unread_read,
    )
}  # fmt: skip
