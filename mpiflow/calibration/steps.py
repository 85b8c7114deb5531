"""How much longer whole steps take than their kernels: alone, and with all ranks of a host at work.

Kernels are timed while every rank is busy. A rank alone has the caches and the memory of the host
to itself; ranks together wait for the slowest of them at the end of a step; and every step has work
around its kernels. A factor on the seconds of all kernels stands for these.

Where kernels and messages share a core, a step also has what it takes to hand a message over, in
Python, with caches that the kernels have emptied. It is found in steps of small pipelines: what
each message must take more from the kernels, so that their predicted seconds are those measured.
They take turns with steps of the same kernels on one rank, by which these are priced there: what
is wrong with the prices of kernels, or changes with the machine, is not taken for messages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mpiflow.calibration.fit import Fit, fit_of
from mpiflow.calibration.jobs import Pipeline, Reference, references
from mpiflow.calibration.kernels import opened
from mpiflow.compiler.boxing import local_shape
from mpiflow.compiler.cost import op_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.reprice import repriced
from mpiflow.exec.session import Session
from mpiflow.exec.transport import Transport
from mpiflow.graph.op import build_op
from mpiflow.plan.records import Plan

_WARM, _STEPS, _CALM = 3, 20, 5
_ALL = _WARM + _STEPS
_HALVINGS = 12
_LONGEST_OVERHEAD_SECONDS = 5e-3


def reference_plans(*, quick: bool) -> list[Plan]:
    """The plans whose steps are timed: one of each kind of model."""
    kinds: dict[str, Reference] = {}
    for job in references(quick=quick):
        kinds.setdefault(job.name.partition("-")[0], job)
    return [job.plan() for job in kinds.values()]


def measure_steps(transport: Transport, plans: Sequence[Plan]) -> list[list[float]]:
    """Collective. Seconds of a calm step of each plan: of rank 0 alone, then of all ranks together.

    Others see zeros where rank 0 is alone; on one rank the two are the same.
    """
    alone = [0.0] * len(plans)
    if transport.rank == 0:
        alone = [_calm_step(opened(plan, _ALL), lambda: None) for plan in plans]
    _meet(transport)
    together = [_calm_step(opened(plan, _ALL), lambda: _meet(transport)) for plan in plans]
    return [alone, together if transport.size > 1 else alone]


def _meet(transport: Transport) -> None:
    transport.barrier().wait(transport.check)


def measure_pipelines(transport: Transport, plans: Sequence[Pipeline]) -> list[tuple[float, float]]:
    """Collective. Seconds of a calm step of each, on all ranks together and on each rank alone."""
    return [_turns(transport, each) for each in plans]


def _turns(transport: Transport, plans: Pipeline) -> tuple[float, float]:
    sessions = opened(plans.staged, _ALL, transport), opened(plans.alone, _ALL)
    seconds: tuple[list[float], list[float]] = [], []
    for first in range(0, _ALL, _CALM):
        for session, times in zip(sessions, seconds, strict=True):
            steps = range(first, min(first + _CALM, _ALL))
            times += _steps(session, steps, lambda: _meet(transport))
    for session in sessions:
        session.close()
    return _calmest(seconds[0]), _calmest(seconds[1])


def fit_pipelines(
    machine: Machine, plans: Sequence[Pipeline], seconds: Sequence[tuple[float, float]]
) -> tuple[Machine, float, Fit]:
    """The machine whose messages take more from kernels, and how many seconds more.

    The median of what each of these asks for, by its `seconds` in stages and alone.
    """
    busy = [
        _with_kernels(machine.with_ranks(each.staged.mesh.size), each.alone, alone)
        for each, (_, alone) in zip(plans, seconds, strict=True)
    ]
    measured = [staged for staged, _ in seconds]
    wanted = [
        _overhead_of(one, each.staged, took)
        for one, each, took in zip(busy, plans, measured, strict=True)
    ]
    found = statistics.median(wanted)
    predicted = [
        _seconds(_with_overhead(one, found), each.staged)
        for one, each in zip(busy, plans, strict=True)
    ]
    return _with_overhead(machine, found), found, fit_of(predicted, measured)


def _with_kernels(machine: Machine, plan: Plan, seconds: float) -> Machine:
    """The machine whose kernels are slower, or faster, so that a step takes so many seconds."""
    return replace(machine, crowding=((1, seconds / _seconds(machine, plan)),)).with_ranks(1)


def _overhead_of(machine: Machine, plan: Plan, seconds: float) -> float:
    """The overhead that gives a step so many seconds, which rise with it; by bisection."""
    low, high = 0.0, _LONGEST_OVERHEAD_SECONDS
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rises = _seconds(_with_overhead(machine, middle), plan) < seconds
        low, high = (middle, high) if rises else (low, middle)
    return low


def _seconds(machine: Machine, plan: Plan) -> float:
    """A step, as the machine prices it."""
    train = repriced(plan, machine).program("train")
    assert train is not None
    return train.seconds


def _with_overhead(machine: Machine, seconds: float) -> Machine:
    """Between hosts; within the only one, if there are not several."""
    outer = machine.outer.with_overhead(seconds)
    only = machine.inner == machine.outer
    return replace(machine, outer=outer, inner=outer if only else machine.inner)


def _calm_step(session: Session, meet: Callable[[], None]) -> float:
    """The median of the calmest steps in a row; ranks `meet` after each."""
    seconds = _steps(session, range(_ALL), meet)
    session.close()
    return _calmest(seconds)


def _steps(session: Session, steps: range, meet: Callable[[], None]) -> list[float]:
    seconds = []
    for step in steps:
        began = time.perf_counter()
        session.run("train", step)
        meet()
        seconds.append(time.perf_counter() - began)
    return seconds


def _calmest(seconds: list[float]) -> float:
    """Of steps from the first on."""
    seconds = seconds[_WARM:]
    windows = [seconds[i : i + _CALM] for i in range(len(seconds) - _CALM + 1)]
    return min(map(statistics.median, windows))


def fit_steps(
    machine: Machine, plans: Sequence[Plan], seconds: Sequence[float]
) -> tuple[float, Fit]:
    """The factor by which steps are longer than their kernels as this machine prices them."""
    kernels = [_kernel_seconds(machine, plan) for plan in plans]
    factor = statistics.median(s / k for s, k in zip(seconds, kernels, strict=True))
    return factor, fit_of([factor * k for k in kernels], seconds)


def _kernel_seconds(machine: Machine, plan: Plan) -> float:
    program = plan.program("train")
    assert program is not None
    tensors, mesh = plan.tensors(program), plan.mesh
    total = 0.0
    for task in program.tasks:
        if task.kind == "compute":
            inputs, outputs = (
                tuple(local_shape(tensors[n].shape, tensors[n].layout, mesh) for n in names)
                for names in (task.inputs, task.outputs)
            )
            dtypes = tuple(tensors[n].dtype for n in (*task.inputs, *task.outputs))
            op = build_op(task.op, task.attributes)
            total += op_seconds(machine, op, inputs, outputs, dtypes)
    return total
