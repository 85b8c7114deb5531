"""Predict: run a model's outputs over a data set, into one HDF5 file with the rows in order.

prediction_plan    rank 0: what to compute, which variables to take from where
run                every rank: the steps; each rank writes the rows that it computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpiflow.compiler.arrange import Target
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.predict import PREDICT, Wanted, compile_predict
from mpiflow.compiler.routes import choose_route, device_kind
from mpiflow.errors import DataError, UsageError
from mpiflow.exec.device import Device
from mpiflow.exec.failure import Failure
from mpiflow.exec.launch import check_ranks
from mpiflow.exec.session import Session
from mpiflow.exec.transport import Transport
from mpiflow.exec.watchdog import watching
from mpiflow.graph.mesh import Mesh
from mpiflow.io import predictions
from mpiflow.io.dataset import cache_bytes, check_files, open_reader
from mpiflow.io.predictions import Rows, RowsFile
from mpiflow.io.shards import list_files
from mpiflow.io.weights.builtin import name_map
from mpiflow.io.weights.first import AVERAGE, resolve
from mpiflow.io.weights.names import NameMap, Rule
from mpiflow.io.weights.source import Saved, open_tensors
from mpiflow.io.weights.tensors import TensorInfo
from mpiflow.job import Dataset, Job
from mpiflow.plan import store
from mpiflow.plan.first import FirstValues
from mpiflow.plan.records import WRITE, Field, Plan
from mpiflow.plan.verify_ops import verify_ops
from mpiflow.plan.verify_run import verify_predict
from mpiflow.planning import inspect_data
from mpiflow.weights import check_first, check_heads, load_first


@dataclass(frozen=True, slots=True)
class Request:
    """What to predict with and for.

    `weights` is a run, a checkpoint or a file of weights with `names`. `dataset` is the name of
    one of the job's data sets or a pattern of files; empty, the one that evaluates.
    """

    weights: str
    data: Path
    dataset: str = ""
    outputs: Sequence[str] = ()
    names: str = ""


def prediction_plan(
    job: Job,
    folder: Path,
    mesh: Mesh,
    request: Request,
    *,
    device: str = "cpu",
    route: str | None = None,
) -> Plan:
    """The plan of the predictions of a job from `folder`, proven.

    `device` and `route` are those of `planning.make_plan`.
    """
    machine = find_machine("cpu")
    chosen = _dataset(job, request.dataset)
    data = inspect_data(PREDICT, chosen, request.data, drop=False)
    plan = compile_predict(
        job,
        Wanted(data, request.outputs, _fields(job, request.data)),
        Target(mesh, machine, device_kind(device), choose_route(device, route, machine)),
        folder=folder,
        cache_bytes=cache_bytes,
    )
    plan = _with_values(plan, job, request)
    verify_predict(plan)
    verify_ops(plan)
    return plan


def _dataset(job: Job, name: str) -> Dataset:
    known = {**job.evaluations, "train": job.train}
    if not name and len(job.evaluations) == 1:
        return next(iter(job.evaluations.values()))
    if not name:
        raise UsageError(f"--dataset: name one of {', '.join(known)}, or give a pattern of files")
    if name in known:
        return known[name]
    batch = next(iter(job.evaluations.values()), job.train).batch
    return Dataset(name, batch)


def _fields(job: Job, folder: Path) -> tuple[Field, ...]:
    """Fields that the model may ask for: those of the job's data, by declaration or by file."""
    found: dict[str, Field] = {}
    for data in (job.train, *job.evaluations.values()):
        if data.fields:
            found |= {n: Field(n, shape, dtype) for n, (shape, dtype) in data.fields.items()}
        elif list_files(data.pattern, folder):
            one = replace(data, pattern=list_files(data.pattern, folder)[0])
            record = inspect_data(PREDICT, one, folder, drop=False)
            found |= {field.name: field for field in record.fields}
    return tuple(found.values())


def _with_values(plan: Plan, job: Job, request: Request) -> Plan:
    """The plan with what fills its variables; averages of weights where evaluations use them."""
    path = Path(request.weights)
    wanted = [TensorInfo(v.name, v.shape, v.dtype) for v in plan.distinct_variables()]
    with open_tensors(path) as source:
        names = name_map(request.names)
        if isinstance(source, Saved) and job.optimizer.ema:
            names = _averages(names, source)
        check_heads(plan, names)
        filled, remarks = resolve(source, names, wanted, partly=True)
        first = FirstValues(str(source.path), source.digest(), filled)
    return replace(plan, first=first, notes=(*plan.notes, *remarks))


