"""Traces as files for Perfetto (ui.perfetto.dev): Chrome's trace event format, in JSON.

A process for each pipeline stage, or class of ranks, with a thread for each of its streams. A
firing is a complete event ("X"); its times are in microseconds.

Perfetto takes process 0 for the idle one of the system, and a thread whose number is 0, or that of
its process, for the first thread of that: processes count from 1, threads from where no process is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiflow.plan.records import Task
from mpiflow.plan.simulator import KINDS, Simulation, stream_kind

Event = dict[str, Any]
_FIRST_THREAD = 100_001
"""More than there are ranks."""


@dataclass(frozen=True, slots=True)
class Firing:
    """A task at work, between two times in seconds, and where that is drawn."""

    task: Task
    micro: int
    step: int
    start: float
    stop: float
    process: int
    thread: int

    def place(self) -> Event:
        """Where and when, as an event has it."""
        return {**lane(self.process, self.thread), **times(self.start, self.stop)}


def lane(process: int, thread: int) -> Event:
    """Where an event is drawn: processes, and the threads of each, count from 0."""
    return {"pid": 1 + process, "tid": _FIRST_THREAD + thread}


def times(start: float, stop: float) -> Event:
    """When an event is drawn, by its seconds.

    In whole nanoseconds, as Perfetto counts: it drops what begins one before the last has ended.
    """
    first, last = round(start * 1e9), round(stop * 1e9)
    return {"ts": first / 1e3, "dur": (last - first) / 1e3}


def write_trace(simulation: Simulation, path: Path) -> int:
    """Write all steps of a simulation; gives the number of firings."""
    steps = range(len(simulation.ends))
    firings = (complete(each) for step in steps for each in predicted(simulation, step))
    return write_events(path, [*lane_names(simulation)], firings)


def write_events(path: Path, names: list[Event], events: Iterable[Event]) -> int:
    """Write a file for Perfetto, which appears when it is whole; gives the number of `events`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    count = 0
    try:
        with part.open("w", encoding="ascii") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps(named) for named in names))
            for event in events:
                count += 1
                file.write(f",\n{json.dumps(event)}")
            file.write("\n]}\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def lane_names(simulation: Simulation, title: str = "") -> Iterator[Event]:
    """What processes and threads of a simulation are called, and their order."""
    runs = simulation.record.runs
    alone = len(runs.lanes) == 1
    for number, each in enumerate(runs.lanes):
        ranks = f"{each.ranks} rank{'s' * (each.ranks != 1)}"
        label = ranks if alone else f"{each.label} ({ranks})"
        yield from process_names(number, f"{title}{label}", number)
    for number, (owner, stream) in enumerate(runs.streams):
        yield from thread_names(owner, number, stream)


def process_names(process: int, name: str, place: int) -> Iterator[Event]:
    """What a process is called, and where it stands among the others."""
    where = {"pid": lane(process, 0)["pid"]}
    yield _name("process_name", where, name=name)
    yield _name("process_sort_index", where, sort_index=place)


def thread_names(process: int, thread: int, stream: str) -> Iterator[Event]:
    """The same of a thread, which is a stream."""
    yield _name("thread_name", lane(process, thread), name=stream)
    kind = stream_kind(stream)
    place = KINDS.index(kind) if kind in KINDS else -1
    yield _name("thread_sort_index", lane(process, thread), sort_index=place)


def _name(what: str, where: Event, **args: Any) -> Event:
    return {"ph": "M", "name": what, **where, "args": args}


def predicted(simulation: Simulation, step: int) -> Iterator[Firing]:
    """The firings of a step, in an order in which they may fire; a process is a lane."""
    record = simulation.record
    for number in record.runs.order:
        run = record.runs.runs[number]
        for task, event in record.firings(number, step):
            yield Firing(task, run.micro, step, event.start, event.stop, run.lane, run.stream)


def complete(firing: Firing) -> Event:
    """The event of a firing."""
    task = firing.task
    args: Event = {"op": task.op, "step": firing.step}
    if task.phase % 2:
        args |= {"micro-batch": firing.micro, "segment": task.segment}
    args |= {
        name: value
        for name, value in (
            ("line", task.where), ("axis", task.axis), ("route", task.route),
            ("bytes", task.nbytes), ("flops", task.flops), ("inputs", ", ".join(task.inputs)),
            ("outputs", ", ".join(task.outputs)),
        )
        if value
    }  # fmt: skip
    return {"ph": "X", "name": task.name, "cat": task.kind, **firing.place(), "args": args}
