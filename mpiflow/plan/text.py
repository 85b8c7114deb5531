"""Plans for people: `show` prints one, `summary` is its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from mpiflow.garbage import no_collection
from mpiflow.graph.sbp import layout_text
from mpiflow.plan.places import arena_names
from mpiflow.plan.records import DataSet, Layouts, Plan, Program, Register, Task
from mpiflow.plan.simulator import simulate
from mpiflow.plan.slice import RankPlan
from mpiflow.plan.store import canonical, content_digest, program_digest
from mpiflow.plan.traffic import most_sent
from mpiflow.plan.unroll import ENOUGH

_WIDTH = 120  # characters of a line
_LEAST = 60  # of which the operands of a task get these at least
_HEADS = ("task", "stream", "operands", ">bytes", ">time", "line")


def size_text(nbytes: int) -> str:
    """Bytes in binary units: `512 B`, `77.2 KiB`, `1.50 MiB`."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{_digits(size)} {unit}"


def time_text(seconds: float) -> str:
    """Seconds in the unit that reads best: `12.3 us`, `1.50 ms`, `2.00 s`, `1 h 05 min`."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= length:
            return f"{_digits(seconds / length)} {unit}"
    return "0 s"


def _digits(number: float) -> str:
    """Three digits: 1.23, 12.3, 123."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def summary(plan: Plan) -> dict[str, Any]:
    """The figures of a plan as `mpiflow plan --json` prints them."""
    train = plan.program("train")
    tasks = [task for p in plan.programs if p.name == "train" for task in p.tasks]
    content = canonical(plan)
    return {
        "job": plan.job,
        "digest": content_digest(content),
        "program": program_digest(plan),
        "ranks": plan.mesh.size,
        "mesh": plan.mesh.described(),
        "parameters": sum(prod(v.shape) for v in plan.distinct_variables() if v.trainable),
        "nodes": sum(task.kind == "compute" for task in tasks),
        "tasks": sum(len(program.tasks) for program in plan.programs),
        "plan_bytes": len(content),
        "predicted": {
            "step_seconds": train.seconds if train else 0.0,
            "peak_bytes": dict(plan.arenas),
            "process_bytes": plan.process_bytes,
            "bytes_sent": most_sent(plan, "train"),
        },
        "layouts": {
            "seconds": plan.layouts.seconds,
            "gap": plan.layouts.gap,
            "memory_limit": plan.layouts.limit,
        },
        "collectives": collectives(tasks, train.micro_batches if train else 1),
        "notes": list(plan.notes),
    }


def collectives(tasks: Iterable[Task], micro_batches: int = 1) -> list[dict[str, Any]]:
    """The collectives of a step: kind, axis, bytes that a rank sends in one, times per step."""
    found = Counter[tuple[str, str, int]]()
    for task in tasks:
        if task.kind == "collective":
            found[task.op, task.axis, task.nbytes] += micro_batches if task.phase % 2 else 1
    return [
        {"kind": kind, "axis": axis, "bytes": nbytes, "times": times}
        for (kind, axis, nbytes), times in found.items()
    ]


@no_collection()
def show(plan: Plan) -> str:
    """The plan, one line an item; tasks in the order in which they are predicted to start."""
    lines = [*_header(plan)]
    if plan.data:
        lines += ["", "data", *table([_data_row(data) for data in plan.data])]
    for number, stage in enumerate(plan.stages()):
        if plan.mesh.stages > 1:
            ranks = f"mesh {stage.mesh}, " if plan.mesh.by_stage else ""
            lines += ["", f"== stage {number} of {plan.mesh.stages}: {ranks}{_arenas(stage)} =="]
        lines += _stage(stage)
    return "\n".join(lines) + "\n"


def _stage(plan: Plan) -> list[str]:
    """Variables and programs of one pipeline stage, or of all there is."""
    lines: list[str] = []
    if plan.variables:
        rank = plan.slice(0)
        rows = [_variable_row(v, rank, v.where) for v in plan.variables]
        heads = ("name", "shape", "layout", "largest shard", ">size", "line")
        lines += ["", "variables", *table(rows, heads)]
    for program in plan.programs:
        lines += ["", *_program(plan, program)]
    return lines


