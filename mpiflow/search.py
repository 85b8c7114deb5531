"""Search: how a job runs fastest on so many ranks, as `mpiflow plan --search` says it."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mpiflow.compiler.arrange import Target
from mpiflow.compiler.blocks import find_blocks
from mpiflow.compiler.candidates import Candidate, Space
from mpiflow.compiler.driver import training_graph
from mpiflow.compiler.estimate import Estimator
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.pipeline import ONE_FORWARD_ONE_BACKWARD, Pipeline
from mpiflow.compiler.recompute import check_recompute
from mpiflow.compiler.search import PLANS, Found, Planned, Progress, search
from mpiflow.compiler.zero import check_level
from mpiflow.errors import UsageError
from mpiflow.graph.graph import Graph
from mpiflow.graph.mesh import Mesh
from mpiflow.job import Job
from mpiflow.plan.records import Plan
from mpiflow.plan.simulator import Simulation, simulate
from mpiflow.plan.text import size_text, table, time_text
from mpiflow.planning import (
    choose_mesh,
    inspect_all,
    machine_notes,
    make_plan,
    parse_memory,
    pipeline_of,
)

_SHOWN = 5
"""The plans that are shown."""
_EXAMPLES = 3
"""Of what could not be, as many are named."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says; None is to be searched. `memory` 0 is no limit."""

    ranks: int | None
    mesh: str | None
    micro_batches: int | None
    zero: int | None
    pipeline: Pipeline | None
    recompute: str | None
    memory: int
    device: str = "cpu"
    route: str | None = None


def silent(number: int, candidate: Candidate, outcome: Planned | str) -> None:
    """Says nothing of a plan that was made."""


def find_plans(
    job: Job,
    folder: Path,
    data_folder: Path,
    machine: Machine,
    given: Given,
    *,
    most: int = PLANS,
    progress: Progress = silent,
) -> Found:
    """Search the meshes, micro-batches, schedules and levels of ZeRO that are not given."""
    mesh = choose_mesh(given.ranks, given.mesh, machine)
    if mesh.by_stage:
        raise UsageError(f"--search looks at meshes whose stages are alike; {mesh} is not one")
    machine_notes(machine, mesh, given.device)  # refuses more ranks than there are devices
    check_level(given.zero or 0)
    check_recompute(given.recompute)
    data = inspect_all(job, data_folder)
    graph = training_graph(job, data, Target(mesh, machine), folder)
    space = Space(
        ranks=mesh.size,
        batch=job.train.batch,
        layers=_layers(graph),
        devices=machine.devices_per_node or mesh.size,
        mesh=mesh if given.mesh is not None else None,
        micro_batches=given.micro_batches,
        zero=given.zero,
        pipeline=given.pipeline,
        recompute=given.recompute,
        recomputable=given.memory > 0 and len(find_blocks(graph, {})) > 1,
    )

    def plan(candidate: Candidate, memory: int) -> Plan:
        return make_plan(
            replace(job, micro_batches=candidate.micro_batches),
            folder,
            candidate.mesh,
            data_folder,
            machine=machine,
            zero=candidate.zero,
            memory=memory,
            pipeline=candidate.pipeline,
            recompute=candidate.recompute,
            device=given.device,
            route=given.route,
            data=data,
        )

    found = search(
        _with_default(space, mesh, job),
        Estimator(graph, machine.with_ranks(mesh.size), given.memory),
        lambda candidate: plan(candidate, given.memory if candidate.auto else 0),
        limit=given.memory,
        most=most,
        progress=progress,
    )
    best, *others = found.planned
    if given.memory and not best.candidate.auto:
        # The same layouts, in a plan that says what limit they keep.
        best = replace(best, plan=plan(best.candidate, given.memory))
    return replace(found, planned=(best, *others))


