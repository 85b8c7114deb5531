"""What the engine adds to kernel calls, and what handshakes between streams cost.

    python benchmarks/engine_overhead.py [PAIRS]

A chain of 64x64 products and tanh runs as the evaluate program of a plan on one rank, and as a loop
of np.matmul and np.tanh with out= on arrays made beforehand. Both run in turn, PAIRS times each;
the medians of the pairs are printed. OMP_NUM_THREADS=1 is set before NumPy is imported.

Then a step of four tasks that do nothing, on three streams, of which each waits for one before it:
with messages that are over at once, and with one that takes 2 ms, which are taken off.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import mpiflow as mf
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.exec.device import Cpu
from mpiflow.exec.engine import Engine
from mpiflow.exec.lanes import KernelLane, MessageLane
from mpiflow.exec.local import LocalWorld, run_local
from mpiflow.exec.segments import Segment
from mpiflow.exec.session import Session
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.handshakes import Item
from mpiflow.plan.records import COMPUTE, SEND, DataSet, Field, Task

LAYERS, SIZE = 500, 64


class Constant:
    """A reader of ones."""

    reading = ""

    def read(self, step, rows, out):
        for array in out.values():
            array.fill(1)

    def describe(self, step, row):
        return f"row {row}"


def model(batch):
    x = batch["x"]
    weight = mf.nn.variable("w", (SIZE, SIZE), mf.nn.normal(0.1))
    for _ in range(LAYERS):
        x = mf.tanh(mf.matmul(x, weight))
    return {"loss": mf.mean(x)}


def session(transport) -> Session:
    field = (Field("x", (SIZE,), "float32"),)
    spec = mf.Dataset("none", batch=SIZE)
    job = mf.Job("overhead", model, train=spec, evaluate=spec, optimizer=mf.SGD(lr=0.0))
    data = {
        name: DataSet(name, "none", field, (), SIZE, SIZE, False, 0, 1, 1, "")
        for name in ("train", "evaluate")
    }
    plan = compile_job(job, data, Target(Mesh((("data", 1),)), find_machine("cpu")))
    made = Session(plan, transport, {"evaluate": Constant()})
    made.run("initialise")
    return made


def bare() -> list[tuple]:
    weight = np.full((SIZE, SIZE), 0.1, np.float32)
    a, b = np.ones((SIZE, SIZE), np.float32), np.ones((SIZE, SIZE), np.float32)
    calls = []
    for _ in range(LAYERS):
        calls += [(np.matmul, (a, weight), b), (np.tanh, (b,), a)]
    return calls


class Lasting:
    """A message that takes so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def start(self) -> None:
        self.ends = time.perf_counter() + self.seconds

    def test(self) -> bool:
        return time.perf_counter() >= self.ends


def handshakes(steps: int, seconds: float) -> float:
    """Seconds of a step: a kernel, a collective, a kernel, a send, each waits for the one before.

    The collective takes `seconds`, which are not counted.
    """
    transport = LocalWorld(1).transports[0]
    engine = Engine(transport)

    def item(kind: str, *waits: tuple[str, int]) -> Item:
        return Item((Task(kind, kind, kind, kind),), waits)

    kernels = (item(COMPUTE), item(COMPUTE, ("comm.data", 1)))
    segments = tuple(Segment((int,), each.tasks, True) for each in kernels)
    lanes = {
        COMPUTE: KernelLane(COMPUTE, kernels, segments),
        "comm.data": message("comm.data", item("collective", (COMPUTE, 1)), Lasting(seconds)),
        "send.1": message("send.1", item(SEND, (COMPUTE, 2)), Lasting(0)),
    }
    for lane in lanes.values():
        lane.tie(lanes)
    stream = Cpu().stream(COMPUTE, engine.wake)
    found = []
    for step in range(steps):
        began = time.perf_counter()
        lanes[COMPUTE].use(stream)
        engine.run(tuple(lanes.values()), "step", step)
        found.append(time.perf_counter() - began - seconds)
    stream.close()
    return statistics.median(found)


def message(stream: str, item: Item, made: Lasting) -> MessageLane:
    return MessageLane(stream, (item,), (made,), ((),), polled=True)


def main(pairs: int) -> None:
    (made,) = run_local(1, session)
    calls = bare()
    tasks = len(made.plan.program("evaluate").tasks)
    made.expect("evaluate", range(pairs + 10))
    engine, loop = [], []
    for i in range(pairs + 10):
        began = time.perf_counter()
        made.run("evaluate", i)
        middle = time.perf_counter()
        for function, arrays, out in calls:
            function(*arrays, out=out)
        ended = time.perf_counter()
        if i >= 10:
            engine.append(middle - began)
            loop.append(ended - middle)
    made.close()
    added = statistics.median(e - b for e, b in zip(engine, loop, strict=True)) / len(calls)
    print(f"{tasks} tasks, {len(calls)} of them kernels of the chain, {pairs} pairs")
    print(f"bare loop   {statistics.median(loop) * 1e6:8.0f} us a pass")
    print(f"engine      {statistics.median(engine) * 1e6:8.0f} us a step")
    print(f"added       {added * 1e6:8.2f} us a kernel call (median of pairs)")
    print(f"ratio       {statistics.median(e / b for e, b in zip(engine, loop, strict=True)):8.3f}")
    for seconds, what in ((0.0, "nothing"), (2e-3, "one message")):
        spent = handshakes(max(pairs, 100), seconds) * 1e6
        print(f"handshakes  {spent:8.0f} us a step of 4 tasks on 3 streams, {what} in flight")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
