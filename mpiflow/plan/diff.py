"""What differs between two plans, in the words of who wrote the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mpiflow.graph.sbp import layout_text
from mpiflow.plan.records import Output, Plan, Program, Register, Task
from mpiflow.plan.store import canonical
from mpiflow.plan.text import size_text, time_text
from mpiflow.plan.traffic import bytes_sent

_SCALARS = (
    "job",
    "version",
    "numpy",
    "mesh",
    "device",
    "machine",
    "overlap",
    "numerics",
    "seed",
    "format",
)


def diff(a: Plan, b: Plan) -> list[str]:
    """One line for each difference, with both values; empty where the plans are the same."""
    return [line for group in differences(a, b) for line in group]


def differences(a: Plan, b: Plan) -> list[list[str]]:
    """The lines of `diff`, those of a kind together."""
    groups = [
        _changes("", {n: getattr(a, n) for n in _SCALARS}, {n: getattr(b, n) for n in _SCALARS}),
        _changes("program ", dict(a.identity), dict(b.identity)),
        _changes("settings ", _record(a.settings), _record(b.settings)),
        _changes("layouts ", _record(a.layouts), _record(b.layouts)),
        _changes("data ", _data(a), _data(b)),
        _changes("variable ", _variables(a), _variables(b)),
        _changes("memory ", _memory(a), _memory(b)),
    ]
    ours, theirs = ({p.name: p for p in plan.programs} for plan in (a, b))
    for name in [*ours, *(n for n in theirs if n not in ours)]:
        groups += _programs(name, a, ours.get(name), b, theirs.get(name))
    groups.append([f"note only in the first: {note}" for note in a.notes if note not in b.notes])
    groups.append([f"note only in the second: {note}" for note in b.notes if note not in a.notes])
    if not any(groups) and canonical(a) != canonical(b):
        groups.append(["only places in memory, names or order differ"])
    return [group for group in groups if group]


def _changes(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`name: value -> value` for each that differs, and what only one of the two has."""
    lines = []
    for name in [*a, *(n for n in b if n not in a)]:
        if name not in b:
            lines.append(f"{what}{name}: {a[name]} -> gone")
        elif name not in a:
            lines.append(f"{what}{name}: new, {b[name]}")
        elif a[name] != b[name]:
            lines.append(f"{what}{name}: {a[name]} -> {b[name]}")
    return lines


def _record(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _data(plan: Plan) -> dict[str, Any]:
    """Every property of every data set; of the shards, how many and the rows of each."""
    found = {}
    for data in plan.data:
        for name, value in _record(data).items():
            if name == "shards":
                value = " ".join(f"{s.name}({s.rows}/{s.chunk_rows})" for s in data.shards)
            if name == "fields":
                value = ", ".join(f"{f.name} {f.dtype} {f.shape}" for f in data.fields)
            found[f"{data.name} {name}"] = value
    return found


def _variables(plan: Plan) -> dict[str, str]:
    return {
        v.name: f"{_tensor(v)}, {v.nbytes} bytes{'' if v.trainable else ', not trained'}"
        for v in plan.variables
    }


def _tensor(tensor: Register) -> str:
    return f"{tensor.dtype} {tensor.shape} {layout_text(tensor.layout)}"


def _memory(plan: Plan) -> dict[str, str]:
    sizes = {f"arena {name}": size for name, size in plan.arenas}
    sizes["of the process"] = plan.process_bytes
    return {name: f"{size} bytes ({size_text(size)})" for name, size in sizes.items()}


def _programs(
    name: str, a: Plan, ours: Program | None, b: Plan, theirs: Program | None
) -> list[list[str]]:
    if ours is None or theirs is None:
        return [[f"{name}: {'new' if ours is None else 'gone'}"]]
    return [
        _changes(f"{name}: ", _figures(a, ours), _figures(b, theirs)),
        _changes(f"{name}: ", _collectives(a, ours), _collectives(b, theirs)),
        _changes(f"{name}: tasks ", _tasks(ours), _tasks(theirs)),
        _changes(f"{name}: output ", _outputs(ours), _outputs(theirs)),
    ]


def _figures(plan: Plan, program: Program) -> dict[str, Any]:
    sent = bytes_sent(plan, program)
    return {
        "rows": program.rows,
        "micro-batches": program.micro_batches,
        "data": program.data,
        "predicted step": f"{program.seconds} s ({time_text(program.seconds)})",
        "bytes sent by a rank": f"{sent} ({size_text(sent)})",
        "slots": {r.name: r.slots for r in program.registers if r.slots != 1},
    }


def _collectives(plan: Plan, program: Program) -> dict[str, str]:
    """Each collective by what it moves; those of the same name are numbered."""
    tensors = plan.tensors(program)
    found: dict[str, str] = {}
    for task in program.tasks:
        if task.kind == "collective":
            moved = task.inputs[0] + (f" and {len(task.inputs) - 1} more" * (len(task.inputs) > 1))
            key = f"{task.op} of {moved}"
            key += f" #{sum(k.startswith(key) for k in found) + 1}" if key in found else ""
            found[key] = f"{_route(task, tensors)}, {task.nbytes} bytes"
    return found


def _route(task: Task, tensors: dict[str, Register]) -> str:
    source, target = tensors[task.inputs[0]], tensors[task.outputs[0]]
    change = f"{layout_text(source.layout)} -> {layout_text(target.layout)}"
    return f"along {task.axis}, {source.dtype} {source.shape} {change}"


def _tasks(program: Program) -> dict[str, int]:
    """How often each op occurs, but for collectives."""
    return dict(Counter(task.op for task in program.tasks if task.kind != "collective"))


def _outputs(program: Program) -> dict[str, str]:
    def kind(output: Output) -> str:
        return f"{'total' if output.total else 'mean'} in {output.register}"

    return {output.name: kind(output) for output in program.outputs}
