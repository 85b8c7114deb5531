"""Saves: the checkpoints of a run, written beside its steps."""

from __future__ import annotations

import time
from pathlib import Path

from mpiflow import runfolder
from mpiflow.evaluations import Best
from mpiflow.exec.session import Session
from mpiflow.exec.transport import Transport
from mpiflow.io.checkpoint import write
from mpiflow.plan import store
from mpiflow.plan.records import Plan


class Saves:
    """Begins a checkpoint after a step, and makes it complete once every rank has stored its part.

    `saved` is the step of the last that was begun (-1: none), `under_way` that of one which is not
    complete yet, `clock` when that was or the run began. The best step's is kept.
    """

    def __init__(
        self, plan: Plan, transport: Transport, session: Session, out: Path, best: Best, saved: int
    ) -> None:
        self.plan, self.transport, self.session, self.best = plan, transport, session, best
        self.folder = out / runfolder.CHECKPOINTS
        self.digests = store.digest(plan), store.program_digest(plan)
        self.saved, self.clock = saved, time.monotonic()
        self.under_way: int | None = None

    def begin(self, step: int, epoch: int) -> None:
        """Collective. Snapshot now; the files are written beside the next steps."""
        self.finish()
        self.transport.on_root(lambda: write.prepare(self.folder, step))
        writer = write.CheckpointWriter(self.folder, step, self.transport.rank, self.transport.host)
        digest, program = self.digests
        self._header = write.header(
            self.plan,
            digest=digest,
            program=program,
            step=step,
            epoch=epoch,
            state=self.best.state(),
        )
        self.session.save(writer)
        self.under_way = self.saved = step
        self.clock = time.monotonic()

    def finish(self) -> None:
        """Collective. Wait until every rank has stored its part; make the checkpoint complete."""
        if self.under_way is None:
            return
        self.session.writes.wait()
        self.transport.barrier().wait(self.transport.check)
        self.commit()

    def commit(self) -> None:
        """Collective. Make the checkpoint complete, which every rank has stored its part of."""
        protect = (self.best.step,) if self.best.step else ()

        def commit() -> None:
            write.commit(self.folder, self._header, self.plan.mesh.size)
            write.prune(self.folder, self.plan.settings.keep, protect)

        self.transport.on_root(commit)
        self.under_way = None
