"""Train: the loop around a session. Data, log, evaluate, checkpoint, signals.

Every rank runs this same loop. What only one rank can know (time, signals, whether a save is
stored everywhere) is agreed by all at fixed steps, so that they always do the same.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpiflow import metrics, runfolder
from mpiflow.errors import TaskError
from mpiflow.evaluations import Best, evaluate
from mpiflow.exec.device import Device
from mpiflow.exec.failure import Failure
from mpiflow.exec.launch import check_ranks
from mpiflow.exec.session import Session
from mpiflow.exec.transport import Transport, on_all_ranks
from mpiflow.exec.watchdog import watching
from mpiflow.io.checkpoint import manifest, read
from mpiflow.io.readers import open_readers
from mpiflow.measured import Measured, last_row
from mpiflow.plan.records import Plan, Program
from mpiflow.report import Progress, final_table, results_text
from mpiflow.runlock import RunLock
from mpiflow.saves import Saves
from mpiflow.threads import describe_threads
from mpiflow.weights import load_first
from mpiflow.window import Window

SKIPPED = "skipped"
"""The output of a step of a job in float16: 1 where loss scaling changed no weight."""
STOPPED = 75
"""Exit code of a run that was asked to stop, and saved: EX_TEMPFAIL, "try again"."""
_AGREE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a plan. `steps` replaces the plan's epochs; `trace` says which to trace.

    A run that stands still for `stall` seconds ends; None is as long as its own pace says, 0 never.
    With `check_finite` the first task that makes a value which is no finite number ends it.
    """

    out: Path
    data: Path
    fresh: bool = False
    steps: int | None = None
    accept_changes: bool = False
    trace: Window | None = None
    stall: float | None = None
    check_finite: bool = False


def run(
    plan: Plan,
    transport: Transport,
    failure: Failure,
    options: Options,
    device: Device | None = None,
) -> int:
    """Collective. Train, evaluate and save as the plan says; gives the exit code."""
    check_ranks(transport, plan.mesh.size)
    with RunLock() as lock:
        start = runfolder.Start(
            **transport.on_root(lambda: runfolder.prepare(plan, options, lock).plain())
        )
        if not start.complete:
            return _train(plan, transport, failure, options, start, device)
    if transport.rank == 0:
        Progress(0, 0, 0).say(_nothing_to_train(start.step, plan, options))
    return 0


def _train(
    plan: Plan,
    transport: Transport,
    failure: Failure,
    options: Options,
    start: runfolder.Start,
    device: Device | None,
) -> int:
    failure.use_folder(options.out)
    watched = watching(transport, failure, plan, options.out, options.stall)
    with _signals() as stop, watched as watch:
        readers = open_readers(plan, transport.rank, options.data)
        session = Session(
            plan,
            transport,
            readers,
            start_thread=failure.start_thread,
            device=device,
            check_finite=options.check_finite,
        )
        watch(session)
        code = _Loop(plan, transport, session, options, start, stop).run()
        session.close()
        for reader in readers.values():
            reader.close()
        # Rank 0 has more to store and to print; one that has left is not watched any more.
        transport.barrier().wait(transport.check)
    return code


def _nothing_to_train(step: int, plan: Plan, options: Options) -> str:
    total = runfolder.last_step(plan, options.steps)
    early = "" if step >= total else ", stopped early"
    return (
        f"nothing to train: the run in {options.out} is at step {step} of {total}{early};"
        " go on with --steps N, or begin anew with --fresh"
    )


@dataclass
class _Stop:
    """Whether this rank, or the run, was asked to stop."""

    asked: bool = False


