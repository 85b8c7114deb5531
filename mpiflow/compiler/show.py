"""What the steps of the compiler make, as text: for `mpiflow plan --after STEP`."""

from __future__ import annotations

from typing import Any

from mpiflow.graph.sbp import layout_text
from mpiflow.plan import text
from mpiflow.plan.records import Plan, Program


def show_result(result: Any) -> str:
    """A graph, layouts, a program, a packed arena or a plan."""
    if isinstance(result, Plan):
        return text.show(result)
    return _program(result) if isinstance(result, Program) else str(result)


def _program(program: Program) -> str:
    layouts = {r.name: layout_text(r.layout) for r in program.registers}
    order = program.order or (("not scheduled", tuple(range(len(program.tasks)))),)
    lines = []
    for stream, indices in order:
        lines.append(f"  stream {stream}")
        for i in indices:
            task = program.tasks[i]
            inputs = ", ".join(f"{n} {layouts.get(n, '')}".rstrip() for n in task.inputs)
            outputs = ", ".join(f"{n} {layouts.get(n, '')}".rstrip() for n in task.outputs)
            lines.append(f"    {task.op}({inputs}) -> {outputs}")
    return "\n".join(lines)
