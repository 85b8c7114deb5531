"""What a plan says beside its programs: settings, what is computed, what reading takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from mpiflow.compiler.arrange import NUMERICS
from mpiflow.compiler.boxing import local_shape
from mpiflow.compiler.cost import rounded
from mpiflow.compiler.signature import Placed
from mpiflow.errors import JobError
from mpiflow.graph.graph import Graph
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import S
from mpiflow.job import Best, Job
from mpiflow.plan.records import READ, DataSet, Layouts, Program, Register, Settings


def settings(job: Job, train: DataSet, programs: tuple[Program, ...]) -> Settings:
    """How long a run is, when it saves, evaluates and stops."""
    best = job.best
    return Settings(
        epochs=job.epochs,
        steps_per_epoch=train.rows // train.batch,
        save_steps=job.save.steps,
        save_epochs=job.save.epochs,
        save_minutes=job.save.minutes,
        keep=job.save.keep,
        evaluate_steps=job.evaluate_every.steps if job.evaluations else 0,
        evaluate_epochs=job.evaluate_every.epochs if job.evaluations else 0,
        best=_best_metric(job, best, programs) if best else "",
        mode=best.mode if best else "max",
        patience=best.patience if best else 0,
    )


def _best_metric(job: Job, best: Best, programs: tuple[Program, ...]) -> str:
    """The metric with the name of its evaluation before it."""
    name, _, output = best.metric.rpartition(".")
    name = name or next(iter(job.evaluations))
    given = {f"{p.data}.{o.name}" for p in programs if p.data != "train" for o in p.outputs}
    if f"{name}.{output}" not in given:
        raise JobError(
            f"best: there is no metric {best.metric!r}; the evaluations give"
            f" {', '.join(sorted(given))}"
        )
    return f"{name}.{output}"


def identity(job: Job, model: str, graph: Graph, train: DataSet) -> tuple[tuple[str, str], ...]:
    """What is computed, by section; nothing of ranks, mesh, machine, device or file names.

    `model` is the hash of the graph as traced, without the optimizer's nodes.
    """
    fields = ", ".join(f"{f.name} {f.dtype}{list(f.shape)}" for f in train.fields)
    variables = "; ".join(str(v.tensor) for v in graph.variables.values())
    return (
        ("batch", str(train.batch)),
        ("data", f"{train.rows} rows, fingerprint {train.fingerprint or 'none (declared)'}"),
        ("fields", fields),
        ("model", model),
        ("numerics", NUMERICS),
        ("optimizer", repr(job.optimizer)),
        ("precision", job.precision),
        ("order", f"shuffle={train.shuffle} seed={train.seed} lanes={train.lanes}"
                  f" window={train.window}"),
        ("seed", str(job.seed)),
        ("variables", variables),
        *((("frozen", ", ".join(job.frozen)),) if job.frozen else ()),
    )  # fmt: skip


def quality(placed: Placed, limit: int) -> Layouts:
    """How good the layouts of a step are."""
    saving = max(placed.seconds - placed.lower, 0.0)
    gap = saving / placed.seconds if placed.seconds else 0.0
    return Layouts(rounded(placed.seconds), float(f"{gap:.1e}"), limit)


def idle_ranks(programs: tuple[Program, ...], whole: Mesh) -> Iterator[str]:
    """Which batches have fewer rows than ranks that split them: that is right, but slow."""
    for program in programs:
        if not program.data or program.name.endswith("_tail"):
            continue
        mesh = whole.within_stage(program.stage).in_time(program.micro_batches)
        what = "micro-batch" if mesh.timed else "batch"
        rows = program.rows // program.micro_batches
        parts = max((_parts(r, mesh) for r in _read(program)), default=1)
        if rows < parts:
            yield (
                f"data set {program.data!r}: a {what} of {rows} rows is split over {parts}"
                f" ranks, so {parts - rows} of them have none; a larger {what} would use them"
            )


def reading_bytes(
    programs: tuple[Program, ...],
    data: dict[str, DataSet],
    whole: Mesh,
    cache_bytes: Callable[..., int],
) -> int:
    """What reading keeps in memory, of all data sets together."""
    cached: dict[str, int] = {}
    for program in programs:
        reads = _read(program)
        if reads and program.data not in cached:
            mesh = whole.within_stage(program.stage).in_time(program.micro_batches)
            held = local_shape(reads[0].shape, reads[0].layout, mesh)[0]
            first = range(0, program.rows, program.rows // program.micro_batches)
            spans = [(start, start + held) for start in first]
            cached[program.data] = cache_bytes(data[program.data], *spans)
    return sum(cached.values())


def _read(program: Program) -> list[Register]:
    """The registers that a program reads into."""
    names = {name for task in program.tasks if task.stream == READ for name in task.outputs}
    return [register for register in program.registers if register.name in names]


def _parts(register: Register, mesh: Mesh) -> int:
    """How many ranks the first dim is split over."""
    pairs = list(zip(register.layout, mesh.sizes, strict=True))[mesh.timed :]
    return prod(size for sbp, size in pairs if sbp == S(0))
