"""Step 10: remove tasks that do nothing, and merge tasks that one kernel can do."""

from __future__ import annotations

from dataclasses import replace

from mpiflow.plan.records import Program, Task

_COPIES = ("StopGradient", "Identity")


def fuse(program: Program, variables: set[str]) -> Program:
    """Drop copies within a layout; turn two scalings in a row into one."""
    return _merge_scales(_drop_copies(program, variables))


def _drop_copies(program: Program, variables: set[str]) -> Program:
    layouts = {r.name: r.layout for r in program.registers}
    same: dict[str, str] = {}
    tasks = []
    for task in program.tasks:
        task = replace(task, inputs=tuple(same.get(name, name) for name in task.inputs))
        copied = task.op in _COPIES and not {*task.inputs, *task.outputs} & variables
        if copied and layouts[task.inputs[0]] == layouts[task.outputs[0]]:
            same[task.outputs[0]] = task.inputs[0]
        else:
            tasks.append(task)
    outputs = tuple(replace(o, register=same.get(o.register, o.register)) for o in program.outputs)
    return _prune(replace(program, tasks=tuple(tasks), outputs=outputs))


def _merge_scales(program: Program) -> Program:
    uses: dict[str, int] = {output.register: 2 for output in program.outputs}
    for task in program.tasks:
        for name in task.inputs:
            uses[name] = uses.get(name, 0) + 1
    made: dict[str, Task] = {}
    for task in program.tasks:
        first = made.get(task.inputs[0]) if task.op == "Scale" else None
        if first is not None and first.op == "Scale" and uses[task.inputs[0]] == 1:
            by = first.attributes["by"] * task.attributes["by"]
            del made[task.inputs[0]]
            task = replace(task, inputs=first.inputs, attributes={**task.attributes, "by": by})
        made[task.outputs[0] if task.outputs else task.name] = task
    return _prune(replace(program, tasks=tuple(made.values())))


def _prune(program: Program) -> Program:
    """Without the registers that no task makes any more."""
    made = {name for task in program.tasks for name in task.outputs}
    kept = tuple(r for r in program.registers if r.name in made)
    names = {task.name for task in program.tasks}
    tasks = tuple(
        replace(t, after=tuple(name for name in t.after if name in names)) for t in program.tasks
    )
    return replace(program, registers=kept, tasks=tasks)
