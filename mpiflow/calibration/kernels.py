"""What this rank's device computes: rates, and the cost of each op in steps of training.

Kernels are called as the engine calls them: ops bound to arrays. The rates (products by dtype, a
long elementwise chain, additions beyond the caches) make the roofline; each op is then a line over
it, fitted to its calls in whole steps of small jobs, where caches are as a step leaves them.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpiflow.calibration.fit import Fit, fit_line, fit_of
from mpiflow.calibration.jobs import Drawn, Reference, references
from mpiflow.compiler.cost import ideal_seconds
from mpiflow.compiler.machine import Kernel, Machine
from mpiflow.errors import PlanError
from mpiflow.exec.bind import Shard
from mpiflow.exec.device import Cpu
from mpiflow.exec.local import LocalWorld
from mpiflow.exec.session import Session
from mpiflow.exec.transport import Transport
from mpiflow.graph.op import OUT, Op, build_op
from mpiflow.graph.rule import Shape
from mpiflow.io.pack import pack
from mpiflow.plan.records import Plan, Register, Task

_TURNS, _FEWEST_ROUNDS, _MOST_ROUNDS = 5, 3, 40
_WARM_STEPS, _FEWEST_STEPS, _MOST_STEPS = 2, 3, 30
_BEYOND_CACHES = 16 << 20
"""Bytes of each array whose addition measures memory."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations a second of products and of others by dtype, bytes a second, and a launch."""

    matrix: dict[str, float]
    vector: dict[str, float]
    memory: float
    launch: float
    fits: dict[str, Fit]

    def plain(self) -> list[float]:
        """The figures, as JSON has them."""
        return [*self.matrix.values(), *self.vector.values(), self.memory, self.launch]

    def over_ranks(self, figures: Sequence[Sequence[float]]) -> Rates:
        """The medians of the figures of all ranks."""
        values = iter([statistics.median(column) for column in zip(*figures, strict=True)])
        matrix, vector = ({k: next(values) for k in rates} for rates in (self.matrix, self.vector))
        return replace(self, matrix=matrix, vector=vector, memory=next(values), launch=next(values))


@dataclass(frozen=True, slots=True)
class Call:
    """Calls of an op on some shapes and dtypes, and the seconds of a calm one."""

    op: Op
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    seconds: float


def calm(call: Callable[[], Any], budget: float = 0.05) -> float:
    """Seconds of a call: the median of the calmest of some rounds that take about `budget`."""
    call()
    began = time.perf_counter()
    call()
    once = time.perf_counter() - began
    rounds = min(max(int(budget / _TURNS / max(once, 1e-7)), _FEWEST_ROUNDS), _MOST_ROUNDS)
    return min(statistics.median(_times(call)) for _ in range(rounds))


