"""Segments whose thread looks at messages between their kernels."""

import pytest

from mpiflow.exec.segments import Segment, attentive
from mpiflow.plan.records import COMPUTE, Task


def segment(*seconds, calls=1):
    """Kernels predicted to take so long, of so many calls each; what they do is their name."""
    log = []
    tasks = [Task(f"t{i}", COMPUTE, COMPUTE, "Copy", seconds=s) for i, s in enumerate(seconds)]
    made = [
        (task, lambda name=f"{task.name}.{k}": log.append(name))
        for task in tasks
        for k in range(calls)
    ]
    named, called = ([pair[i] for pair in made] for i in range(2))
    return Segment(tuple(called), tuple(named), awaited=True), log


@pytest.mark.parametrize(
    ("seconds", "done"),
    [
        ((1, 1, 1, 1, 1), "t0 t1 t2 look t3 t4"),
        ((3, 0.5, 0.5, 9, 1), "t0 look t1 t2 t3 look t4"),
        ((1, 1, 1), "t0 t1 t2"),  # what comes after is no kernel of it
        ((9,), "t0"),
        ((), ""),
    ],
)
def test_it_looks_after_so_many_seconds_of_kernels_and_before_another(seconds, done):
    plain, log = segment(*seconds)
    watched = attentive(plain, lambda: log.append("look"), 3)
    for call in watched.calls:
        call()
    assert " ".join(name.removesuffix(".0") for name in log) == done
    assert len(watched.tasks) == len(watched.calls)
    assert {task.name for task in watched.tasks} == {task.name for task in plain.tasks}


def test_a_look_belongs_to_the_task_before_it_and_a_task_counts_once():
    plain, log = segment(2, 2, 2, calls=2)
    watched = attentive(plain, lambda: log.append("look"), 3)
    for call in watched.calls:
        call()
    assert log == ["t0.0", "t0.1", "t1.0", "look", "t1.1", "t2.0", "t2.1"]
    assert [task.name for task in watched.tasks] == ["t0", "t0", "t1", "t1", "t1", "t2", "t2"]