def _header(plan: Plan) -> list[str]:
    figures = summary(plan)
    predicted = figures["predicted"]
    rows = [
        ("plan", f"{plan.job} for {plan.mesh.size} ranks, mesh {plan.mesh}, device {plan.device}"),
        ("digest", figures["digest"]),
        ("program", figures["program"]),
        ("made by", f"mpiflow {plan.version}, NumPy {plan.numpy}, for machine {plan.machine}"),
        ("numbers", f"{plan.numerics}, seed {plan.seed}, {figures['parameters']:,} parameters"),
        ("length", _length(plan)),
        ("step", f"{time_text(predicted['step_seconds'])} predicted"),
        *((("layouts", layouts_text(plan.layouts)),) if plan.layouts.seconds else ()),
        ("memory", f"{_arenas(plan)}, {size_text(plan.process_bytes)} in the whole process"),
        ("sent", f"{size_text(predicted['bytes_sent'])} a step, by the rank that sends most"),
        *(("note", note) for note in plan.notes),
    ]
    return [f"{name:<8} {text}" for name, text in rows]


def _arenas(plan: Plan) -> str:
    """`1.23 MiB host arena`, of the largest stage."""
    sizes = dict(plan.arenas)
    texts = (f"{size_text(sizes[name])} {name} arena" for name in arena_names(plan.device))
    return ", ".join(texts)


def layouts_text(layouts: Layouts) -> str:
    """What the layouts of a step are predicted to take, and how good that is."""
    text = f"{time_text(layouts.seconds)} predicted, without overlap; "
    if layouts.gap:
        text += f"at most {100 * layouts.gap:.2g} % above the best"
    else:
        text += "proven best"
    return text + (f" within {size_text(layouts.limit)} of memory" if layouts.limit else "")


def _length(plan: Plan) -> str:
    train, settings = plan.program("train"), plan.settings
    batch = f", batch {train.rows}{_cut_text(train)}" if train else ""
    return f"{settings.epochs} epochs of {settings.steps_per_epoch} steps{batch}"


def _data_row(data: DataSet) -> tuple[str, ...]:
    fields = ", ".join(f"{f.name} {_shape(f.shape)} {f.dtype}" for f in data.fields)
    order = f"shuffled with seed {data.seed}" if data.shuffle else "in order"
    rows = f"{data.rows:,} rows in {len(data.shards)} files"
    return data.name, data.pattern, rows, f"batch {data.batch}", order, fields


def _variable_row(tensor: Register, rank: RankPlan, where: str) -> tuple[str, ...]:
    return (
        tensor.name, f"{_shape(tensor.shape)} {tensor.dtype}", layout_text(tensor.layout),
        _shape(rank.shape(tensor)), size_text(tensor.nbytes), where,
    )  # fmt: skip


def _program(plan: Plan, program: Program) -> list[str]:
    ordered = _in_order(plan, program)
    tensors, rank = plan.tensors(program), plan.slice(0, program)
    sides = [
        (_title(t), f"{t.stream} {t.route}".strip(), "operands",
         size_text(t.nbytes) if t.nbytes else "", time_text(t.seconds),
         t.where.rpartition("/")[2])
        for t in ordered
    ]  # fmt: skip
    room = _WIDTH - len(max(table(sides, _HEADS), key=len)) + len("operands")
    texts = [_operands(task, tensors, rank, max(room, _LEAST)) for task in ordered]
    rows = [(*side[:2], text, *side[3:]) for side, text in zip(sides, texts, strict=True)]
    data = f" of {program.data}" if program.data else ""
    title = (
        f"program {program.name}: {program.rows} rows{data}{_cut_text(program)}, "
        f"{len(rows)} task{'s' * (len(rows) != 1)}, {time_text(program.seconds)}"
    )
    if program.micro_batches > 1:
        title += f"; layouts on {plan.mesh_of(program)}"
    heads, *lines = table(rows, _HEADS)
    if program.micro_batches > 1:
        lines = _under_phases(program, ordered, lines)
    lines = [title, heads, *lines]
    for output in program.outputs:
        how = "total" if output.total else "mean"
        lines.append(f"  gives {output.name}, the {how} in {output.register}")
    return lines


