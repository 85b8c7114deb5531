"""The folder of a run: what is in it, and from which step a run begins. Rank 0 only.

run/digits/  plan.plan        the plan that runs
             metrics.jsonl    one object a step
             checkpoints/     step-00000040/ ...
             provenance.json  what ran where, with which versions
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiflow import metrics
from mpiflow.errors import CheckpointError
from mpiflow.io import restore, space
from mpiflow.io.dataset import check_files
from mpiflow.plan import store
from mpiflow.plan.records import Plan

if TYPE_CHECKING:
    from mpiflow.train import Options

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
PLAN = "plan.plan"
PROVENANCE = "provenance.json"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: a checkpoint's folder and step, or nothing and 0."""

    checkpoint: str = ""
    step: int = 0
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    remarks: tuple[str, ...] = field(default=())

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def prepare(plan: Plan, options: Options) -> Start:
    """Check data, space and what is there; leave the folder ready for the first step."""
    for data in plan.data:
        check_files(data, options.data)
    remarks = []
    if options.fresh and options.out.exists():
        remarks.append(f"moved the old run to {_move_aside(options.out)}")
    folder = options.out / CHECKPOINTS
    space.make_folder(folder)
    start = _newest(plan, options, folder)
    dropped = metrics.cut(options.out / METRICS, start.step)
    if dropped and start.checkpoint:
        remarks.append(f"dropped {dropped} rows of metrics after step {start.step}")
    space.check_space(folder, space.required_bytes(plan.variables, plan.mesh.size))
    store.save(plan, options.out / PLAN)
    _write_provenance(plan, options.out)
    return Start(**{**start.plain(), "remarks": (*start.remarks, *remarks)})


def _newest(plan: Plan, options: Options, folder: Path) -> Start:
    saved, skipped = restore.newest(folder, deep=True)
    remarks = [f"passed over a checkpoint: {line}" for line in skipped]
    if saved is None:
        if skipped:
            raise CheckpointError(
                f"{folder}: no checkpoint there is complete\n  "
                + "\n  ".join(skipped)
                + "\n  start anew with --fresh"
            )
        return Start()
    differences = restore.require_program(
        saved, plan.identity, store.program_digest(plan), options.accept_changes
    )
    remarks += [f"accepted a change: {line}" for line in differences]
    unused = restore.require_variables(saved, plan.variables)
    remarks += [f"the checkpoint holds {name}, which this plan does not use" for name in unused]
    remarks.append(f"going on after step {saved.step} (written by {saved.ranks} ranks)")
    state = saved.state
    return Start(
        str(saved.path),
        saved.step,
        state.get("best"),
        int(state.get("best_step", 0)),
        int(state.get("since_best", 0)),
        tuple(remarks),
    )


def _move_aside(out: Path) -> Path:
    number = 1
    while (target := out.with_name(f"{out.name}.{number}")).exists():
        number += 1
    os.rename(out, target)
    return target


def _write_provenance(plan: Plan, out: Path) -> None:
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
    }
    path = out / PROVENANCE
    history = json.loads(path.read_text()) if path.exists() else []
    space.write_text(path, json.dumps([*history, entry], indent=1))