@dataclass
class _Loop:
    plan: Plan
    transport: Transport
    session: Session
    options: Options
    start: runfolder.Start
    stop: _Stop
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    _sent: int = 0

    def __post_init__(self) -> None:
        self.per_epoch = self.plan.settings.steps_per_epoch
        self.total = runfolder.last_step(self.plan, self.options.steps)
        self.step = self.start.step
        settings, begun = self.plan.settings, self.start
        self.best = Best(
            settings.best, settings.mode, begun.best, begun.best_step, begun.since_best
        )
        self.root = self.transport.rank == 0
        self.rows: metrics.Metrics | None = None
        train = self.plan.program("train")
        assert train is not None
        self.train: Program = train
        self.agreed, self.next_agreement = (time.monotonic(), self.step), self.step + 1
        steps, out = range(self.step, self.total), self.options.out
        self.measured = Measured(
            self.plan, self.transport, self.session, out, steps, self.options.trace
        )

    # -- the loop

    def run(self) -> int:
        """Collective. Train to the end, or until asked to stop; gives the exit code."""
        try:
            return self._run()
        finally:
            if self.rows:
                self.rows.close()

    def _run(self) -> int:
        self._initialise()
        self.rows = metrics.Metrics(self.options.out / runfolder.METRICS) if self.root else None
        self.progress = Progress(self.step, self.total, self.train.rows) if self.root else None
        self._say_start()
        saved, out = self.step if self.start.checkpoint else -1, self.options.out
        self.saves = Saves(self.plan, self.transport, self.session, out, self.best, saved)
        stopped = self._steps()
        self.stop.asked |= stopped  # on every rank, whichever was asked
        if not stopped and self.plan.settings.evaluate_epochs + self.plan.settings.evaluate_steps:
            self._evaluate_all(again=False)
        if self.saves.saved != self.step:
            self._save()
        self.saves.finish()
        if self.progress:
            self.progress.close()
        self._summarise(stopped)
        return STOPPED if stopped else 0

    def _steps(self) -> bool:
        """Run the steps that are left; whether the run was asked to stop."""
        if self.start.over:
            return False
        settings = self.plan.settings
        self.session.expect("train", range(self.step, self.total))
        while self.step < self.total:
            self._train_step()
            improved = self._evaluate_due()
            if improved or self._due(settings.save_steps, settings.save_epochs):
                self._save()
            if self.step >= self.next_agreement and self._agree():
                self.session.forget("train")
                return True
            if settings.patience and self.best.since >= settings.patience:
                self._say(f"stopping early: {settings.patience} evaluations without a better one")
                self.session.forget("train")
                break
        return False

    def _initialise(self) -> None:
        if self.start.checkpoint:
            saved = manifest.load(Path(self.start.checkpoint), look=False)
            boxes = self.session.boxes()
            with read.CheckpointReader(saved) as reader, self.session.filling() as arrays:
                for name, array in arrays.items():
                    reader.restore(name, boxes[name], array)
        else:
            self.session.run("initialise")
            if self.plan.first.path:
                with self.session.filling() as arrays:
                    load_first(self.plan.first, self.options.data, self.session.boxes(), arrays)

    def _train_step(self) -> None:
        self.measured.before(self.step)
        before = self.session.sent
        began = time.perf_counter()
        outputs = self.session.run("train", self.step)
        seconds = time.perf_counter() - began
        self._sent += self.session.sent - before
        if said := self.measured.after(self.step, seconds):
            self._say(said)
        epoch = self.step // self.per_epoch + 1
        self.step += 1
        loss = outputs["loss"]
        if not math.isfinite(loss) and not outputs.get(SKIPPED):
            raise on_all_ranks(
                TaskError(
                    f"step {self.step}: the loss is {loss}; nothing of this step is saved. Lower"
                    " the learning rate, or look at the rows of this step; run with --check-finite"
                    " to see which task made it"
                )
            )
        if self.rows and self.progress:
            # JSON has no infinity; a step that loss scaling skipped may have given one.
            values = {k: v if math.isfinite(v) else None for k, v in outputs.items()}
            self.rows.add({"step": self.step, "epoch": epoch, **values, "seconds": seconds})
            self.progress.step(self.step, epoch, loss)

    @property
    def epoch(self) -> int:
        """The epoch of the last step, from 1."""
        return max(self.step - 1, 0) // self.per_epoch + 1

    def _due(self, steps: int, epochs: int) -> bool:
        return bool(steps and self.step % steps == 0) or bool(
            epochs and self.step % (epochs * self.per_epoch) == 0
        )

    # -- evaluation

    def _evaluate_due(self) -> bool:
        """Evaluate if it is time; whether the result is the best so far."""
        settings = self.plan.settings
        if self._due(settings.evaluate_steps, settings.evaluate_epochs):
            return self._evaluate_all(again=True)
        return False

    def _evaluate_all(self, *, again: bool) -> bool:
        improved = False
        for data in self.plan.data[1:]:
            done = self.results.get(data.name)
            if not again and done and done["step"] == self.step:
                continue
            row = {
                "evaluation": data.name, "step": self.step, "epoch": self.epoch, "rows": data.rows,
                **evaluate(self.plan, self.session, data.name),
            }  # fmt: skip
            self.results[data.name] = row
            if self.rows:
                self.rows.add(row)
                text = results_text(row)
                self._say(f"{data.name} after step {self.step}: {text} ({row['rows']:,} rows)")
            improved |= self.best.update(row)
        return improved

    # -- saving

    def _save(self) -> None:
        """Collective. Begin a checkpoint; soon after, ask all ranks whether it is stored."""
        if self.rows:
            self.rows.sync()
        self.saves.begin(self.step, self.epoch)
        self.next_agreement = self.step + 1

    def _agree(self) -> bool:
        """Collective. Exchange what ranks know by themselves; whether to stop."""
        minutes = self.plan.settings.save_minutes
        now, (before, step) = time.monotonic(), self.agreed
        late = bool(minutes) and now - self.saves.clock > 60 * minutes
        pace = (now - before) / max(self.step - step, 1)
        mine = [self.stop.asked, late and self.root, self.session.writes.idle, pace]
        stop, save, stored, paces = zip(
            *(json.loads(d) for d in self.transport.all_gather(json.dumps(mine).encode())),
            strict=True,
        )
        if self.saves.under_way is not None and all(stored):
            self.saves.commit()
        # Often enough for a signal to be heeded within about a second, on the slowest rank.
        self.agreed = now, self.step
        pause = max(1, round(_AGREE_SECONDS / max(paces)))
        # After a save at every step, for about a second, as most are stored by then.
        under_way = self.saves.under_way
        soon = under_way is not None and self.step < under_way + pause
        self.next_agreement = self.step + (1 if soon else pause)
        if any(save):
            self._save()
        return any(stop)

    # -- telling

    def _say(self, text: str) -> None:
        if self.progress:
            self.progress.say(text)

    def _say_start(self) -> None:
        how = filter(None, (describe_threads(os.environ), self.session.remark))
        for line in (*how, *self.plan.notes, *self.start.remarks):
            self._say(line)
        if self.start.over:
            self._say(_nothing_to_train(self.step, self.plan, self.options))

    def _summarise(self, stopped: bool) -> None:
        """Collective. The last object of the metrics, and the table."""
        if said := self.measured.finish():
            self._say(said)
        peak = self.session.device.process_bytes() - self.session.transport.seen_bytes()
        steps = self.step - self.start.step
        sent = self._sent // steps if steps else 0
        arenas = self.session.arenas
        mine = [[arena.peak for arena in arenas.values()], peak, sent, self.measured.figures()]
        everyone = [json.loads(d) for d in self.transport.all_gather(json.dumps(mine).encode())]
        if self.rows is None:
            return
        last = last_row(self.plan, tuple(arenas), everyone, any_steps=bool(steps))
        self.rows.add(last)
        if stopped:
            self._say(f"stopped as asked after step {self.step}; run again to go on")
        sys.stdout.write(final_table(self.results, last) + "\n")
        sys.stdout.flush()


@contextmanager
def _signals() -> Iterator[_Stop]:
    """SIGTERM and SIGUSR1 ask the run to save and stop, as soon as it has begun."""
    stop = _Stop()

    def ask(number: int, frame: object) -> None:
        stop.asked = True

    kinds = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(kind, ask) for kind in kinds]
    try:
        yield stop
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            # A rank that was asked ends with a code of its own. srun --kill-on-bad-exit signals
            # the ranks that take longer to end; that must not turn their code into "killed".
            signal.signal(kind, signal.SIG_IGN if stop.asked else handler)