def _with_default(space: Space, mesh: Mesh, job: Job) -> list[Candidate]:
    """All candidates, first what the same command line gives without a search, if it can be."""
    candidates = space.candidates()
    default = Candidate(
        mesh,
        space.micro_batches or job.micro_batches,
        space.zero,
        space.pipeline or ONE_FORWARD_ONE_BACKWARD,
        space.recompute,
        auto=True,
    )
    try:
        default.pipeline.check(mesh, default.micro_batches)
    except UsageError:
        if candidates:  # such as a schedule, for which meshes with stages are looked for
            return candidates
        raise
    return [default, *candidates]


def _layers(graph: Graph) -> int:
    """How many layers a model has, by the names of its weights: block0 of block0.up.weight."""
    return len({n.partition(".")[0] for n, v in graph.variables.items() if v.trainable})


# -- what is said of it ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A plan that was found, with shares of its step: all stages on average."""

    planned: Planned
    bubble: float
    communication: float

    @classmethod
    def of(cls, planned: Planned) -> Row:
        """Simulates the plan again, to say what its ranks wait for."""
        run: Simulation = simulate(planned.plan, "train")
        exposed, step = dict(run.exposed), run.step_seconds or 1.0
        waits = exposed["receive"] + exposed["send"]
        return cls(planned, waits / step, exposed["comm"] / step)

    def plain(self) -> dict[str, Any]:
        """As --json gives it."""
        candidate = self.planned.candidate
        return {
            "mesh": candidate.mesh.described(),
            "micro_batches": candidate.micro_batches,
            "schedule": candidate.pipeline.schedule,
            "virtual": candidate.pipeline.virtual,
            "zero": candidate.zero,
            "recompute": candidate.recompute,
            "step_seconds": self.planned.seconds,
            "arena_bytes": self.planned.nbytes,
            "bubble": round(self.bubble, 4),
            "exposed_communication": round(self.communication, 4),
            "estimated_seconds": float(f"{self.planned.estimate.seconds:.3e}"),
            "estimated_bytes": round(self.planned.estimate.nbytes),
            "options": list(candidate.options),
        }

    def cells(self, number: int) -> tuple[str, ...]:
        """As a row of the table."""
        candidate, staged = self.planned.candidate, self.planned.candidate.mesh.stages > 1
        pipeline = candidate.pipeline
        virtual = f" x {pipeline.virtual}" if pipeline.virtual > 1 else ""
        return (
            str(number), str(candidate.mesh), str(candidate.micro_batches),
            f"{pipeline.schedule}{virtual}" if staged else "",
            _zero_text(candidate), candidate.recompute or "", time_text(self.planned.seconds),
            size_text(self.planned.nbytes), f"{self.bubble:.0%}" if staged else "",
            f"{self.communication:.0%}",
        )  # fmt: skip


def _zero_text(candidate: Candidate) -> str:
    return "" if candidate.zero is None else str(candidate.zero)


def rows_of(found: Found) -> list[Row]:
    """The best plans that were found."""
    return [Row.of(planned) for planned in found.planned[:_SHOWN]]


def plain(found: Found, command: str) -> dict[str, Any]:
    """The outcome as --json gives it; `command` makes the best plan."""
    return {
        "candidates": found.tried,
        "best": [row.plain() for row in rows_of(found)],
        "command": command,
        "failed": [{"options": list(c.options), "why": why} for c, why in found.failed],
        "cannot_be_cut": [{"options": list(c.options), "why": why} for c, why in found.uncut],
        "too_large": [{"options": list(c.options), "estimated_bytes": n} for c, n in found.large],
        "needless": len(found.needless),
        "slower": len(found.slower),
    }


def show(found: Found, limit: int, command: str) -> str:
    """The outcome for people: the best plans, and why it is not one of the others."""
    best = found.planned[0].plan
    within = f", at most {size_text(limit)} each" if limit else ""
    count = len(found.planned) + len(found.failed)
    heads = (">", "mesh", ">micro-batches", "schedule", ">zero", "recompute", ">step", ">memory",
             ">bubble", ">messages")  # fmt: skip
    rows = [row.cells(number) for number, row in enumerate(rows_of(found), 1)]
    lines = [
        f"{best.job} on {best.mesh.size} ranks of machine {best.machine}{within}: {count} of"
        f" {found.tried} candidates planned",
        *table(rows, heads),
        "",
        *_others(found, limit),
        f"the best of them: {command}",
    ]
    return "\n".join(lines)