def _times(call: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def bound(name: str, *arrays: np.ndarray, **attributes: Any) -> tuple[Callable[[], Any], Op, Any]:
    """The call of an op on arrays that it is given, the op, and the shapes (inputs, outputs)."""
    op = build_op(name, attributes)
    inputs = tuple(array.shape for array in arrays)
    outputs = op.infer(inputs)
    dtypes = op.dtypes(tuple(array.dtype.name for array in arrays))
    outs = tuple(np.empty(s, d) for s, d in zip(outputs, dtypes, strict=True))
    work = np.empty(op.workspace(inputs, outputs, dtypes[0]), np.uint8)
    starts: dict[int | str, tuple[int, ...]] = {i: (0,) * len(s) for i, s in enumerate(inputs)}
    starts[OUT] = (0,) * len(outputs[0])
    shard = Shard(np, work, starts, True)
    return op.bind(shard, outs[0] if len(outs) == 1 else outs, *arrays), op, (inputs, outputs)


def process_base() -> int:
    """The memory of a rank that trains, without what its plan has in arenas.

    To be called before anything large is allocated: it is the most that the process ever had.
    """
    plan = references(quick=True)[0].plan()
    with tempfile.TemporaryDirectory() as folder:  # loads HDF5
        pack({"row": np.zeros((8, 8), np.uint8)}, f"{folder}/rows-*.h5")
    session = opened(plan, 3)
    for _ in range(3):
        session.timed("train")
    session.close()
    return Cpu().process_bytes() - plan.arena()


def opened(plan: Plan, steps: int, transport: Transport | None = None) -> Session:
    """A session, of this rank alone if not with others, at its first step, on drawn values."""
    transport = transport or LocalWorld(1).transports[0]
    session = Session(plan, transport, {"train": Drawn(plan)})
    session.run("initialise")
    session.expect("train", range(steps))
    return session


def measure_rates(*, quick: bool) -> Rates:
    """The rates of this rank, while the other ranks do the same."""
    small = np.ones(8, np.float32)
    launch = calm(bound("Add", small, small)[0])
    large = np.ones(_BEYOND_CACHES // 4, np.float32)
    addition = calm(bound("Add", large, large)[0], budget=0.3)
    matrix, vector, fits = {}, {}, {}
    for dtype in _dtypes():
        matrix[dtype], fits[f"products in {dtype}"] = _rate(_products(dtype, quick))
    for dtype in ("float32", "float64"):
        vector[dtype], fits[f"other operations in {dtype}"] = _rate(_elements(dtype))
    return Rates(matrix, vector, 3 * large.nbytes / addition, launch, fits)


def _rate(points: list[tuple[float, float]]) -> tuple[float, Fit]:
    """Operations a second, from operations and seconds of calls of some sizes."""
    flops, seconds = zip(*points, strict=True)
    alpha, beta = fit_line(flops, seconds)
    return 1 / max(beta, 1e-18), fit_of([alpha + beta * n for n in flops], seconds)


def _dtypes() -> tuple[str, ...]:
    """The dtypes that products are timed in; NumPy has no bfloat16 of its own."""
    try:
        Cpu().dtype("bfloat16")
    except PlanError:
        return "float32", "float64", "float16"
    return "float32", "float64", "float16", "bfloat16"


def _products(dtype: str, quick: bool) -> list[tuple[float, float]]:
    return [
        _point("MatMul", n, n, dtype, 2) for n in ((128, 256) if quick else (96, 192, 384, 512))
    ]


def _elements(dtype: str) -> list[tuple[float, float]]:
    return [_point("Gelu", n, 512, dtype, 1) for n in (32, 128, 256)]


def _point(name: str, rows: int, columns: int, dtype: str, arrays: int) -> tuple[float, float]:
    given = np.linspace(-1, 1, rows * columns, dtype=np.float32).reshape(rows, columns)
    call, op, shapes = bound(name, *[given.astype(Cpu().dtype(dtype))] * arrays)
    return op.flops(*shapes), calm(call)


def measure_ops(*, quick: bool) -> list[Call]:
    """The calls of ops in steps of the reference jobs, on this rank alone."""
    return [call for job in references(quick=quick) for call in _calls(job, quick)]


def _calls(job: Reference, quick: bool) -> list[Call]:
    plan = job.plan()
    session = opened(plan, _MOST_STEPS)
    times: dict[str, list[float]] = defaultdict(list)
    tasks: dict[str, Task] = {}
    ends = time.perf_counter() + (0.4 if quick else 1.2)
    gc.collect()
    for step in range(_MOST_STEPS):
        for task, seconds in session.timed("train"):
            tasks[task.name] = task
            if step >= _WARM_STEPS:
                times[task.name].append(seconds)
        if step >= _WARM_STEPS + _FEWEST_STEPS and time.perf_counter() > ends:
            break
    session.forget("train")
    session.close()
    program = plan.program("train")
    assert program is not None
    tensors = plan.tensors(program)
    return [_call(tasks[name], tensors, measured) for name, measured in times.items()]


def _call(task: Task, tensors: Mapping[str, Register], seconds: list[float]) -> Call:
    inputs = tuple(tensors[name] for name in task.inputs)
    outputs = tuple(tensors[name] for name in task.outputs)
    return Call(
        build_op(task.op, task.attributes),
        tuple(tensor.shape for tensor in inputs),
        tuple(tensor.shape for tensor in outputs),
        tuple(tensor.dtype for tensor in (*inputs, *outputs)),
        statistics.quantiles(seconds, n=4)[0],
    )


def fit_ops(machine: Machine, calls: Sequence[Call]) -> tuple[dict[str, Kernel], Fit]:
    """Each op as a line over the roofline of the machine's rates, and how good they are."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        ideal = ideal_seconds(machine, call.op, call.inputs, call.outputs, call.dtypes)
        points[call.op.name].append((ideal, call.seconds))
    kernels: dict[str, Kernel] = {}
    predicted: list[float] = []
    for op in sorted(points):
        ideals, seconds = [x for x, _ in points[op]], [s for _, s in points[op]]
        kernels[op] = Kernel(*_line(ideals, seconds, machine.launch))
        predicted += [kernels[op].seconds + kernels[op].factor * x for x in ideals]
    return kernels, fit_of(predicted, [s for op in sorted(points) for _, s in points[op]])


def _line(ideal: Sequence[float], seconds: Sequence[float], launch: float) -> tuple[float, float]:
    """Seconds of a call, and times the roofline.

    Where all calls are of about one size, that cannot be told apart: then it is all by the call
    if the roofline is below a launch, and all above a launch by the roofline otherwise.
    """
    if max(ideal) > 2 * min(ideal):
        return fit_line(ideal, seconds)
    middle, usual = statistics.median(ideal), statistics.median(seconds)
    if middle < launch:
        return max(usual - middle, 0.0), 1.0
    return min(launch, usual), max(usual - launch, 0.0) / middle
