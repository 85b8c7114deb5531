"""A simulation as a file for Perfetto (ui.perfetto.dev): Chrome's trace event format, in JSON.

A process for each pipeline stage, or class of ranks, with a thread for each of its streams. A
firing is a complete event ("X"); its times are in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpiflow.plan.records import Task
from mpiflow.plan.simulator import KINDS, Event, Simulation, stream_kind


def write_trace(simulation: Simulation, path: Path) -> int:
    """Write all steps of a simulation; gives the number of firings. The file appears when whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    count = 0
    try:
        with part.open("w", encoding="ascii") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps(named) for named in _names(simulation)))
            for event in _firings(simulation):
                count += 1
                file.write(f",\n{json.dumps(event)}")
            file.write("\n]}\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def _names(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """What processes and threads are called, and their order."""
    runs = simulation.record.runs
    alone = len(runs.lanes) == 1
    for number, lane in enumerate(runs.lanes):
        ranks = f"{lane.ranks} rank{'s' * (lane.ranks != 1)}"
        yield _name("process_name", number, 0, name=ranks if alone else f"{lane.label} ({ranks})")
        yield _name("process_sort_index", number, 0, sort_index=number)
    for number, (owner, stream) in enumerate(runs.streams):
        yield _name("thread_name", owner, number, name=stream)
        place = KINDS.index(stream_kind(stream))
        yield _name("thread_sort_index", owner, number, sort_index=place)


def _name(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _firings(simulation: Simulation) -> Iterator[dict[str, Any]]:
    record = simulation.record
    for step in range(len(simulation.ends)):
        for number in record.runs.order:
            run = record.runs.runs[number]
            for task, event in record.firings(number, step):
                yield _complete(task, event, run.lane, run.stream, run.micro)


def _complete(task: Task, event: Event, process: int, thread: int, micro: int) -> dict[str, Any]:
    args: dict[str, Any] = {"op": task.op, "step": event.step}
    if task.phase % 2:
        args |= {"micro-batch": micro, "segment": task.segment}
    args |= {
        name: value
        for name, value in (
            ("line", task.where), ("axis", task.axis), ("route", task.route),
            ("bytes", task.nbytes), ("flops", task.flops), ("inputs", ", ".join(task.inputs)),
            ("outputs", ", ".join(task.outputs)),
        )
        if value
    }  # fmt: skip
    return {
        "ph": "X",
        "name": task.name,
        "cat": task.kind,
        "pid": process,
        "tid": thread,
        "ts": event.start * 1e6,
        "dur": (event.stop - event.start) * 1e6,
        "args": args,
    }
