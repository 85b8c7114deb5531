"""The folder of a run: what is in it, and from which step a run begins. Rank 0 only.

run/digits/  plan.plan        the plan that runs
             metrics.jsonl    one object a step
             checkpoints/     step-00000040/ ...
             provenance.json  what ran where, with which versions
             failure.txt      what ended the last attempt, where something did
             .lock            held by the run that is at work here
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiflow import metrics
from mpiflow.errors import CheckpointError
from mpiflow.io.checkpoint import read, records, space
from mpiflow.io.dataset import check_files
from mpiflow.plan import store
from mpiflow.plan.records import Plan
from mpiflow.runlock import RunLock
from mpiflow.weights import check_first

if TYPE_CHECKING:
    from mpiflow.train import Options

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
PLAN = "plan.plan"
PROVENANCE = "provenance.json"
FAILURE = "failure.txt"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: a checkpoint's folder and step, or nothing and 0.

    `over` says that the run has reached its end, `complete` that its metrics say so too.
    """

    checkpoint: str = ""
    step: int = 0
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    over: bool = False
    complete: bool = False
    remarks: tuple[str, ...] = field(default=())

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def last_step(plan: Plan, steps: int | None) -> int:
    """The step at which training ends: `steps`, or the end of the plan's epochs."""
    return steps or plan.settings.epochs * plan.settings.steps_per_epoch


def prepare(plan: Plan, options: Options, lock: RunLock) -> Start:
    """Check data, space and what is there; leave the folder ready for the first step.

    A run that is over and complete is left as it is. `lock` keeps other runs out of the folder.
    """
    for data in plan.data:
        check_files(data, options.data)
    if plan.first.path and options.fresh:
        check_first(plan.first, options.data)  # before the old run is moved aside
    try:
        return _prepare_folder(plan, options, lock)
    except OSError as problem:
        raise CheckpointError(
            f"{options.out}: the run's folder cannot be used: {problem.strerror}"
            f" ({problem.filename}); name another one with --out"
        ) from problem


def _prepare_folder(plan: Plan, options: Options, lock: RunLock) -> Start:
    remarks = []
    if options.fresh and options.out.exists():
        lock.take(options.out)
        remarks.append(f"moved the old run to {_move_aside(options.out)}")
    folder = options.out / CHECKPOINTS
    space.make_folder(folder)
    lock.take(options.out)
    start = _newest(plan, options, folder)
    if start.complete:
        return start
    if plan.first.path and not start.checkpoint:
        check_first(plan.first, options.data)
    # The evaluations at the end of a run that is over are made again.
    dropped = metrics.cut(options.out / METRICS, start.step, evaluations=not start.over)
    if dropped:
        remarks.append(f"dropped the metrics of {dropped} steps after step {start.step}")
    space.check_space(folder, space.required_bytes(plan.distinct_variables(), plan.mesh.size))
    store.save(plan, options.out / PLAN)
    remarks += _write_provenance(plan, options.out)
    with suppress(FileNotFoundError):
        (options.out / FAILURE).unlink()
    return replace(start, remarks=(*start.remarks, *remarks))


def _newest(plan: Plan, options: Options, folder: Path) -> Start:
    saved, skipped = read.newest(folder, deep=True)
    remarks = [f"passed over a checkpoint: {line}" for line in skipped]
    if saved is None:
        never = (records.PARTIAL, records.REMOVED)
        if any(suffix not in never for _, suffix, _ in records.scan(folder)):
            raise CheckpointError(
                f"{folder}: no checkpoint there is complete\n  "
                + "\n  ".join(skipped)
                + "\n  start anew with --fresh"
            )
        if skipped:
            remarks.append("no checkpoint was complete before: beginning at step 1")
        return Start(remarks=tuple(remarks))
    differences = read.require_program(
        saved, plan.identity, store.program_digest(plan), options.accept_changes
    )
    remarks += [f"accepted a change: {line}" for line in differences]
    unused = read.require_variables(saved, plan.distinct_variables())
    remarks += [f"the checkpoint holds {name}, which this plan does not use" for name in unused]
    remarks.append(f"going on after step {saved.step} (written by {saved.ranks} ranks)")
    state = saved.state
    since_best, patience = int(state.get("since_best", 0)), plan.settings.patience
    over = saved.step >= last_step(plan, options.steps) or bool(patience and since_best >= patience)
    return Start(
        str(saved.path),
        saved.step,
        state.get("best"),
        int(state.get("best_step", 0)),
        since_best,
        over,
        over
        and saved.digest == store.digest(plan)
        and metrics.ended(options.out / METRICS, saved.step),
        tuple(remarks),
    )


def _move_aside(out: Path) -> Path:
    number = 1
    while (target := out.with_name(f"{out.name}.{number}")).exists():
        number += 1
    os.rename(out, target)
    return target


def _write_provenance(plan: Plan, out: Path) -> list[str]:
    """Add this start to the history; gives a remark where that was damaged."""
    entry = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "host": platform.node(),
        "python": platform.python_version(),
        "mpiflow": plan.version,
        "numpy": plan.numpy,
        "ranks": plan.mesh.size,
        "digest": store.digest(plan),
        "program": store.program_digest(plan),
        **({"init": [plan.first.path, plan.first.digest]} if plan.first.path else {}),
    }
    path = out / PROVENANCE
    history, remarks = [], []
    if path.exists():
        try:
            history = list(json.loads(path.read_text(errors="replace")))
        except (ValueError, TypeError):
            remarks.append(f"{path} was damaged; it begins anew")
    space.write_text(path, json.dumps([*history, entry], indent=1))
    return remarks
