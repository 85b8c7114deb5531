"""What `mpiflow simulate` does; its docstring is its help.

As in `commands`, it imports what it needs when it runs.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from mpiflow.commands import (
    FORM,
    compile_plan,
    load_plan,
    refuse_beside_plan,
    refuse_ops_beside_job,
)
from mpiflow.errors import CompileError, UsageError

if TYPE_CHECKING:
    from mpiflow.plan.records import Plan
    from mpiflow.plan.simulator import Simulation
    from mpiflow.scaling import Point


def simulate(options: Namespace) -> None:
    """Show when each task of a plan would run, what waits for what, and what a step is made of.

    Takes a plan, or a job file and the options of `mpiflow plan`. With --nodes, a job file is
    compiled for each number of nodes, and a table shows what more of them bring.
    """
    from mpiflow.plan import text
    from mpiflow.plan.outlook import outlook
    from mpiflow.plan.perfetto import write_trace
    from mpiflow.plan.timeline import step_table, timeline

    _check(options)
    if options.nodes:
        _scaling(options)
        return
    began = time.perf_counter()
    made, notes = _priced(options)
    seconds = time.perf_counter() - began
    result = _simulated(options, made)
    found = outlook(made, result)
    if options.straggler:
        notes.append(_without_straggler(options, made, result))
    if options.trace:
        count = write_trace(result, Path(options.trace))
        notes.append(f"{count:,} tasks in {options.trace}; open it at https://ui.perfetto.dev")
    if options.json:
        summary = text.summary(made)
        options.answer = {
            **summary,
            "compile_seconds": round(seconds, 3),
            "program": options.program,
            "busy": dict(result.busy),
            "exposed": dict(result.exposed),
            **found.plain(),
            "notes": [*summary["notes"], *notes],
        }
        return
    print(timeline(result), end="")
    print(step_table(found))
    for note in notes:
        print(f"note: {note}")


def _check(options: Namespace) -> None:
    """UsageError for what cannot be meant together."""
    refuse_ops_beside_job(options)
    if options.job.endswith(".plan"):
        refuse_beside_plan(options, "ranks", *(name for name in FORM if name != "cluster"))
        if options.nodes:
            raise UsageError(
                f"--nodes compiles a job for each number of nodes, and {options.job} is a plan for"
                " certain ranks; give the .py file"
            )
    if options.steps < 1:
        raise UsageError(f"--steps must be at least 1, not {options.steps}")
    if options.trace and Path(options.trace).is_dir():
        raise UsageError(f"--trace {options.trace}: a folder; name the file in it")
    if options.nodes and (options.trace or options.straggler or options.ranks):
        raise UsageError("--nodes makes a table; leave out --trace, --straggler and --ranks")


def _priced(options: Namespace) -> tuple[Plan, list[str]]:
    """The plan with the prices that are asked for, and what there is to say of them."""
    if not options.job.endswith(".plan"):
        return compile_plan(options), []
    made = load_plan(options.job, options.ops)
    if not options.cluster:
        return made, []
    from mpiflow.compiler.machine import find_machine
    from mpiflow.compiler.reprice import repriced
    from mpiflow.plan.places import HOST
    from mpiflow.planning import machine_notes

    machine = find_machine(options.cluster)
    notes = machine_notes(machine, made.mesh, "cpu" if made.device == HOST else "cuda")
    again = repriced(made, machine)
    return again, [
        *notes,
        f"prices of machine {machine.name}, from the operations and bytes in the plan; its layouts"
        f" and order are those chosen for {made.machine}: compile the job for what is best there",
    ]


def _simulated(options: Namespace, made: Plan) -> Simulation:
    from mpiflow.plan.simulator import simulate as run_simulation
    from mpiflow.plan.straggler import straggler_lanes

    if made.program(options.program) is None:
        known = ", ".join(dict.fromkeys(program.name for program in made.programs))
        raise UsageError(f"--program {options.program}: the plan has {known}")
    lanes = straggler_lanes(made, options.straggler) if options.straggler else ()
    factors = dict(_factor(text) for text in options.factor)
    return run_simulation(made, options.program, options.steps, factors=factors, lanes=lanes)


def _without_straggler(options: Namespace, made: Plan, result: Simulation) -> str:
    from mpiflow.plan.text import time_text

    step = _simulated(Namespace(**{**vars(options), "straggler": None}), made).step_seconds
    longer = result.step_seconds / (step or 1.0) - 1
    return (
        f"with --straggler {options.straggler} a step takes {longer:.1%} longer than the"
        f" {time_text(step)} without"
    )


def _factor(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise UsageError(f"--factor {text}: give STREAM=FACTOR, as in comm=2 or comm.data=0.5"
                         ) from error  # fmt: skip


# -- numbers of nodes -----------------------------------------------------------------------------


def _scaling(options: Namespace) -> None:
    """A table over numbers of nodes, and where more of them bring nothing."""
    from mpiflow.plan import text
    from mpiflow.scaling import conclusion, numbers_of, scaling_rows

    points = [_point(options, nodes) for nodes in numbers_of(options.nodes)]
    if options.json:
        options.answer = {
            "program": options.program,
            "points": [point.plain() for point in points],
            "conclusion": conclusion(points),
        }
        return
    print("\n".join(text.table(*scaling_rows(points))))
    for point in points:
        if point.refused:
            print(f"{point.nodes} nodes: {point.refused}")
    print(conclusion(points))


def _point(options: Namespace, nodes: int) -> Point:
    """The job on so many nodes."""
    from mpiflow.compiler.machine import find_machine
    from mpiflow.plan.outlook import outlook
    from mpiflow.scaling import Point, mesh_for

    machine = find_machine(options.cluster or "cpu")
    if not machine.devices_per_node:
        raise UsageError(
            f"--nodes: machine {machine.name} does not say how many devices a node has; give"
            " --cluster with one that does, h100 say, or set devices_per_node in a machine file"
        )
    mesh = mesh_for(options.mesh, nodes * machine.devices_per_node)
    try:
        made = compile_plan(Namespace(**{**vars(options), "mesh": str(mesh)}))
    except CompileError as error:
        return Point(nodes, mesh, refused=str(error).splitlines()[0])
    result = _simulated(options, made)
    chosen = made.program(options.program)
    assert chosen is not None
    return Point(nodes, mesh, chosen.rows, outlook(made, result))
