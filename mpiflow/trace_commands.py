"""What `mpiflow trace` does; its docstring is its help.

As in `commands`, it imports what it needs when it runs.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from mpiflow.errors import UsageError
from mpiflow.version import __version__

if TYPE_CHECKING:
    from mpiflow.plan.merge import Merged

_LISTED = 5


def trace(options: Namespace) -> None:
    """Make one file for Perfetto of what the ranks of a run recorded, beside the prediction.

    The run was started with --trace. Clocks of hosts are aligned, and what was predicted of a step
    is drawn where the measured one begins.
    """
    from mpiflow.plan import store, tracefile
    from mpiflow.plan.merge import merged, write_merged

    if options.output and Path(options.output).is_dir():
        raise UsageError(f"-o {options.output}: a folder; name the file in it")
    folder = Path(options.run)
    files = _chosen(options, tracefile.recorded_ranks(folder / tracefile.FOLDER))
    plan_file = folder / "plan.plan"
    if not plan_file.is_file():
        raise UsageError(f"{folder}: no plan.plan there; name the folder of a run, as run/digits")
    plan = store.load(plan_file, version=__version__)
    found = merged(plan, store.digest(plan), [tracefile.load(path) for path in files.values()])
    output = Path(options.output or folder / "trace.json")
    events = write_merged(found, output)
    missing = [] if options.ranks else sorted(set(range(plan.mesh.size)) - set(files))
    if options.json:
        options.answer = _plain(found, events, output, missing)
        return
    print(_summary(found, missing))
    print(f"wrote {output} ({events:,} events); open it at https://ui.perfetto.dev")


def _chosen(options: Namespace, files: dict[int, Path]) -> dict[int, Path]:
    """The files of the ranks that are asked for."""
    from mpiflow.window import parse_numbers

    if not files:
        raise UsageError(
            f"{options.run}: no traces there; start the run with `mpiflow run ... --trace`"
        )
    if not options.ranks:
        return files
    wanted = parse_numbers(options.ranks, "--ranks")
    if absent := [rank for rank in wanted if rank not in files]:
        raise UsageError(
            f"--ranks {options.ranks}: rank {absent[0]} has no trace; those from {min(files)} to"
            f" {max(files)} have"
        )
    return {rank: files[rank] for rank in wanted}


def _summary(found: Merged, missing: list[int]) -> str:
    from mpiflow.plan.text import time_text
    from mpiflow.report import different_tasks

    steps, ranks = found.steps, len(found.ranks)
    lines = [
        f"{ranks} rank{'s' * (ranks != 1)}, steps {steps[0]} to {steps[-1]}: predicted"
        f" {time_text(found.simulation.step_seconds)} a step, measured"
        f" {time_text(found.step_seconds)} (median)"
    ]
    if missing:
        listed = ", ".join(map(str, missing[:_LISTED])) + ", ..." * (len(missing) > _LISTED)
        lines.append(f"{len(missing)} ranks have no trace: {listed}")
    lines.append(
        "clocks: all ranks were on one host"
        if found.hosts == 1
        else f"clocks: {found.hosts} hosts, aligned to within {time_text(found.uncertainty)}"
    )
    streams = sum(len(each.streams) for each in found.ranks)
    wrong = found.out_of_order()
    if wrong:
        lines.append(f"order: otherwise than predicted {len(wrong)} times, first:")
        lines += [f"  {line}" for line in wrong[:_LISTED]]
    else:
        lines.append(f"order: as predicted, on all {streams} streams in every step")
    tasks = [each.plain() for each in found.different()]
    return "\n".join([*lines, *different_tasks(tasks)])


def _plain(found: Merged, events: int, output: Path, missing: list[int]) -> dict[str, object]:
    return {
        "file": str(output),
        "events": events,
        "ranks": [each.trace.rank for each in found.ranks],
        "missing": missing,
        "steps": [found.steps[0], found.steps[-1]],
        "step_seconds": found.step_seconds,
        "predicted": {"step_seconds": found.simulation.step_seconds},
        "clocks": {"hosts": found.hosts, "uncertainty_seconds": found.uncertainty},
        "out_of_order": found.out_of_order(),
        "tasks": [each.plain() for each in found.different()],
    }
