"""Registers: whose memory they use, and which of them outlive a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpiflow.plan.places import AHEAD
from mpiflow.plan.records import WRITE, Register, Task


def holder(name: str, registers: Mapping[str, Register]) -> str:
    """The register whose memory one uses: its own, or that of the last one it aliases in turn."""
    while registers[name].aliases in registers:
        name = registers[name].aliases
    return name


def outliving(tasks: Iterable[Task]) -> dict[str, Task]:
    """What is read ahead of a step or stored behind it, and the task that does."""
    found: dict[str, Task] = {}
    for task in tasks:
        ahead, behind = task.stream in AHEAD, task.stream == WRITE
        names = task.outputs if ahead else task.inputs if behind else ()
        found |= dict.fromkeys(names, task)
    return found
