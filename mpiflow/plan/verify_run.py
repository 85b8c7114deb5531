"""Verify: a run finds in the plan what it takes for granted.

The other parts prove that each program is sound. A run moreover needs the programs themselves,
data that can be cut into their batches, and a name that is that of a folder; a plan is a file, and
whoever wrote it may have meant something else.
"""

from __future__ import annotations

from typing import Any

from mpiflow.errors import VerifyError
from mpiflow.graph.sbp import B, S, layout_text
from mpiflow.plan.places import arena_names, workspace_space
from mpiflow.plan.records import READ, WRITE, DataSet, Plan, Program, Register, Task

LOSS = "loss"


def verify_run(plan: Plan) -> None:
    """VerifyError where a run of a plan that `verify` accepts would find something amiss."""
    if not plan.job.strip(".") or {"/", "\\", "\0"} & set(plan.job):
        raise VerifyError(f"the plan's job is named {plan.job!r}, which cannot name a folder")
    _check_settings(plan)
    for data in plan.data:
        _check_data(data)
    _check_first(plan)
    for stage in plan.stages():
        _check_programs(stage)
        for program in stage.programs:
            _check_tasks(stage, program)
        _check_arena(stage)
    _check_saving(plan)


def _require(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise VerifyError(f"{what} is {found}, it must be {wanted}")


def _within(what: str, found: int, first: int, last: int | None = None) -> None:
    if found < first or (last is not None and found > last):
        limits = f"{first} or more" if last is None else f"from {first} to {last}"
        raise VerifyError(f"{what} is {found}, it must be {limits}")


def _check_settings(plan: Plan) -> None:
    settings = plan.settings
    _within("epochs", settings.epochs, 1)
    _within("the checkpoints to keep", settings.keep, 1)
    if settings.mode not in ("min", "max"):
        raise VerifyError(f"the mode of the best metric is {settings.mode!r}, not min or max")
    if not plan.data or plan.data[0].name != "train":
        raise VerifyError("the plan's first data set must be 'train'")
    train = plan.data[0]
    _within("the batch of data set train", train.batch, 1, train.rows)
    _require("steps_per_epoch", settings.steps_per_epoch, train.rows // train.batch)
    if settings.best:
        data, _, metric = settings.best.rpartition(".")
        given = {o.name for p in plan.programs if p.data == data for o in p.outputs}
        if metric not in given or data == "train":
            raise VerifyError(f"the best is by {settings.best!r}, which no evaluation gives")


def _check_data(data: DataSet) -> None:
    what = f"of data set {data.name}"
    _within(f"the batch {what}", data.batch, 1)
    _within(f"the number of rows {what}", data.rows, 1)
    _within(f"the number of lanes {what}", data.lanes, 1, data.batch)
    _within(f"the window {what}", data.window, 1)
    for shard in data.shards:
        _within(f"the rows of a chunk of {shard.name}", shard.chunk_rows, 1)
    if data.shards:
        _require(f"the number of rows {what}", data.rows, sum(s.rows for s in data.shards))


def _check_first(plan: Plan) -> None:
    """What is filled are variables, each by one thing."""
    names = [one.variable for one in plan.first.filled]
    unknown = set(names) - {variable.name for variable in plan.variables}
    if unknown or len(set(names)) < len(names):
        raise VerifyError(
            f"the first values fill {min(unknown or names)!r}, no variable or one filled twice"
        )
    if names and not plan.first.path:
        raise VerifyError("the plan has first values, but no file that they come from")


def _check_programs(plan: Plan) -> None:
    """Every program that a run steps is there, for as many rows as it is stepped with."""
    train = plan.program("train")
    if train is None or train.data != "train":
        raise VerifyError("the plan has no program 'train' that reads the data set of that name")
    if LOSS not in {output.name for output in train.outputs}:
        raise VerifyError(f"program train has no output {LOSS!r}")
    for data in plan.data:
        tail = 0 if data.name == "train" else data.rows % data.batch
        wanted = [(False, data.batch)] if data.rows >= data.batch else []
        wanted += [(True, tail)] if tail else []
        programs = [program for program in plan.programs if program.data == data.name]
        if sorted((p.name.endswith("_tail"), p.rows) for p in programs) != wanted:
            found = ", ".join(f"{p.name} of {p.rows} rows" for p in programs) or "nothing"
            raise VerifyError(
                f"data set {data.name} of {data.rows} rows needs a program for each of"
                f" {', '.join(str(rows) for _, rows in wanted)} rows; the plan has {found}"
            )


def _check_tasks(plan: Plan, program: Program) -> None:
    tensors = plan.tensors(program)
    for task in program.tasks:
        if task.axis and not set(task.axis.split(",")) <= set(plan.mesh.names):
            raise VerifyError(
                f"program {program.name}: {task.name} is of axis {task.axis!r}, the mesh is"
                f" {plan.mesh}"
            )
    reads = [task for task in program.tasks if task.stream == READ]
    if len(reads) > 1:
        raise VerifyError(f"program {program.name} has {len(reads)} reads; a run makes one a step")
    for task in reads:
        _check_read(task, program, plan.dataset(program.data), [tensors[n] for n in task.outputs])


def _check_read(task: Task, program: Program, data: DataSet, outputs: list[Register]) -> None:
    """A read gives fields that the data have, the same rows of each."""
    what = f"program {program.name}: {task.name}"
    fields = {field.name: field for field in data.fields}
    names = task.attributes.get("fields")
    if not isinstance(names, list | tuple) or len(names) != len(outputs):
        raise VerifyError(f"{what} gives {len(outputs)} tensors, of the fields {names!r}")
    for name, output in zip(names, outputs, strict=True):
        field = fields.get(name) if isinstance(name, str) else None
        if field is None:
            raise VerifyError(f"{what} reads the field {name!r}; there are {', '.join(fields)}")
        _require(
            f"{what}: field {name}",
            f"{output.dtype} {output.shape}",
            f"{field.dtype} {(program.rows, *field.shape)}",
        )
        if any(isinstance(sbp, S) and sbp.dim for sbp in output.layout):
            raise VerifyError(
                f"{what} gives {output.name} as {layout_text(output.layout)}, but a rank reads"
                " whole rows; hint what is computed from it, not the input itself"
            )
        if output.layout != outputs[0].layout:
            raise VerifyError(
                f"{what} gives {outputs[0].name} as {layout_text(outputs[0].layout)} and"
                f" {output.name} as {layout_text(output.layout)}, but a rank reads the same rows of"
                " all fields; give either all of them an sbp hint, the same one, or none"
            )
    limits = task.attributes.get("limits", [])
    if not isinstance(limits, list | tuple) or not all(type(limit) is int for limit in limits):
        raise VerifyError(f"{what}: limits are {limits!r}, not whole numbers")
    ignored = task.attributes.get("ignored", [])
    if not isinstance(ignored, list | tuple) or not all(
        isinstance(some, list | tuple) and all(type(value) is int for value in some)
        for some in ignored
    ):
        raise VerifyError(f"{what}: ignored values are {ignored!r}, not lists of whole numbers")


def _check_saving(plan: Plan) -> None:
    """The save programs write each variable once, as it is."""
    missing = {variable.name: variable for variable in plan.variables}
    for stage in plan.stages():
        save = stage.program("save")
        if save is None:
            raise VerifyError("the plan has no program 'save'")
        tensors = stage.tensors(save)
        for task in save.tasks:
            if task.stream != WRITE:
                continue
            name = task.attributes.get("variable")
            variable = missing.pop(name, None) if isinstance(name, str) else None
            if variable is None or len(task.inputs) != 1:
                raise VerifyError(f"program save: {task.name} writes {name!r}, no variable or one"
                                  " that is written already")  # fmt: skip
            stored = tensors[task.inputs[0]]
            _require(
                f"program save: what {task.name} writes",
                f"{stored.dtype} {stored.shape}",
                f"{variable.dtype} {variable.shape}",
            )
    if missing:
        raise VerifyError(f"program save does not write variable {min(missing)}")


def _check_arena(plan: Plan) -> None:
    """No arena is larger than what lies in it."""
    tensors = [*plan.variables, *(r for program in plan.programs for r in program.registers)]
    ends: dict[str, list[int]] = {}
    for tensor in tensors:
        ends.setdefault(tensor.space, []).append(tensor.offset + tensor.slots * tensor.nbytes)
    for program in plan.programs:
        for task in program.tasks:
            ends.setdefault(workspace_space(task.route), []).append(sum(task.workspace))
    for name in arena_names(plan.device):
        space = "" if name == plan.device else name
        found = plan.arena(space)
        _require(
            "the size of the arena" + (f" {name!r}" if space else ""),
            found,
            max(ends.get(space, ()), default=0),
        )


def verify_predict(plan: Plan) -> None:
    """VerifyError where predicting by a plan that `verify` accepts would find something amiss."""
    if len(plan.data) != 1:
        raise VerifyError(f"the plan has {len(plan.data)} data sets; predictions are made for one")
    (data,) = plan.data
    _check_data(data)
    _check_first(plan)
    tail = data.rows % data.batch
    wanted = ([data.batch] if data.rows >= data.batch else []) + ([tail] if tail else [])
    owners: dict[str, int] = {}
    for number, stage in enumerate(plan.stages()):
        programs = [program for program in stage.programs if program.data == data.name]
        _require("the rows of the programs", [program.rows for program in programs], wanted)
        given = [_check_rows(stage, program) for program in programs]
        for program, outputs in zip(programs, given, strict=True):
            _check_tasks(stage, program)
            _require(f"what program {program.name} gives for a row", outputs, given[0])
        for output in given[0]:
            if owners.setdefault(output, number) != number:
                raise VerifyError(
                    f"output {output!r} is written by stage {owners[output]} and stage {number}"
                )
        _check_arena(stage)


def _check_rows(plan: Plan, program: Program) -> dict[str, str]:
    """The outputs that a program writes, with dtype and shape of a row."""
    tensors = plan.tensors(program)
    outputs: dict[str, str] = {}
    for task in program.tasks:
        if task.stream != WRITE:
            continue
        name = task.attributes.get("output")
        if not isinstance(name, str) or name in outputs or len(task.inputs) != 1:
            raise VerifyError(f"program {program.name}: {task.name} writes {name!r}, no output or"
                              " one that is written already")  # fmt: skip
        rows = tensors[task.inputs[0]]
        what = f"program {program.name}: output {name}"
        _require(f"the rows of {what}", rows.shape[:1], (program.rows,))
        if any(sbp != B and sbp != S(0) for sbp in rows.layout):
            raise VerifyError(f"{what} is {layout_text(rows.layout)}; a rank writes whole rows")
        outputs[name] = f"{rows.dtype} {rows.shape[1:]}"
    return outputs
