"""Finds the first task that makes a value which is no finite number, by a look after each task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiflow.exec.bind import Step
from mpiflow.plan import calls as calling
from mpiflow.plan.records import READ, Task
from mpiflow.plan.unroll import folded

Views = dict[str, np.ndarray]
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_AFTER = (calling.KERNEL, calling.WAIT, READ)
"""The calls after which a task's outputs are there."""


class NotFinite(ArithmeticError):
    """A task made nan or infinity; says in which tensor, and how many."""


def checked(step: Step, order: calling.Calls, views: Views) -> Step:
    """The same calls, each of which raises NotFinite if its task's outputs are not finite."""
    calls = tuple(
        _checked(call, task, views) if action in _AFTER and _has_floats(task, views) else call
        for call, (action, task) in zip(step.calls, order, strict=True)
    )
    return Step(calls, step.tasks)


def _has_floats(task: Task, views: Views) -> bool:
    return any(views[name].dtype.name in _FLOATS for name in task.outputs)


def _checked(call: Callable[[], Any], task: Task, views: Views) -> Callable[[], Any]:
    arrays = [(n, views[n]) for n in task.outputs if views[n].dtype.name in _FLOATS]

    def call_and_look() -> Any:
        result = call()
        for name, array in arrays:
            if not np.isfinite(array).all():
                raise NotFinite(_found(task, name, array, views))
        return result

    return call_and_look


def _found(task: Task, name: str, array: np.ndarray, views: Views) -> str:
    """`output x has 3 nan of 96 values`, and what the task was given."""
    nans, wrong = int(np.isnan(array).sum()), int((~np.isfinite(array)).sum())
    counts = [f"{n} {what}" for n, what in ((nans, "nan"), (wrong - nans, "inf")) if n]
    given = "".join(
        f"\n  input {operand.partition('#')[0]}: {_range(views[operand])}"
        for operand in task.inputs
        if operand in views and operand not in task.outputs
    )
    what = name.partition("#")[0]
    said = f"tensor {what}" if what != folded(task) else "its result"
    return f"{said} has {' and '.join(counts)} of {array.size} values{given}"


def _range(array: np.ndarray) -> str:
    if not array.size:
        return "empty"
    return f"{array.dtype} from {array.min():.4g} to {array.max():.4g}"