def _averages(names: NameMap, source: Saved) -> NameMap:
    averages = [name for name in source.tensors if f"{name}.{AVERAGE}" in source.tensors]
    rules = (Rule(name, (f"{name}.{AVERAGE}",)) for name in averages)
    return replace(names, rules=(*rules, *names.rules))


@dataclass(frozen=True, slots=True)
class Options:
    """Where the data are, the file to write, and `stall` as in `train.Options`."""

    data: Path
    out: Path
    overwrite: bool = False
    stall: float | None = None


def run(
    plan: Plan,
    transport: Transport,
    failure: Failure,
    options: Options,
    device: Device | None = None,
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Collective. Predict, and give the file its name once all of it is there.

    Gives dtype and shape of what was written, by output.
    """
    check_ranks(transport, plan.mesh.size)
    datasets = _datasets(plan)
    offsets = transport.on_root(lambda: _prepare(plan, datasets, options))
    datasets = [replace(rows, offset=at) for rows, at in zip(datasets, offsets, strict=True)]
    folder = predictions.folder_of(options.out)
    failure.use_folder(folder)
    data = plan.data[0]
    with watching(transport, failure, plan, folder, options.stall) as watch:
        reader = open_reader(data, options.data, rows=_span(plan, transport.rank), tail=True)
        session = Session(
            plan, transport, {data.name: reader}, start_thread=failure.start_thread, device=device
        )
        watch(session)
        with session.filling() as arrays:
            load_first(plan.first, Path(), session.boxes(), arrays)
        out = RowsFile(options.out, datasets, f"{transport.name}: ")
        _steps(plan, session, out)
        session.close()
        reader.close()
        out.close()
        # Ranks need not meet before, and one that has left is not watched any more.
        transport.barrier().wait(transport.check)
        transport.on_root(lambda: predictions.publish(options.out))
    if transport.rank == 0:
        predictions.clear(options.out)
    return {rows.name: (rows.dtype, rows.shape) for rows in datasets}


def _datasets(plan: Plan) -> list[Rows]:
    """What the file will hold: of each output all rows of the data set."""
    rows = plan.data[0].rows
    found = []
    for stage in plan.stages():
        program = next(p for p in stage.programs if p.data)
        registers = {register.name: register for register in program.registers}
        for task in (task for task in program.tasks if task.stream == WRITE):
            register = registers[task.inputs[0]]
            shape = (rows, *register.shape[1:])
            found.append(Rows(task.attributes["output"], shape, register.dtype))
    return found


def _prepare(plan: Plan, datasets: list[Rows], options: Options) -> list[int]:
    """Check what is there and make the file. Rank 0 only."""
    if options.out.is_dir() or (options.out.exists() and not options.overwrite):
        raise DataError(f"{options.out}: exists; name another file, or give --overwrite")
    check_files(plan.data[0], options.data)
    check_first(plan.first, Path())
    attributes: dict[str, Any] = {
        "job": plan.job,
        "weights": plan.first.path,
        "weights_digest": plan.first.digest,
        "dataset": plan.data[0].pattern,
        "mpiflow": plan.version,
        "plan": store.digest(plan),
    }
    return predictions.create(options.out, datasets, attributes)


def _span(plan: Plan, rank: int) -> tuple[int, int]:
    """The rows of each batch that a rank reads."""
    number, place = plan.mesh.stage_of(rank)
    stage = plan.at_stage(number)
    program = next(p for p in stage.programs if p.data)
    read = next((task for task in program.tasks if task.kind == "read"), None)
    if read is None:
        return (0, 0)
    return stage.slice(place).box(stage.tensors(program)[read.outputs[0]])[0]


def _steps(plan: Plan, session: Session, out: RowsFile) -> None:
    data = plan.data[0]
    full = data.rows // data.batch
    for program in (p for p in session.plan.programs if p.data):
        steps = range(full) if program.rows == data.batch else range(full, full + 1)
        session.expect(program.name, steps)
        for step in steps:
            session.predict(program.name, step, out.batch(step * data.batch))
    session.writes.wait()
