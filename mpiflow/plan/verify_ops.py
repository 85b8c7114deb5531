"""Verify, part five: every compute task is an op that this mpiflow has, and fits its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from mpiflow.errors import MpiflowError, VerifyError
from mpiflow.graph.op import REGISTRY, Op, build_op
from mpiflow.plan.records import COMPUTE, Plan, Register, Task
from mpiflow.plan.verify_layout import label


def verify_ops(plan: Plan) -> None:
    """VerifyError where a task's op does not exist, or gives other tensors than the plan says."""
    for program in plan.programs:
        tensors = plan.tensors(program)
        for task in program.tasks:
            if task.kind == COMPUTE:
                _check(task, tensors, f"program {program.name}: {label(task)}")


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
    for name in attributes:
        value, kind = getattr(op, name), _kinds(op.name)[name]
        if not _fits(value, kind):
            raise VerifyError(f"{name} is {value!r}, not of {getattr(kind, '__name__', kind)}")


@cache
def _kinds(op: str) -> dict[str, Any]:
    return get_type_hints(REGISTRY[op])


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
