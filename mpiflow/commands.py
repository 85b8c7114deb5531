"""What each command of `mpiflow` does. The docstring of a command is its help.

A command imports what it needs when it runs: planning must work where mpi4py and h5py are absent.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiflow.errors import UsageError
from mpiflow.version import __version__

if TYPE_CHECKING:
    from mpiflow.compiler.signature import Placed
    from mpiflow.exec.device import Device
    from mpiflow.exec.transport import Transport
    from mpiflow.plan.records import Plan

# -- plans ----------------------------------------------------------------------------------------


def plan(options: Namespace) -> None:
    """Compile a job to a plan, and show it.

    Needs no MPI and no GPU, and no data files where the job declares its fields and rows.
    """
    from mpiflow.plan import memory, store, text

    if options.output and Path(options.output).is_dir():
        raise UsageError(f"-o {options.output}: a folder; name the plan's file in it")
    began = time.perf_counter()
    if options.search:
        _search(options)
        return
    if options.plans is not None:
        raise UsageError(f"--plans {options.plans} says how many plans --search makes; give both")
    if options.after:
        _plan_after(options)
        return
    placed: dict[str, Placed] = {}

    def keep(step: str, program: str, result: Any) -> None:
        if step == "signatures" and options.explain:
            placed[program] = result

    made = compile_plan(options, keep)
    seconds = time.perf_counter() - began
    if options.output:
        store.save(made, options.output)
    if options.explain:
        _explain(options, placed)
        return
    if options.json:
        options.answer = {
            **text.summary(made),
            "memory": memory.figures(made),
            "compile_seconds": round(seconds, 3),
        }
        return
    if options.memory_report:
        print(memory.memory_report(made))
    else:
        print(text.show(made))
        print(memory.show_memory(made))
    print(f"\ncompiled in {seconds:.2f} s")
    if options.output:
        size = text.size_text(Path(options.output).stat().st_size)
        name = shlex.quote(options.output)
        print(f"wrote {options.output} ({size}); start it with"
              f" mpiexec -n {made.mesh.size} mpiflow run {name}")  # fmt: skip


def _explain(options: Namespace, placed: dict[str, Placed]) -> None:
    """Say why a node, tensor or variable has its layout."""
    from mpiflow.compiler.explain import explain

    folder = Path(options.job.partition(":")[0]).resolve().parent
    found = explain(placed, options.explain, folder)
    if options.json:
        options.answer = found.plain()
    else:
        print(found)


def _search(options: Namespace) -> None:
    """Try what is not given, and show the best plans; the first is written with -o."""
    from mpiflow import search
    from mpiflow.compiler.machine import find_machine
    from mpiflow.jobfile import load_job
    from mpiflow.plan import store

    search.check_given(options)
    machine = find_machine(options.cluster or "cpu")
    job, folder = load_job(options.job, options.set)
    given = search.given_by(options, machine)
    most = search.PLANS if options.plans is None else options.plans
    progress = search.silent if options.json else search.progress_to(sys.stderr.write, most)
    found = search.find_plans(
        job, folder, Path(options.data), machine, given, most=most, progress=progress
    )
    command = search.command_of(options, found.planned[0].candidate)
    if options.output:
        store.save(found.planned[0].plan, options.output)
    if options.json:
        options.answer = search.plain(found, command)
        return
    print(search.show(found, given.memory, command))


def _plan_after(options: Namespace) -> None:
    """Print what a step of the compiler made, for every program that it handled."""
    from mpiflow.compiler.driver import STEPS
    from mpiflow.compiler.show import show_result

    if options.json:
        raise UsageError("--after prints a compiler step as text; leave out --json")
    if options.explain:
        raise UsageError("--after and --explain show different things; give one of them")
    if options.after not in STEPS:
        raise UsageError(f"--after {options.after}: the steps are {', '.join(STEPS)}")

    def observe(step: str, program: str, result: Any) -> None:
        if step == options.after:
            print(f"-- after {step}: program {program}\n{show_result(result)}\n")

    compile_plan(options, observe)


def compile_plan(
    options: Namespace,
    observe: Callable[[str, str, Any], None] = lambda step, program, result: None,
) -> Plan:
    """The plan of a job file, by the options that say what it is for."""
    from mpiflow.compiler.machine import find_machine
    from mpiflow.jobfile import load_job
    from mpiflow.planning import choose_mesh, make_plan, parse_memory, pipeline_of

    machine = find_machine(options.cluster or "cpu")
    mesh = choose_mesh(options.ranks, options.mesh, machine)
    job, folder = load_job(options.job, options.set)
    if options.micro_batches is not None:
        job = replace(job, micro_batches=options.micro_batches)
    return make_plan(
        job,
        folder,
        mesh,
        Path(options.data),
        machine=machine,
        zero=options.zero,
        pipeline=pipeline_of(options.schedule, options.virtual),
        recompute=options.recompute,
        device=options.device or "cpu",
        route=options.route,
        memory=None if options.memory is None else parse_memory(options.memory),
        observe=observe,
    )


def check(options: Namespace) -> None:
    """Prove a plan, and compare it with the data files that are there now."""
    from mpiflow.io.dataset import check_files
    from mpiflow.plan import text
    from mpiflow.weights import check_first

    made = load_plan(options.plan, options.ops)
    for data in made.data:
        check_files(data, Path(options.data))
    if made.first.path:
        check_first(made.first, Path(options.data))
    if options.json:
        options.answer = {"ok": True, **text.summary(made)}
        return
    tasks = sum(len(p.tasks) for p in made.programs)
    print(f"{options.plan}: {made.job} for {made.mesh.size} ranks on mesh {made.mesh}")
    print(f"proven: {tasks} tasks in {len(made.programs)} programs match, finish in every timing,"
          " read what was written and share no live memory")  # fmt: skip
    rows = ", ".join(f"{data.name} {data.rows:,} rows" for data in made.data)
    print(f"data as planned: {rows}")


def diff(options: Namespace) -> int:
    """Say how two plans differ; exit code 1 if they do."""
    from mpiflow.plan.compare import compare

    found = compare(load_plan(options.a, options.ops), load_plan(options.b, options.ops))
    if options.json:
        options.answer = found.plain() if found else {"equal": True, "differences": []}
    else:
        print(found or "the plans are equal")
    return 1 if found else 0


def load_plan(path: str, ops: Sequence[str] = ()) -> Plan:
    """A plan from its file, proven again; `ops` are files of ops that it uses."""
    from mpiflow.jobfile import load_ops
    from mpiflow.plan import store
    from mpiflow.plan.verify import verify
    from mpiflow.plan.verify_ops import verify_ops
    from mpiflow.plan.verify_run import verify_run

    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file (in {Path.cwd()})")
    if path.partition(":")[0].endswith(".py"):
        raise UsageError(f"{path}: a job file; make a plan of it with `mpiflow plan`")
    made = store.load(path, version=__version__)
    load_ops(ops)
    verify(made)
    verify_run(made)
    verify_ops(made)
    return made


FORM = (
    "cluster", "device", "memory", "mesh", "micro_batches", "recompute", "route", "schedule", "set",
    "virtual", "zero",
)  # fmt: skip
"""The options that make a plan what it is."""


def refuse_beside_plan(options: Namespace, *names: str) -> None:
    """UsageError where an option of these was given, which changes a plan, beside one."""
    for name in names:
        if getattr(options, name, None):
            raise UsageError(
                f"--{name.replace('_', '-')} changes a plan, and {options.job} is one already;"
                " give it to `mpiflow plan`, or run the .py file"
            )


def refuse_ops_beside_job(options: Namespace) -> None:
    """UsageError for --ops with a job file."""
    if options.ops and not options.job.endswith(".plan"):
        raise UsageError(
            f"--ops {options.ops[0]} goes with a plan; {options.job} imports the ops that it uses"
        )


# -- runs -----------------------------------------------------------------------------------------


def check_stall(options: Namespace) -> None:
    """UsageError for a --stall that is no time."""
    if options.stall is not None and not 0 <= options.stall < math.inf:
        raise UsageError(f"--stall takes seconds, or 0 for never, not {options.stall}")


def run(options: Namespace) -> int:
    """Train. Start it under mpiexec or srun, with as many ranks as the plan names.

    Takes a plan, or a job file, which rank 0 compiles for the ranks that were started. Goes on
    from the newest complete checkpoint in the run's folder, unless --fresh.
    """
    if options.job.endswith(".plan"):
        refuse_beside_plan(options, *(name for name in FORM if name != "device"))
    refuse_ops_beside_job(options)
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"--steps must be at least 1, not {options.steps}")
    check_stall(options)
    from mpiflow.exec.failure import guard
    from mpiflow.exec.launch import connect
    from mpiflow.window import parse_window

    trace = None if options.trace is None else parse_window(options.trace)

    transport = connect()
    with guard(transport) as failure:
        from mpiflow.plan import store
        from mpiflow.train import Options
        from mpiflow.train import run as train

        transport.check_same("mpiflow version", __version__)
        text = transport.on_root(lambda: _plan_text(options, transport.size))
        made = store.loads(text.encode(), version=__version__)
        _load_user_ops(made, options)
        device = open_for(made, options, transport)
        out = Path(options.out) if options.out else Path("run") / made.job
        code = train(
            made,
            transport,
            failure,
            Options(
                out,
                Path(options.data),
                options.fresh,
                options.steps,
                options.accept_changes,
                trace,
                options.stall,
                options.check_finite,
            ),
            device,
        )
    return code


def open_for(made: Plan, options: Namespace, transport: Transport) -> Device:
    """Collective. The device that options of the command line ask for, for a plan."""
    from mpiflow.exec.device import Wanted, open_device

    wanted = Wanted(
        made.device,
        frozenset(task.route for program in made.programs for task in program.tasks),
        f"{options.device_seed}/{transport.rank}",
        options.share_gpus,
        options.strict,
    )
    return open_device(_device_of(made, options.device), wanted, transport)


def _device_of(made: Plan, device: str | None) -> str:
    """The device to run a plan on: what was asked for, if the plan is for its kind."""
    from mpiflow.compiler.routes import device_kind
    from mpiflow.plan.places import HOST

    if device is None:
        return "cpu" if made.device == HOST else "cuda"
    if device_kind(device) != made.device:
        raise UsageError(
            f"--device {device}: the plan is for device {made.device!r}; make one with"
            f" `mpiflow plan --device {device}`"
        )
    return device


def _load_user_ops(made: Plan, options: Namespace) -> None:
    """Have the ops of the user's own on this rank too, and unchanged."""
    from mpiflow.graph.op import REGISTRY
    from mpiflow.jobfile import load_ops
    from mpiflow.plan.verify_ops import check_user_ops

    if any(op.name not in REGISTRY for op in made.ops):
        load_ops(options.ops or [options.job.partition(":")[0]])
    check_user_ops(made)


