"""What ranks that wait cost their neighbours: seconds and CPU seconds of a step.

    python benchmarks/waiting.py [STEPS]         needs MPICH or Hydra's mpiexec, and 2 cores

Two jobs whose ranks wait: a pipeline of two stages, the second of which has seven eighths of the
work, and a data-parallel one. Each runs with a rank for each core and with two ranks for each, and
each in two ways: as mpiflow waits, and with the engine's wait replaced by one that blocks in MPI,
MPI_Waitany, as programs usually wait. The job on one rank is what there is to compute.

A step is as slow as its slowest rank; CPU seconds are those of all threads of all ranks. BLAS has
one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from engine_overhead import Constant

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.exec import engine
from mpiflow.exec.lanes import ReadLane
from mpiflow.exec.launch import connect
from mpiflow.exec.mpi import _MpiOperation, load
from mpiflow.exec.session import Session
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import DataSet, Field, Plan

WARM = 5
BATCH, WIDTH, LAYERS, LIGHT = 256, 512, 8, 1
MICRO_BATCHES = 4
MPIFLOW, BLOCKING = "mpiflow", "MPI_Waitany"
CASES = (
    ("data", 1, 1, (MPIFLOW,)),
    ("stage", 2, 2, (MPIFLOW, BLOCKING)),
    ("stage", 2, 1, (MPIFLOW, BLOCKING)),
    ("data", 2, 2, (MPIFLOW, BLOCKING)),
    ("data", 2, 1, (MPIFLOW, BLOCKING)),
    ("data", 4, 2, (MPIFLOW, BLOCKING)),
)
"""Axis, ranks, cores that they share, ways to wait."""


def model(batch):
    x = mf.relu(nn.Dense(WIDTH)(batch["x"]))
    for _ in range(LIGHT - 1):
        x = mf.relu(nn.Dense(WIDTH)(x))
    with mf.stage(1):
        for _ in range(LAYERS - LIGHT):
            x = mf.relu(nn.Dense(WIDTH)(x))
        return {"loss": mf.mean(mf.square(x))}


def plan_of(axis: str, ranks: int) -> Plan:
    field = (Field("x", (WIDTH,), "float32"),)
    spec = mf.Dataset("none", batch=BATCH)
    micro = MICRO_BATCHES if axis == "stage" else 1
    job = mf.Job("waiting", model, train=spec, optimizer=mf.SGD(lr=1e-3), micro_batches=micro)
    data = {"train": DataSet("train", "none", field, (), BATCH, BATCH, False, 0, 1, 1, "")}
    return compile_job(job, data, Target(Mesh(((axis, ranks),)), find_machine("cpu")))


def block() -> None:
    """Let the engine wait in MPI for any of the messages in flight."""
    waitany, begin = load().Request.Waitany, _MpiOperation._begin
    begun: list[_MpiOperation] = []
    plain = engine.Sleep.pass_time

    def remembered(self):
        begin(self)
        begun.append(self)

    def pass_time(self, lanes):
        begun[:] = [operation for operation in begun if operation._active]
        running = [operation._running[-1] for operation in begun if operation._running]
        # What is read comes from a thread, and MPI would not return for it.
        reads = any(isinstance(lane, ReadLane) and lane.done < lane.count for lane in lanes)
        if running and not reads:
            waitany(running)
        else:
            plain(self, lanes)

    _MpiOperation._begin, engine.Sleep.pass_time = remembered, pass_time


def inside(axis: str, way: str, steps: int) -> None:
    """One rank of one case; rank 0 prints the seconds of a step, and each rank's CPU seconds."""
    transport = connect()
    if way == BLOCKING:
        block()
    session = Session(plan_of(axis, transport.size), transport, {"train": Constant()})
    session.run("initialise")
    session.expect("train", range(WARM + steps))
    for step in range(WARM + steps):
        if step == WARM:
            transport.barrier().wait()
            began, used = time.perf_counter(), time.process_time()
        session.run("train", step)
    found = [time.perf_counter() - began, time.process_time() - used]
    everyone = [json.loads(data) for data in transport.all_gather(json.dumps(found).encode())]
    if transport.rank == 0:
        wall = max(seconds for seconds, _ in everyone)
        print(json.dumps([wall / steps, [cpu / steps for _, cpu in everyone]]))
    session.close()
    transport.close()


def measured(axis: str, ranks: int, cores: int, way: str, steps: int) -> tuple[float, list[float]]:
    allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    command = ["taskset", "-c", allowed, "mpiexec", "-n", str(ranks), sys.executable, __file__]
    command += ["--inside", axis, way, str(steps)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True).stdout
    return tuple(json.loads(out))


def main(steps: int) -> None:
    print("job      ranks  cores  waits by         step   CPU, all   CPU of each rank")
    for axis, ranks, cores, ways in CASES:
        for way in ways:
            wall, cpu = measured(axis, ranks, cores, way, steps)
            each = ", ".join(f"{seconds * 1e3:.1f}" for seconds in cpu)
            print(f"{axis + '=' + str(ranks):<9}{ranks:>5}{cores:>7}  {way:<12}{wall * 1e3:>9.1f}"
                  f"{sum(cpu) * 1e3:>11.1f}   {each} ms", flush=True)  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(*sys.argv[2:4], int(sys.argv[4]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