def _in_order(plan: Plan, program: Program) -> list[Task]:
    """The tasks as they are predicted to start, those of a loop as in its first turn."""
    record = simulate(plan, program.name, 1, micro_batches=ENOUGH).record
    started = [
        (event.start, event.stop, task)
        for number in record.runs.order
        if not record.runs.runs[number].micro
        for task, event in record.firings(number, 0)
    ]
    ordered = [task for *_, task in sorted(started, key=lambda each: each[:2])]
    return sorted(ordered, key=lambda t: (t.phase, t.segment))


def _cut_text(program: Program) -> str:
    count = program.micro_batches
    return f" in {count} micro-batches" if count > 1 else ""


def _under_phases(program: Program, tasks: list[Task], lines: list[str]) -> list[str]:
    """The lines of tasks with a heading before each part of the step."""
    headed: list[str] = []
    before = (-1, -1)
    for task, line in zip(tasks, lines, strict=True):
        if (task.phase, task.segment) != before:
            before = task.phase, task.segment
            turns = f"for each of {program.micro_batches} micro-batches"
            if program.sequence and task.phase % 2:
                turns = f"segment {task.segment}, {turns}"
            headed.append(f"  -- {turns if task.phase % 2 else 'once'} --")
        headed.append(line)
    if program.sequence:
        turns = " ".join(f"{segment}:{micro}" for segment, micro in program.sequence[:24])
        more = " ..." if len(program.sequence) > 24 else ""
        headed.append(f"  segments in turn, with their micro-batch: {turns}{more}")
    return headed


def _title(task: Task) -> str:
    """The task's name, with its op where the name does not tell it."""
    plain = task.name.replace("_", "").lower()
    return task.name if task.op.replace("_", "").lower() in plain else f"{task.name} {task.op}"


def _operands(task: Task, tensors: dict[str, Register], rank: RankPlan, width: int) -> str:
    """`x S(0) 64x64, w B 64x10 -> h S(0) 64x10`, cut where it grows too long for a line."""
    sides = [[_tensor(tensors[n], rank) for n in names] for names in (task.inputs, task.outputs)]
    if task.outputs and all(
        n in task.inputs or tensors[n].aliases in task.inputs for n in task.outputs
    ):
        changed = layout_text(tensors[task.outputs[0]].layout)
        sides[1] = [f"{changed} in place" if task.kind == "collective" else "in place"]
    elif task.outputs == (task.name,):  # no need to say it twice
        sides[1] = [sides[1][0].removeprefix(f"{task.name} ")]
    room = width - 4
    if sum(len(text) + 2 for side in sides for text in side) > room:
        outputs = _cut(sides[1], room // 2)
        sides = [_cut(sides[0], room - sum(len(text) + 2 for text in outputs)), outputs]
    return f"{', '.join(sides[0])} -> {', '.join(sides[1])}".strip()


def _cut(texts: list[str], room: int) -> list[str]:
    kept: list[str] = []
    for text in texts:
        if kept and sum(map(len, kept)) + len(text) + 2 * len(kept) > room - 9:
            return [*kept, f"{len(texts) - len(kept)} more"]
        kept.append(text)
    return kept


def _tensor(tensor: Register, rank: RankPlan) -> str:
    return f"{tensor.name} {layout_text(tensor.layout)} {_shape(rank.shape(tensor))}".strip()


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def table(rows: Sequence[Sequence[str]], heads: Sequence[str] = ()) -> list[str]:
    """Rows in aligned columns; a head that begins with `>` aligns its column to the right."""
    right = [head.startswith(">") for head in heads] or [False] * len(rows[0] if rows else ())
    titled = [[head.lstrip(">") for head in heads]] if heads else []
    lines = [*titled, *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]  # fmt: skip
