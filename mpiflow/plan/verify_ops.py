"""Verify: every compute task is an op that is here, unchanged, and fits its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from mpiflow.errors import MpiflowError, PlanError, VerifyError
from mpiflow.graph.op import REGISTRY, Op, build_op
from mpiflow.plan.records import COMPUTE, Plan, Register, Task
from mpiflow.plan.verify_layout import label


def verify_ops(plan: Plan) -> None:
    """VerifyError where a task's op does not exist, or gives other tensors than the plan says.

    PlanError where the code of an op of the user's own is not loaded, or was changed.
    """
    check_user_ops(plan)
    right: set[_Use] = set()
    for program in plan.programs:
        tensors = plan.tensors(program)
        for task in program.tasks:
            if task.kind == COMPUTE and (use := _use(task, tensors)) not in right:
                _check(task, tensors, f"program {program.name}: {label(task)}")
                right.add(use)


def check_user_ops(plan: Plan) -> None:
    """PlanError unless the ops of the user's own are loaded as they were when it was made."""
    absent = [op for op in plan.ops if op.name not in REGISTRY]
    if absent:
        names = ", ".join(op.name for op in absent)
        files = list(dict.fromkeys(op.file for op in absent))
        raise PlanError(
            f"the plan uses ops of the user's own, {names}, which are not loaded: a plan holds no"
            f" code. They were written in {', '.join(files)}; if you trust what is there now, name"
            f" it: {' '.join(f'--ops {file}' for file in files)}"
        )
    for op in plan.ops:
        source = REGISTRY[op.name].source
        if source is None or source.digest != op.digest:
            where = source.file if source else "mpiflow"
            raise PlanError(
                f"op {op.name} in {where} is not the one that the plan was made with (source"
                f" digest {source.digest[:12] if source else 'none'}, in the plan"
                f" {op.digest[:12]}); compile the job again, or restore the file"
            )
    listed = {op.name for op in plan.ops}
    used = {task.op for program in plan.programs for task in program.tasks if task.kind == COMPUTE}
    for name in sorted(used - listed):
        if name in REGISTRY and REGISTRY[name].source:
            raise VerifyError(f"op {name} is of the user's own, but not among the plan's ops")


_Use = tuple[Any, ...]


def _use(task: Task, tensors: Mapping[str, Register]) -> _Use:
    """What a task does with what: equal for those of repeated layers, of which one is checked."""
    sides = (task.inputs, task.outputs)
    kinds = (tuple((tensors[n].shape, tensors[n].dtype) for n in names) for names in sides)
    return task.op, repr(task.attributes), *kinds


def _check(task: Task, tensors: Mapping[str, Register], what: str) -> None:
    inputs, outputs = ([tensors[n] for n in names] for names in (task.inputs, task.outputs))
    try:
        op = build_op(task.op, task.attributes)
        _check_attributes(op, task.attributes)
        shapes = op.infer(tuple(tensor.shape for tensor in inputs))
        dtypes = op.dtypes(tuple(tensor.dtype for tensor in inputs))
    except MpiflowError as error:
        raise VerifyError(f"{what}: {error}") from error
    except Exception as error:
        raise VerifyError(
            f"{what}: {task.op} does not go with its {len(inputs)} inputs and attributes"
            f" {task.attributes}: {type(error).__name__}: {error}"
        ) from error
    given = [f"{tensor.dtype} {tensor.shape}" for tensor in outputs]
    wanted = [f"{dtype} {tuple(shape)}" for dtype, shape in zip(dtypes, shapes, strict=False)]
    if given != wanted:
        raise VerifyError(
            f"{what} gives {', '.join(wanted)}; the plan has {', '.join(given)} for it"
        )


def _check_attributes(op: Op, attributes: Mapping[str, Any]) -> None:
    cls: Any = type(op)
    for name in attributes:
        value, kind = getattr(op, name), _kinds(cls)[name]
        if not _fits(value, kind):
            raise VerifyError(f"{name} is {value!r}, not of {getattr(kind, '__name__', kind)}")


@cache
def _kinds(op: Any) -> dict[str, Any]:
    return get_type_hints(op)


def _fits(value: Any, kind: Any) -> bool:
    """Whether an attribute is of the kind that the op declares."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if not isinstance(value, tuple):
            return False
        if parts[-1:] == (...,):
            return all(_fits(item, parts[0]) for item in value)
        return len(parts) == len(value) and all(map(_fits, value, parts))
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind if kind in (bool, int, str, NoneType) else True
