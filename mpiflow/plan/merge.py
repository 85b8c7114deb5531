"""Merge: what ranks recorded of some steps, on one clock, beside what was predicted of them.

The clocks of hosts are aligned with that of rank 0. A step of the prediction, the last one that is
simulated, is drawn where the measured one begins on the first rank; it is left out where the one
before it is not over by then, as only one task of a stream can be drawn at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from mpiflow.errors import DataError
from mpiflow.plan import perfetto
from mpiflow.plan.differences import Difference, differences, most_different
from mpiflow.plan.perfetto import Event, Firing, complete
from mpiflow.plan.records import RECEIVE, SEND, Plan
from mpiflow.plan.simulator import Simulation, simulate
from mpiflow.plan.tracefile import RankTrace

ARRIVED = "arrived"
"""The category of what is drawn of a message, in the slice of the receive that waited for it."""
_NANOSECOND = 1e-9
"""The last one of a slice is still in it."""
Order = list[tuple[str, int]]
"""Tasks and micro-batches as they follow one another."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a rank recorded: its stage, the firings of each step by stream, and each step's span.

    Times are on the clock of rank 0. Firings are in the order in which they began.
    """

    trace: RankTrace
    stage: int
    streams: tuple[str, ...]
    firings: tuple[Firing, ...]
    spans: np.ndarray


@dataclass(frozen=True, slots=True)
class Merged:
    """The steps of some ranks, and the prediction."""

    plan: Plan
    simulation: Simulation
    ranks: tuple[Recorded, ...]

    @property
    def steps(self) -> range:
        """The steps that every rank recorded, counted from 1."""
        first = max(each.trace.first for each in self.ranks)
        return range(first, min(each.trace.first + len(each.spans) for each in self.ranks))

    @property
    def step_seconds(self) -> float:
        """The median over steps and ranks."""
        return median(float(s) for each in self.ranks for s in each.spans[:, 1] - each.spans[:, 0])

    @property
    def hosts(self) -> int:
        """How many hosts the ranks ran on."""
        return len({each.trace.host for each in self.ranks})

    @property
    def uncertainty(self) -> float:
        """Seconds by which times of two hosts may be misaligned."""
        return max(each.trace.clock.uncertainty for each in self.ranks)

    def different(self) -> list[Difference]:
        """The tasks that differ most from the prediction."""
        found = []
        for each in self.ranks:
            program = self.plan.at_stage(each.stage).program(each.trace.program)
            assert program is not None
            found += differences(program, each.trace)
        return most_different(found)

    def out_of_order(self) -> list[str]:
        """Where the tasks of a stream did not follow one another as predicted, in words."""
        expected = {s: _predicted_order(self.simulation, s) for s in range(self.plan.mesh.stages)}
        found = []
        for each in self.ranks:
            for (step, stream), order in _measured_order(each).items():
                wanted = expected[each.stage][stream]
                if order != wanted:
                    found.append(
                        f"rank {each.trace.rank}, step {step}, {stream}: {_first(order, wanted)}"
                    )
        return found


def merged(plan: Plan, digest: str, traces: list[RankTrace]) -> Merged:
    """Traces of the plan that has this digest. DataError where they are not all of it."""
    names = {trace.program for trace in traces}
    for trace in traces:
        if trace.digest != digest or len(names) > 1:
            raise DataError(
                f"the trace of rank {trace.rank} is of plan {trace.digest[:12]}, the run's plan is"
                f" {digest[:12]}; run with --trace again"
            )
    made = Merged(
        plan, simulate(plan, names.pop()), tuple(_recorded(plan, trace) for trace in traces)
    )
    if not made.steps:
        raise DataError("the ranks recorded no step together; run with --trace again")
    return made


def _recorded(plan: Plan, trace: RankTrace) -> Recorded:
    """The firings of a trace with their tasks, on the clock of rank 0."""
    stage, _ = plan.mesh.stage_of(trace.rank)
    program = plan.at_stage(stage).program(trace.program)
    tasks = {task.name: task for task in program.tasks} if program else {}
    if unknown := [name for name, _ in trace.firings if name not in tasks]:
        raise DataError(
            f"the trace of rank {trace.rank} has a task {unknown[0]!r}, not in the plan"
        )
    streams = tuple(dict.fromkeys(tasks[name].stream for name, _ in trace.firings))
    times, spans = trace.clock.aligned(trace.times), trace.clock.aligned(trace.steps)
    found = []
    for row, step in enumerate(range(trace.first, trace.first + len(times))):
        firings = [
            Firing(tasks[name], micro, step, float(start), float(stop), trace.rank,
                   streams.index(tasks[name].stream))
            for (name, micro), (start, stop) in zip(trace.firings, times[row], strict=True)
            if not np.isnan(start + stop)
        ]  # fmt: skip
        found += sorted(firings, key=lambda firing: firing.start)
    return Recorded(trace, stage, streams, tuple(found), spans)


# -- order


def _predicted_order(simulation: Simulation, stage: int) -> dict[str, Order]:
    runs = simulation.record.runs
    last = len(simulation.ends) - 1
    found: dict[str, Order] = {}
    for firing in sorted(perfetto.predicted(simulation, last), key=lambda firing: firing.start):
        if runs.lanes[firing.process].stage == stage:
            order = found.setdefault(runs.streams[firing.thread][1], [])
            order.append((firing.task.name, firing.micro))
    return found


def _measured_order(rank: Recorded) -> dict[tuple[int, str], Order]:
    found: dict[tuple[int, str], Order] = {}
    for firing in rank.firings:
        order = found.setdefault((firing.step, rank.streams[firing.thread]), [])
        order.append((firing.task.name, firing.micro))
    return found


def _first(order: Order, wanted: Order) -> str:
    """Where two orders part."""
    for mine, other in zip(order, wanted, strict=False):
        if mine != other:
            return f"{_named(mine)} ran where {_named(other)} was predicted"
    return f"{len(order)} tasks ran, {len(wanted)} were predicted"


def _named(firing: tuple[str, int]) -> str:
    return f"{firing[0]} of micro-batch {firing[1] + 1}"


# -- the file


def write_merged(found: Merged, path: Path) -> int:
    """Write all of it as a file for Perfetto; gives the number of firings and arrows."""
    lanes = len(found.simulation.lanes)
    names = [*perfetto.lane_names(found.simulation, "predicted: ")]
    for each in found.ranks:
        rank, process = each.trace.rank, lanes + each.trace.rank
        names += perfetto.process_names(process, f"rank {rank} on {each.trace.host}", process)
        names += perfetto.thread_names(process, len(each.streams), "step")
        for number, stream in enumerate(each.streams):
            names += perfetto.thread_names(process, number, stream)
    firings = [*_predictions(found), *_measured(found, lanes)]
    zero = min(firing.start for firing in firings)
    moved = (replace(f, start=f.start - zero, stop=f.stop - zero) for f in firings)
    events = [complete(firing) for firing in moved]
    events += _steps(found, lanes, zero)
    events += _arrows(found, lanes, zero)
    return perfetto.write_events(path, names, events)


def _one_at_a_time(firings: list[Firing]) -> Iterator[Firing]:
    """Firings in time, each of which begins when the one before it on its thread is over."""
    free: dict[tuple[int, int], float] = {}
    for firing in sorted(firings, key=lambda firing: firing.start):
        thread = firing.process, firing.thread
        start = max(firing.start, free.get(thread, firing.start))
        free[thread] = stop = max(firing.stop, start)
        yield replace(firing, start=start, stop=stop)


def _measured(found: Merged, first: int) -> Iterator[Firing]:
    """The firings of all ranks, whose processes are numbered from `first`.

    What was begun while the stream had another transfer under way is drawn after that.
    """
    for each in found.ranks:
        drawn = [replace(firing, process=first + each.trace.rank) for firing in each.firings]
        yield from _one_at_a_time(drawn)


def _predictions(found: Merged) -> Iterator[Firing]:
    simulation = found.simulation
    last = len(simulation.ends) - 1
    begin = simulation.ends[last - 1] if last else 0.0
    firings = list(perfetto.predicted(simulation, last))
    drawn: list[Firing] = []
    over = -np.inf
    for step in found.steps:
        moved = min(each.spans[step - each.trace.first, 0] for each in found.ranks) - begin
        # Steps that follow at once may overlap by a rounding of their times.
        if simulation.ends[last - 1] + moved >= over - 1e-9:
            over = simulation.ends[last] + moved
            drawn += [
                replace(f, step=step, start=f.start + moved, stop=f.stop + moved) for f in firings
            ]
    yield from _one_at_a_time(drawn)


def _steps(found: Merged, first: int, zero: float) -> Iterator[Event]:
    """The steps of each rank, on a thread of their own."""
    for each in found.ranks:
        for step, (begin, end) in enumerate(each.spans - zero, each.trace.first):
            yield {
                "ph": "X", "name": f"step {step}", "cat": "step",
                **perfetto.lane(first + each.trace.rank, len(each.streams)),
                **perfetto.times(begin, end), "args": {"step": step},
            }  # fmt: skip


def _arrows(found: Merged, first: int, zero: float) -> Iterator[Event]:
    """From each send to its receive on another stage, where both ranks are there.

    An arrow goes from the beginning of the one to the end of the other. Clocks of two hosts may be
    so far off that it would go back in time; Perfetto draws none that does. And it takes what
    began first for the sender: a receive that waited has a slice of its own for what arrived.
    """
    sent: dict[tuple[int, int, int, int, int], tuple[int, Firing]] = {}
    drawn = list(_measured(found, first))
    for firing in drawn:
        if firing.task.kind == SEND:
            sent[_message(found.plan, firing, first)] = len(sent), firing
    for firing in drawn:
        if firing.task.kind == RECEIVE and (key := _message(found.plan, firing, first)) in sent:
            number, send = sent[key]
            arrived = max(firing.start, firing.stop - _NANOSECOND)
            if send.start > arrived:
                continue
            if firing.start < send.start:
                yield {
                    "ph": "X", "name": "arrived", "cat": ARRIVED,
                    **perfetto.lane(firing.process, firing.thread),
                    **perfetto.times(arrived - zero, firing.stop - zero),
                }  # fmt: skip
            yield _arrow("s", number, send, send.start - zero)
            yield {**_arrow("f", number, firing, arrived - zero), "bp": "e"}


def _message(plan: Plan, firing: Firing, first: int) -> tuple[int, int, int, int, int]:
    """What a send and its receive have in common: both ranks, message, micro-batch and step."""
    rank, attributes = firing.process - first, firing.task.attributes
    _, place = plan.mesh.stage_of(rank)
    other = plan.mesh.rank_in_stage(attributes["stage"], place)
    source, target = (rank, other) if firing.task.kind == SEND else (other, rank)
    return source, target, attributes["message"], firing.micro, firing.step


def _arrow(kind: str, number: int, firing: Firing, seconds: float) -> Event:
    """One end of an arrow, which is tied to a firing."""
    return {
        "ph": kind, "id": number, "name": "message", "cat": "message",
        **perfetto.lane(firing.process, firing.thread),
        "ts": perfetto.times(seconds, seconds)["ts"],
    }  # fmt: skip
