"""Simulations that fold nothing: every firing by itself, or every rank by itself."""

from collections import defaultdict
from dataclasses import replace
from functools import cache

from jobs import classifier, compile_for
from together import joined

import mpiflow as mf
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.plan.records import READ, WRITE
from mpiflow.plan.runs import Lane
from mpiflow.plan.simulator import Event
from mpiflow.plan.unroll import slot_before
from mpiflow.plan.waits import in_turn, waits_of

QUANTUM = 2.0**-48


def in_quanta(plan):
    """With seconds that the simulator takes as they are."""
    programs = tuple(
        replace(p, tasks=tuple(replace(t, seconds=round(t.seconds / QUANTUM) * QUANTUM)
                               for t in p.tasks))
        for p in plan.programs
    )  # fmt: skip
    return replace(plan, programs=programs)


@cache
def pipelined(mesh, micro_batches=1, schedule="1f1b", virtual=1, hidden="B"):
    """The plan of a classifier in micro-batches, with seconds that are taken as they are."""
    job = classifier(hidden=hidden, optimizer=mf.Adam(lr=0.01, clip=1.0))
    job = replace(job, micro_batches=micro_batches)
    return in_quanta(compile_for(mesh, job, pipeline=Pipeline(schedule, virtual)))


def by_name(events):
    """What events say, in an order that is the same for the same events."""
    return sorted((e.step, e.task, e.stream, e.start, e.stop) for e in events)


def firings(plan, name, steps):
    """The events of some steps, each of the time that its own waits give, in no certain order.

    Slots that are freed in the same step are waited for as those of steps before.
    """
    program = joined(plan, name)
    frees, waits = _frees(program), waits_of(program)
    for i, found in enumerate(frees):
        waits[i].update({other: "for its slot" for other, ago in found if not ago and other != i})
    order, durations = in_turn(program, waits), [task.seconds for task in program.tasks]
    free, stops, begin = defaultdict(float), [], 0.0
    for step in range(steps):
        stops.append([0.0] * len(order))
        end = begin
        for i in order:
            task = program.tasks[i]
            kind = task.stream.partition("@")[0]
            start = free[task.stream] if kind == READ else max(begin, free[task.stream])
            start = max([start, *(stops[step][other] for other in waits[i])])
            for other, ago in frees[i]:
                if 0 < ago <= step:
                    start = max(start, stops[step - ago][other])
            stops[step][i] = free[task.stream] = start + durations[i]
            if kind not in (READ, WRITE):
                end = max(end, stops[step][i])
            yield Event(task.name, task.stream, start, stops[step][i], step)
        begin = end


def _frees(program):
    """Of each task, what frees its output's slot, and how many steps ago that fired."""
    consumers = defaultdict(list)
    for i, task in enumerate(program.tasks):
        for name in task.inputs:
            consumers[name].append(i)
    producer = {name: i for i, task in enumerate(program.tasks) for name in task.outputs}
    frees = [[] for _ in program.tasks]
    for register in program.registers:
        name, ago = slot_before(register, program.micro_batches)
        frees[producer[register.name]] += [(i, ago) for i in consumers[name]]
    return frees


def every_rank(plan, slower=None):
    """A lane for each rank; `slower` has the factors of some."""
    found = []
    for stage in range(plan.mesh.stages):
        for within in range(plan.mesh.within_stage().size):
            rank = plan.mesh.rank_in_stage(stage, within)
            place = plan.mesh.within_stage().coordinates(within)
            factor = (slower or {}).get(rank, 1.0)
            found.append(Lane(stage, f"rank {rank}", 1, factor, place))
    return tuple(found)
