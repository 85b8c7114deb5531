"""Simulations for people: a step drawn stream by stream, and a table of what it is made of."""

from __future__ import annotations

from math import floor

from mpiflow.plan.outlook import ITEMS, Outlook, Row
from mpiflow.plan.records import COMPUTE
from mpiflow.plan.simulator import Simulation
from mpiflow.plan.text import size_text, table, time_text


def timeline(simulation: Simulation, width: int = 72) -> str:
    """One step drawn as a line for each stream: the last digit of the step at work, `.` idle.

    It is the one in the middle, so that reads ahead for later steps can be seen: simulate a few
    steps more than the reads have slots. Of several stages only what computes is drawn.
    """
    shown = (len(simulation.ends) - 1) // 2
    begin, end = simulation.ends[shown - 1] if shown else 0.0, simulation.ends[shown]
    runs = simulation.record.runs
    several = len(runs.lanes) > 1
    busy = {
        (runs.lanes[lane].label if several else stream): (i, simulation.busy[i][1])
        for i, (lane, stream) in enumerate(runs.streams)
        if stream == COMPUTE or not several
    }
    step = simulation.step_seconds or 1.0
    names = max(map(len, busy), default=0)
    lines = [
        f"program {simulation.program}, step {shown}: {time_text(end - begin)}; "
        f"later steps {time_text(simulation.step_seconds)}",
    ]
    drawn = _drawn(simulation, {stream for stream, _ in busy.values()}, begin, end, width)
    for name, (stream, length) in busy.items():
        share = f"{length / step:4.0%} busy, {time_text(length)}"
        lines.append(f"  {name:<{names}} |{''.join(drawn[stream])}| {share}")
    waits = [f"{time_text(seconds)} for {kind}" for kind, seconds in simulation.exposed if seconds]
    lines.append(f"  compute waits {', '.join(waits) or 'for nothing'}")
    return "\n".join(lines) + "\n"


def _drawn(
    simulation: Simulation, streams: set[int], begin: float, end: float, width: int
) -> dict[int, list[str]]:
    """The cells of some streams, by number."""
    cells = {stream: ["."] * width for stream in streams}
    record = simulation.record
    scale = width / (end - begin) if end > begin else 0.0
    for step in range(len(simulation.ends)) if scale else ():
        for number in record.runs.order:
            stream = record.runs.runs[number].stream
            if stream not in cells:
                continue
            for start, stop in record.times(number, step):
                if stop > begin and start < end:
                    first = max(0, floor((start - begin) * scale + 1e-9))
                    last = min(width, max(first + 1, floor((stop - begin) * scale + 1e-9)))
                    cells[stream][first:last] = str(step % 10) * (last - first)
    return cells


_HEADS = {
    "computing": "computing", "stages": "other stages", "collectives": "collectives",
    "copies": "copies", "input": "input", "writes": "writes", "idle": "idle",
}  # fmt: skip


def step_table(found: Outlook) -> str:
    """What a step is made of, by stage: the seconds that compute works and waits for others.

    They add up to the step. Items of which there is nothing are left out.
    """
    mean = found.mean
    shown = [
        name for name in ITEMS
        if name in ITEMS[:1] or any(dict(row.items)[name] for row in found.rows)
    ]  # fmt: skip
    rows = [*found.rows, mean] if len(found.rows) > 1 else [mean]
    heads = ("", ">ranks", *(f">{_HEADS[name]}" for name in shown), ">step", ">arena")
    lines = [
        "of a step, compute works and waits for:",
        *table([_cells(row, shown) for row in rows], heads),
    ]
    step = found.step or 1.0
    shares = ", ".join(f"{dict(mean.items)[name] / step:.1%} {_HEADS[name]}" for name in shown)
    lines.append(f"  on average {shares}")
    ready = f"{time_text(found.ready)} to initialise, then " if found.ready else ""
    lines.append(f"  the first step is over after {ready}{time_text(found.first)}")
    return "\n".join(lines)


def _cells(row: Row, shown: list[str]) -> tuple[str, ...]:
    items = dict(row.items)
    times = (time_text(items[name]) for name in shown)
    return row.label, str(row.ranks), *times, time_text(row.seconds), size_text(row.arena)