def _others(found: Found, limit: int) -> Iterator[str]:
    """A line for each reason for which candidates fell out, with a few of them."""
    worse = found.planned[_SHOWN:]
    if worse:
        yield f"  {len(worse)} more planned, with steps of up to {time_text(worse[-1].seconds)}"
    if found.slower:
        yield f"  {len(found.slower)} not planned: estimated to be slower, or no better"
    if found.needless:
        yield (
            f"  {len(found.needless)} not planned: more micro-batches, ZeRO or recomputation, which"
            " save memory that there is enough of"
        )
    if found.large:
        least, nbytes = min(found.large, key=lambda pair: pair[1])
        yield (
            f"  {len(found.large)} not planned: estimated to be larger than {size_text(limit)};"
            f" the smallest by {size_text(max(nbytes - limit, 0))}, {least}"
        )
    if found.uncut:
        yield f"  {len(found.uncut)} not planned: the model cannot be cut like that"
        yield from _reasons(found.uncut)
    if found.failed:
        yield f"  {len(found.failed)} tried, without a plan that fits"
        yield from _reasons(found.failed)


def _reasons(group: tuple[tuple[Candidate, str], ...]) -> Iterator[str]:
    """Each distinct reason, with the first candidate that it is that of."""
    reasons = [
        (why, [candidate for candidate, _ in members])
        for why, members in groupby(sorted(group, key=lambda pair: pair[1]), lambda pair: pair[1])
    ]
    for why, members in reasons[:_EXAMPLES]:
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        yield f"    {members[0]}{more}: {why}"
    if len(reasons) > _EXAMPLES:
        yield f"    and {len(reasons) - _EXAMPLES} other reasons, with --json"


def progress_to(write: Callable[[str], Any], most: int) -> Progress:
    """Writes a line for each plan that is made."""

    def progress(number: int, candidate: Candidate, outcome: Planned | str) -> None:
        if isinstance(outcome, str):
            write(f"search {number}/{most}: {candidate}: {outcome}\n")
            return
        step, held = time_text(outcome.seconds), size_text(outcome.nbytes)
        write(f"search {number}/{most}: {candidate}: {step}, {held}\n")

    return progress


def check_given(options: Namespace) -> None:
    """UsageError for options that show one plan beside --search, which makes at least one."""
    if options.plans is not None and options.plans < 1:
        raise UsageError(f"--plans must be at least 1, not {options.plans}")
    for name in ("after", "explain", "memory_report"):
        if getattr(options, name):
            raise UsageError(
                f"--search makes several plans, --{name.replace('_', '-')} shows one; give it with"
                " the options that a search found"
            )


def given_by(options: Namespace, machine: Machine) -> Given:
    """What a command line says of the plans to be found."""
    asked = options.schedule is not None or options.virtual is not None
    return Given(
        options.ranks,
        options.mesh,
        options.micro_batches,
        options.zero,
        pipeline_of(options.schedule, options.virtual) if asked else None,
        options.recompute,
        machine.memory_bytes if options.memory is None else parse_memory(options.memory),
        options.device or "cpu",
        options.route,
    )


def command_of(options: Namespace, candidate: Candidate) -> str:
    """The command line that makes a candidate's plan."""
    words = ["mpiflow", "plan", options.job, "--ranks", str(candidate.mesh.size)]
    words += candidate.options
    for name in ("cluster", "device", "route", "memory"):
        if getattr(options, name) is not None:
            words += [f"--{name}", getattr(options, name)]
    for setting in options.set:
        words += ["--set", setting]
    if options.data != ".":
        words += ["--data", options.data]
    return shlex.join(words)
