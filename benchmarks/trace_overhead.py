"""What a step costs more when it is metered, as every step is, and when it is traced.

    python benchmarks/trace_overhead.py [ROUNDS]

A training step of many small kernels, one of larger ones, and those of small models as they are, on
one rank. Two sessions of the same plan run in turn: one that is not watched at all, and one that is
metered, with every other step traced. Medians of the differences within a round are printed, in CPU
time of the thread as well, which others on the machine disturb less. OMP_NUM_THREADS=1 is set
before NumPy is imported.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mpiflow as mf
from mpiflow.calibration.jobs import Drawn, references
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.exec.local import run_local
from mpiflow.exec.meter import Meter
from mpiflow.exec.session import Session
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import DataSet, Field, Plan

WARM = 10
TRACED = 1 << 20
"""The number of the first step that is traced; that of a step is for messages only."""


def plan_of(layers: int, size: int) -> Plan:
    """A chain of products and tanh, forward and backward, with its update."""

    def model(batch):
        x = batch["x"]
        weight = mf.nn.variable("w", (size, size), mf.nn.normal(0.1))
        for _ in range(layers):
            x = mf.tanh(mf.matmul(x, weight))
        return {"loss": mf.mean(x)}

    spec = mf.Dataset("none", batch=size)
    job = mf.Job("overhead", model, train=spec, optimizer=mf.SGD(lr=0.0))
    field = (Field("x", (size,), "float32"),)
    data = {"train": DataSet("train", "none", field, (), size, size, False, 0, 1, 1, "")}
    return compile_job(job, data, Target(Mesh((("data", 1),)), find_machine("cpu")))


def session(plan: Plan, steps: int) -> Session:
    """One that is ready to run so many steps."""
    (made,) = run_local(1, lambda transport: Session(plan, transport, {"train": Drawn(plan)}))
    made.run("initialise")
    made.expect("train", range(steps))
    return made


def measure(what: str, plan: Plan, rounds: int) -> None:
    steps = rounds + WARM
    plain, watched = session(plan, steps), session(plan, 2 * steps)
    meter = Meter()
    watched.observe("train", meter, range(TRACED, TRACED + steps))
    runs = ((plain, 0), (watched, 0), (watched, TRACED))
    found: dict[str, list[list[float]]] = {"wall": [], "cpu": []}
    for i in range(steps):
        wall, cpu = [], []
        for made, first in runs[i % 3 :] + runs[: i % 3]:
            began, used = time.perf_counter(), time.thread_time()
            made.run("train", first + i)
            cpu.append(time.thread_time() - used)
            wall.append(time.perf_counter() - began)
            meter.step(wall[-1])
        for name, seconds in (("wall", wall), ("cpu", cpu)):
            found[name].append(seconds[-(i % 3) :] + seconds[: -(i % 3)] if i % 3 else seconds)
    plain.close()
    watched.close()
    kernels = sum(task.kind == "compute" for task in plan.program("train").tasks)
    print(f"{what}: {kernels} kernels, {rounds} rounds:")
    for name, seconds in found.items():
        alone = statistics.median(s[0] for s in seconds[WARM:])
        for label, place in (("metered", 1), ("traced", 2)):
            report(name, alone, label, [s[place] - s[0] for s in seconds[WARM:]], kernels)
        more = [s[2] - s[1] for s in seconds[WARM:]]
        report(name, alone, "traced beyond metered", more, kernels)


def report(name: str, alone: float, label: str, more: list[float], kernels: int) -> None:
    seconds = statistics.median(more)
    print(
        f"  {name:<4} {alone * 1e6:9.0f} us a step, {label:<21} {seconds * 1e6:+8.1f} us"
        f" ({seconds / alone:+.2%}, {seconds / kernels * 1e9:+.0f} ns a kernel)"
    )


def main(rounds: int) -> None:
    measure("64 x 64", plan_of(150, 64), rounds)
    measure("256 x 256", plan_of(10, 256), rounds)
    jobs = {job.name.partition("-")[0]: job for job in references(quick=True)}
    for name, job in jobs.items():
        measure(name, job.plan(), rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