def _plan_text(options: Namespace, ranks: int) -> str:
    """The plan as its file holds it, loaded or compiled. Rank 0 only."""
    from mpiflow.graph.mesh import parse_mesh
    from mpiflow.plan import store

    if options.job.endswith(".plan"):
        made = load_plan(options.job, options.ops)
    else:
        options.ranks = ranks
        if options.mesh and (size := parse_mesh(options.mesh).size) != ranks:
            raise UsageError(f"--mesh {options.mesh} is for {size} ranks, {ranks} were started")
        made = compile_plan(options)
    return store.dumps(made).decode()


# -- checkpoints, machine -------------------------------------------------------------------------


def checkpoint_info(options: Namespace) -> None:
    """Show the checkpoints of a run, or one checkpoint: complete or not, and what is in it."""
    from mpiflow.io.checkpoint.info import describe, info

    if options.json:
        options.answer = info(Path(options.path), deep=options.deep)
    else:
        print(describe(Path(options.path), deep=options.deep))


def doctor(options: Namespace) -> int:
    """Look at this machine: what mpiflow needs, what is missing, what to do about it."""
    from mpiflow.doctor import examine

    findings = examine()
    if options.json:
        options.answer = {"findings": [finding.plain() for finding in findings]}
    else:
        for finding in findings:
            print(finding)
    return 0 if all(finding.ok for finding in findings) else 1
