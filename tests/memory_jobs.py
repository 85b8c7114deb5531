"""Jobs whose plans are made within a limit on memory."""

from dataclasses import replace

from jobs import classifier, data_set

import mpiflow as mf
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.graph.mesh import parse_mesh

MACHINE = find_machine("cpu")


def wide(batch=8, **more):
    """Layers whose weights and states are most of what a rank holds."""
    job = classifier(batch, width=4000, hidden=None, last=None, optimizer=mf.Adam(lr=0.01))
    return replace(job, evaluate=None, **more)


def compiled(job, mesh, **target):
    """The plan of a job for 640 rows, and the layouts of its training step."""
    found = []
    plan = compile_job(
        job,
        {"train": data_set("train", 640, job.train.batch)},
        Target(parse_mesh(mesh), MACHINE, **target),
        observe=lambda step, _, made: found.append(made) if step == "signatures" else None,
    )
    return plan, found[-1]


def arena(plan):
    return dict(plan.arenas)["host"]
