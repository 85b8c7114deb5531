"""Planning: join a job, the data files that it names and the ranks that it gets to a plan."""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil
from pathlib import Path

from mpiflow.compiler.arrange import Observer, Target
from mpiflow.compiler.cost import spread
from mpiflow.compiler.domains import DATA
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import Machine, find_machine
from mpiflow.compiler.pipeline import ONE_FORWARD_ONE_BACKWARD, Pipeline
from mpiflow.compiler.recompute import check_recompute
from mpiflow.compiler.routes import choose_route, device_kind
from mpiflow.compiler.zero import check_level
from mpiflow.errors import JobError, UsageError
from mpiflow.graph.mesh import STAGE, Mesh, parse_mesh
from mpiflow.graph.tensor import DTYPES
from mpiflow.job import Dataset, Job
from mpiflow.plan.records import DataSet, Plan
from mpiflow.plan.verify_ops import verify_ops
from mpiflow.plan.verify_run import verify_run
from mpiflow.weights import with_first_values

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def choose_mesh(ranks: int | None, mesh: str | None, machine: Machine | None = None) -> Mesh:
    """The mesh that --mesh names, or all ranks on the data axis.

    Without either, a rank for each device of the machine, where it says how many there are.
    """
    if mesh is not None:
        return parse_mesh(mesh, ranks)
    ranks = ranks if ranks is not None or machine is None else machine.ranks
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
    machine: Machine | None = None,
    zero: int | None = None,
    memory: int | None = None,
    pipeline: Pipeline = ONE_FORWARD_ONE_BACKWARD,
    recompute: str | None = None,
    device: str = "cpu",
    route: str | None = None,
    data: dict[str, DataSet] | None = None,
    observe: Observer = lambda step, program, result: None,
) -> Plan:
    """The plan of a job from `folder`, for a mesh, with its data files in `data_folder`.

    Prices are those of `machine`, which is the built-in `cpu` unless given. Arenas have `memory`
    bytes at most, by default what a device of the machine has, where that is known. Pipeline
    stages take turns as `pipeline` says; activations are computed again at the level `recompute`.
    Ranks compute on `device` (cpu, fake, cuda), and reach one another by `route` where those are
    accelerators.
    `data` is what `inspect_all` gave, if that was called before.
    """
    from mpiflow.io.dataset import cache_bytes

    machine = machine or find_machine("cpu")
    check_level(zero or 0)
    check_recompute(recompute)
    limit = machine.memory_bytes if memory is None else memory
    notes = machine_notes(machine, mesh, device)
    machine = machine.with_ranks(mesh.size)
    target = Target(
        mesh, machine, device_kind(device), choose_route(device, route, machine),
        zero=zero, memory=limit, pipeline=pipeline, recompute=recompute,
    )  # fmt: skip
    plan = compile_job(
        job,
        inspect_all(job, data_folder) if data is None else data,
        target,
        folder=folder,
        cache_bytes=cache_bytes,
        observe=observe,
    )
    plan = replace(plan, notes=(*plan.notes, *notes))
    if job.weights:
        plan = with_first_values(plan, job.weights, data_folder)
    verify_run(plan)
    verify_ops(plan)
    return plan


def pipeline_of(schedule: str | None, virtual: int | None) -> Pipeline:
    """What --schedule and --virtual ask for; two pieces a stage where interleaved says no more."""
    schedule = schedule or ("interleaved" if (virtual or 1) > 1 else "1f1b")
    return Pipeline(schedule, virtual or (2 if schedule == "interleaved" else 1))


def machine_notes(machine: Machine, mesh: Mesh, device: str = "cpu") -> tuple[str, ...]:
    """What there is to say of ranks on a machine; UsageError where it has no room for them."""
    devices = machine.ranks
    if devices is not None and mesh.size > devices:
        raise UsageError(
            f"machine {machine.name} has {machine.nodes} nodes of {machine.devices_per_node}"
            f" devices, {devices} in all, and mesh {mesh} has {mesh.size} ranks; use fewer ranks,"
            " or a machine file with more nodes"
        )
    notes = []
    if machine.host_link is not None and device == "cpu":
        notes.append(f"prices are those of devices of machine {machine.name}; ranks run on CPUs")
    if devices is not None and mesh.size < devices:
        notes.append(f"machine {machine.name} has {devices} devices; {mesh.size} ranks use as many")
    if machine.devices_per_node and mesh.size > machine.devices_per_node:
        notes.append(f"machine {machine.name}: {_levels(machine.devices_per_node, mesh)}")
    return tuple(notes)


def _levels(devices_per_node: int, mesh: Mesh) -> str:
    """Which axes stay within a node, and which go between nodes."""
    parts = []
    for axis, name in enumerate(mesh.names):
        nodes = _nodes(mesh, axis, devices_per_node)
        parts.append(f"axis {name} {'goes between nodes' if nodes > 1 else 'stays within a node'}")
    return ", ".join(parts)


def _nodes(mesh: Mesh, axis: int, devices_per_node: int) -> int:
    """How many nodes a group along an axis is on; where stages differ, on any of them."""
    if not mesh.by_stage:
        return spread(mesh, (axis,), devices_per_node)[1]
    if mesh.names[axis] == STAGE:
        return ceil(mesh.size / devices_per_node)
    inside = [mesh.within_stage(stage) for stage in range(mesh.stages)]
    return max(
        spread(each, (each.index(mesh.names[axis]),), devices_per_node)[1] for each in inside
    )


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_memory(text: str) -> int:
    """The bytes that --memory names: 40GiB, 512MiB, 1.5GB, or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UsageError(f"--memory {text}: say how much as in 40GiB, 512MiB or 1.5GB")
    nbytes = int(float(match[1]) * unit)
    if nbytes < 1:
        raise UsageError(f"--memory {text}: a plan needs at least a byte")
    return nbytes


def _check_name(job: Job, name: str) -> None:
    """An evaluation's name is part of program names and of metrics (`NAME.accuracy`)."""
    if name == "train" or name.endswith("_tail") or not _NAME.fullmatch(name):
        raise JobError(
            f"job {job.name}: an evaluation cannot be named {name!r}; use letters, digits, '-' and"
            " '_', but not 'train', and no '_tail' at the end"
        )


def inspect_all(job: Job, folder: Path) -> dict[str, DataSet]:
    """The record of each data set of a job: of "train", and of every evaluation."""
    data = {"train": inspect_data("train", job.train, folder, drop=True)}
    for name, dataset in job.evaluations.items():
        _check_name(job, name)
        data[name] = inspect_data(name, dataset, folder, drop=False)
    return data


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
