"""What a run measures of its own steps: where their time goes, what tasks take, and a trace.

Every step is metered. The kernels of a few steps look at the clock: the 5th to the 8th of the run,
or those of `--trace`, which are kept in the run's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpiflow.errors import DataError, UsageError
from mpiflow.exec.clocks import Clocks
from mpiflow.exec.meter import ITEMS, Meter
from mpiflow.exec.session import Session
from mpiflow.exec.transport import Transport, on_all_ranks
from mpiflow.plan import store, tracefile
from mpiflow.plan.differences import Difference, differences, most_different
from mpiflow.plan.outlook import Row, outlook
from mpiflow.plan.places import arena_name
from mpiflow.plan.records import Plan, Program
from mpiflow.plan.simulator import simulate
from mpiflow.plan.tracefile import SAME, Clock, RankTrace
from mpiflow.plan.traffic import most_sent
from mpiflow.window import Window, window

_MOST_BYTES = 256 << 20


def firings_of(program: Program) -> int:
    """How many tasks fire in a step of a rank."""
    return sum(program.micro_batches if task.phase % 2 else 1 for task in program.tasks)


class Measured:
    """Collective. Watches the training steps of a session, of a run from `begin` to `total`.

    `folder` is that of the run; a trace goes there where `asked` says which steps.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        session: Session,
        folder: Path,
        steps: range,
        asked: Window | None,
    ) -> None:
        self.meter = Meter()
        try:
            self.steps = window(asked, steps.start, steps.stop)
        except UsageError as error:
            raise on_all_ranks(error) from None
        self._plan, self._transport = plan, transport
        self._traces = asked is not None and bool(self.steps)
        self._folder = folder / tracefile.FOLDER
        if self._traces:
            self._check_memory(asked)
            transport.on_root(self._clear)
            self._clocks = Clocks(transport)
        self._before = SAME.before
        stage, _ = plan.mesh.stage_of(transport.rank)
        program = plan.at_stage(stage).program("train")
        assert program is not None
        self._program = program
        self.recorder = session.observe("train", self.meter, self.steps)

    def _check_memory(self, asked: Window | None) -> None:
        """A trace is kept in memory, of a bounded size, until its last step."""
        bytes_each = max(firings_of(p) for p in self._plan.programs if p.name == "train") * 16
        most = max(_MOST_BYTES // bytes_each, 1)
        if len(self.steps) > most:
            raise on_all_ranks(
                UsageError(
                    f"{asked}: {len(self.steps)} steps of {bytes_each // 16:,} tasks are too many"
                    f" to keep; trace {most:,} steps at most"
                )
            )

    def _clear(self) -> None:
        for path in tracefile.recorded_ranks(self._folder).values():
            path.unlink()

    def before(self, step: int) -> None:
        """Collective. A step, counted from 0, is about to begin."""
        if self._traces and step == self.steps.start:
            self._before = self._clocks.compare()

    def after(self, step: int, seconds: float) -> str:
        """Collective. It took so long. Gives what to say of it, where a trace is complete."""
        self.meter.step(seconds)
        return self.finish() if step + 1 == self.steps.stop else ""

    def finish(self) -> str:
        """Collective. Write what is recorded, unless that is done; gives what to say of it."""
        if not self._traces:
            return ""
        self._traces = False
        if not self.recorder.recorded:
            return f"nothing is traced: step {self.steps.start + 1} was not run"
        clock = Clock(self._before, self._clocks.compare())
        try:
            self._taken(clock).save(self._folder)
        except OSError as problem:
            raise DataError(
                f"{self._folder}: the trace of {self._transport.name} cannot be written:"
                f" {problem.strerror}"
            ) from problem
        first, count = self.steps.start + 1, self.recorder.recorded
        return (
            f"traced the steps {first} to {first + count - 1}: `mpiflow trace"
            f" {self._folder.parent}` makes a file for Perfetto of them"
        )

    def _taken(self, clock: Clock = SAME) -> RankTrace:
        """What is recorded so far."""
        digest = store.digest(self._plan)
        return self.recorder.taken(self._transport.rank, self._transport.host, digest, clock)

    def figures(self) -> dict[str, Any]:
        """What this rank has to say: its median step by item, and the tasks that differ most."""
        found = differences(self._program, self._taken())
        tasks = [each.plain() for each in most_different(found)]
        return {"items": self.meter.typical(), "tasks": tasks}


def last_row(
    plan: Plan, spaces: tuple[str, ...], everyone: list[list[Any]], *, any_steps: bool
) -> dict[str, Any]:
    """The last object of a run's metrics: what ranks needed and measured, beside the prediction.

    Of each rank, `everyone` has the peaks of the arenas of these spaces, the bytes of the process,
    those sent in a step, and its figures.
    """
    peaks, processes, sends, figures = zip(*everyone, strict=True)
    names = (arena_name(plan.device, space) for space in spaces)
    last: dict[str, Any] = {
        "peak_bytes": dict(zip(names, map(max, zip(*peaks, strict=True)), strict=True)),
        "process_bytes": max(processes),
    }
    predicted: dict[str, Any] = {
        "peak_bytes": dict(plan.arenas),
        "process_bytes": plan.process_bytes,
    }
    if any_steps:
        measured, foreseen = joined(plan, list(figures))
        last |= {"bytes_sent": max(sends), **measured}
        predicted |= {"bytes_sent": most_sent(plan, "train"), **foreseen}
    return {**last, "predicted": predicted}


def joined(plan: Plan, figures: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all ranks measured of a step, as the last object of the metrics has it; the prediction.

    `items` are means over ranks, and `slowest` is the rank that computes longest.
    """
    ranks = [each["items"] for each in figures]
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank]["compute"])
    tasks = [Difference(**task) for each in figures for task in each["tasks"]]
    mean = {name: sum(items[name] for items in ranks) / len(ranks) for name in ITEMS}
    measured = {
        "ranks": len(ranks),
        "step_seconds": sum(mean.values()),
        "items": mean,
        "slowest": {"rank": slowest, "items": ranks[slowest]},
        "tasks": [each.plain() for each in most_different(tasks)],
    }
    train = plan.program("train")
    assert train is not None
    return measured, {"step_seconds": train.seconds, "items": _predicted(plan, train.seconds)}


def _predicted(plan: Plan, seconds: float) -> dict[str, float]:
    """The items of the prediction; they add up to the seconds that the plan states."""
    row: Row = outlook(plan, simulate(plan, "train")).mean
    items = dict(row.items)
    scale = seconds / row.seconds if row.seconds else 1.0
    return {
        "compute": scale * items["computing"],
        "communication": scale * items["collectives"],
        "copies": scale * items["copies"],
        "input": scale * items["input"],
        "stages": scale * items["stages"],
        "overhead": scale * (items["writes"] + items["idle"]),
    }
