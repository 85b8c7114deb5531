"""Planning: join a job, the data files that it names and the ranks that it gets to a plan."""

from __future__ import annotations

import re
from pathlib import Path

from mpiflow.compiler.driver import Observer, Target, compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.signature import DATA
from mpiflow.errors import JobError, UsageError
from mpiflow.graph.mesh import Mesh, parse_mesh
from mpiflow.graph.tensor import DTYPES
from mpiflow.job import Dataset, Job
from mpiflow.plan.records import DataSet, Plan
from mpiflow.plan.verify_ops import verify_ops
from mpiflow.plan.verify_run import verify_run
from mpiflow.weights import with_first_values

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def choose_mesh(ranks: int | None, mesh: str | None) -> Mesh:
    """The mesh that --mesh names, or all ranks on the data axis."""
    if mesh is not None:
        return parse_mesh(mesh, ranks)
    if ranks is None:
        raise UsageError("say how many ranks the job will get: --ranks N, or --mesh data=N")
    if ranks < 1:
        raise UsageError(f"--ranks must be at least 1, not {ranks}")
    return Mesh(((DATA, ranks),))


def make_plan(
    job: Job,
    folder: Path,
    mesh: Mesh,
    data_folder: Path,
    *,
    machine: str = "cpu",
    observe: Observer = lambda step, program, result: None,
) -> Plan:
    """The plan of a job from `folder`, for a mesh, with its data files in `data_folder`."""
    from mpiflow.io.dataset import cache_bytes

    data = {"train": inspect_data("train", job.train, data_folder, drop=True)}
    for name, dataset in job.evaluations.items():
        _check_name(job, name)
        data[name] = inspect_data(name, dataset, data_folder, drop=False)
    plan = compile_job(
        job,
        data,
        Target(mesh, find_machine(machine)),
        folder=folder,
        cache_bytes=cache_bytes,
        observe=observe,
    )
    if job.weights:
        plan = with_first_values(plan, job.weights, data_folder)
    verify_run(plan)
    verify_ops(plan)
    return plan


def _check_name(job: Job, name: str) -> None:
    """An evaluation's name is part of program names and of metrics (`NAME.accuracy`)."""
    if name == "train" or name.endswith("_tail") or not _NAME.fullmatch(name):
        raise JobError(
            f"job {job.name}: an evaluation cannot be named {name!r}; use letters, digits, '-' and"
            " '_', but not 'train', and no '_tail' at the end"
        )


def inspect_data(name: str, dataset: Dataset, folder: Path, *, drop: bool) -> DataSet:
    """The record of a data set; `drop` where an incomplete last batch is dropped."""
    from mpiflow.io.dataset import inspect
    from mpiflow.io.shards import list_files

    if dataset.make is not None and not list_files(dataset.pattern, folder):
        dataset.make(folder)
    for field, (_, dtype) in (dataset.fields or {}).items():
        if dtype not in DTYPES:
            raise JobError(
                f"data set {name!r}: field {field!r} is declared {dtype!r}, which is none of"
                f" {', '.join(DTYPES)}"
            )
    return inspect(
        name,
        dataset.pattern,
        folder,
        batch=dataset.batch,
        shuffle=dataset.shuffle and drop,
        seed=dataset.seed,
        lanes=min(dataset.lanes, dataset.batch),
        window=dataset.window,
        fields=dataset.fields,
        rows=dataset.rows,
        drop=drop,
    )
