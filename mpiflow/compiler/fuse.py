"""Step 10: remove tasks that do nothing, and merge tasks that one kernel can do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mpiflow.plan.records import Program, Register, Task

_COPIES = ("StopGradient", "Identity")


def fuse(program: Program, variables: set[str]) -> Program:
    """Drop copies within a layout; merge scalings in a row; make constants where they are used."""
    return _merge(_drop_copies(program, variables))


def _drop_copies(program: Program, variables: set[str]) -> Program:
    layouts = {r.name: r.layout for r in program.registers}
    same: dict[str, str] = {}
    tasks = []
    for task in program.tasks:
        if not same.keys().isdisjoint(task.inputs):
            task = replace(task, inputs=tuple(same.get(name, name) for name in task.inputs))
        copied = task.op in _COPIES and not {*task.inputs, *task.outputs} & variables
        if copied and layouts[task.inputs[0]] == layouts[task.outputs[0]]:
            same[task.outputs[0]] = task.inputs[0]
        else:
            tasks.append(task)
    outputs = tuple(replace(o, register=same.get(o.register, o.register)) for o in program.outputs)
    return _prune(replace(program, tasks=tuple(tasks), outputs=outputs))


def _merge(program: Program) -> Program:
    """Let a task take over the work of the one that makes its only input, if nobody else reads it.

    Scale of Scale is one Scale; Scale or Expand of Fill is a Fill.
    """
    registers = {r.name: r for r in program.registers}
    uses = Counter(name for task in program.tasks for name in task.inputs)
    uses.update(output.register for output in program.outputs)
    made: dict[str, Task] = {}
    for task in program.tasks:
        source = task.inputs[0] if task.inputs else ""
        first = made.get(source)
        if first is not None and task.outputs and (first.op, task.op) in _MERGED:
            task = _merged(first, task, registers[task.outputs[0]])
            if uses[source] == 1:
                del made[source]
            else:
                uses[source] -= 1
        made[task.outputs[0] if task.outputs else task.name] = task
    return _prune(replace(program, tasks=tuple(made.values())))


_MERGED = {("Scale", "Scale"), ("Fill", "Scale"), ("Fill", "Expand")}


def _merged(first: Task, second: Task, target: Register) -> Task:
    if first.op == "Scale":
        by = first.attributes["by"] * second.attributes["by"]
        return replace(second, inputs=first.inputs, attributes={"by": by})
    value = first.attributes.get("value", 0.0) * second.attributes.get("by", 1.0)
    attributes = {"shape": list(target.shape), "value": value, "dtype": target.dtype}
    return replace(second, op="Fill", inputs=(), attributes=attributes, flops=0)


def _prune(program: Program) -> Program:
    """Without the registers that no task makes any more."""
    made = {name for task in program.tasks for name in task.outputs}
    kept = tuple(r for r in program.registers if r.name in made)
    names = {task.name for task in program.tasks}
    tasks = tuple(
        t
        if names.issuperset(t.after)
        else replace(t, after=tuple(n for n in t.after if n in names))
        for t in program.tasks
    )
    return replace(program, registers=kept, tasks=tasks)
