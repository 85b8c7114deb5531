"""Finds the first task that makes a value which is no finite number, by a look after each task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpiflow.exec.bind import Step
from mpiflow.exec.lanes import Finding, KernelLane
from mpiflow.exec.segments import Call, Segment
from mpiflow.plan.records import Task
from mpiflow.plan.unroll import folded

Views = dict[str, np.ndarray]
_FLOATS = ("bfloat16", "float16", "float32", "float64")


class NotFinite(Finding):
    """A task made nan or infinity; says in which tensor, and how many."""


def check_step(step: Step, views: Views) -> None:
    """Let every task of the step raise NotFinite if its outputs are not finite."""
    for lane in step.lanes:
        if isinstance(lane, KernelLane):
            lane.segments = tuple(_checked(segment, views) for segment in lane.segments)
            continue
        for number, item in enumerate(lane.items):
            (task,) = item.tasks
            if _has_floats(task, views):
                lane.after[number] = (_look(task, views), *lane.after[number])


def _checked(segment: Segment, views: Views) -> Segment:
    """The same kernels, each with a look at what it made."""
    calls = tuple(
        _call_and_look(call, _look(task, views)) if _has_floats(task, views) else call
        for task, call in zip(segment.tasks, segment.calls, strict=True)
    )
    return replace(segment, calls=calls)


def _call_and_look(call: Call, look: Call) -> Call:
    def both() -> None:
        call()
        look()

    return both


def _has_floats(task: Task, views: Views) -> bool:
    return any(views[name].dtype.name in _FLOATS for name in task.outputs)


def _look(task: Task, views: Views) -> Call:
    arrays = [(n, views[n]) for n in task.outputs if views[n].dtype.name in _FLOATS]

    def look() -> None:
        for name, array in arrays:
            if not np.isfinite(array).all():
                raise NotFinite(_found(task, name, array, views))

    return look


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
