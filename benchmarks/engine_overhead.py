"""What the engine adds to kernel calls, and what handshakes between streams cost.

    python benchmarks/engine_overhead.py [PAIRS]

A chain of 64x64 products and tanh, 200 layers with a weight each, runs as a plan on one rank, and
as a loop of the same calls of NumPy with out= on arrays made beforehand: forward as its evaluate
program, and forward, backward and update (1,000 ops of the chain, and the update) as its train
program. Both run in turn, PAIRS times each; the medians of the pairs are printed. OMP_NUM_THREADS=1
is set before NumPy is imported.

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

LAYERS, SIZE, RATE = 200, 64, 1e-3
_BLOCK = 1 << 15
"""Elements of an update that are done at a time, as mpiflow does."""


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
    for i in range(LAYERS):
        weight = mf.nn.variable(f"w{i}", (SIZE, SIZE), mf.nn.normal(0.1))
        x = mf.tanh(mf.matmul(x, weight))
    return {"loss": mf.mean(x)}


def session(transport) -> Session:
    field = (Field("x", (SIZE,), "float32"),)
    spec = mf.Dataset("none", batch=SIZE)
    job = mf.Job("overhead", model, train=spec, evaluate=spec, optimizer=mf.SGD(lr=RATE))
    data = {
        name: DataSet(name, "none", field, (), SIZE, SIZE, False, 0, 1, 1, "")
        for name in ("train", "evaluate")
    }
    plan = compile_job(job, data, Target(Mesh((("data", 1),)), find_machine("cpu")))
    made = Session(plan, transport, {name: Constant() for name in data})
    made.run("initialise")
    return made


class Bare:
    """The calls of NumPy that a step is, each as a function, its operands, and `out`."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.weights = 0.1 * rng.standard_normal((LAYERS, SIZE, SIZE), np.float32)
        self.gradients = np.zeros_like(self.weights)
        self.made = np.ones((LAYERS + 1, SIZE, SIZE), np.float32)
        self.scratch = np.empty(_BLOCK, np.float32)

    def forward(self) -> list[tuple]:
        calls = []
        for i in range(LAYERS):
            x, y = self.made[i : i + 2]
            calls += [(np.matmul, (x, self.weights[i]), y), (np.tanh, (y,), y)]
        return calls

    def backward(self) -> list[tuple]:
        dy, dx = np.full((2, SIZE, SIZE), 1 / SIZE**2, np.float32)
        a = self.scratch[: SIZE**2].reshape(SIZE, SIZE)
        calls = []
        for i in reversed(range(LAYERS)):
            x, y = self.made[i : i + 2]
            calls += [
                (np.multiply, (y, y), a), (np.subtract, (1, a), a), (np.multiply, (dy, a), dx),
                (np.matmul, (x.T, dx), self.gradients[i]),
                (np.matmul, (dx, self.weights[i].T), dy),
            ]  # fmt: skip
        return calls

    def update(self) -> list[tuple]:
        weights, gradients = self.weights.reshape(-1), self.gradients.reshape(-1)
        rate, calls = np.float32(RATE), []
        for first in range(0, weights.size, _BLOCK):
            w, g = weights[first:][:_BLOCK], gradients[first:][:_BLOCK]
            a = self.scratch[: w.size]
            calls += [(np.multiply, (g, rate), a), (np.subtract, (w, a), w)]
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


def compare(made: Session, program: str, calls: list[tuple], pairs: int) -> None:
    """Steps of a program and passes through the calls, by turns."""
    made.expect(program, range(pairs + 10))
    engine, loop = [], []
    for i in range(pairs + 10):
        began = time.perf_counter()
        made.run(program, i)
        middle = time.perf_counter()
        for function, arrays, out in calls:
            function(*arrays, out=out)
        ended = time.perf_counter()
        if i >= 10:
            engine.append(middle - began)
            loop.append(ended - middle)
    both = list(zip(engine, loop, strict=True))
    tasks = len(made.plan.program(program).tasks)
    print(f"{program}: {tasks} tasks, {len(calls)} calls of NumPy, {pairs} pairs")
    print(f"bare loop   {statistics.median(loop) * 1e6:8.0f} us a pass")
    print(f"engine      {statistics.median(engine) * 1e6:8.0f} us a step")
    print(f"added       {statistics.median(e - b for e, b in both) / tasks * 1e6:8.2f} us a task")
    print(f"ratio       {statistics.median(e / b for e, b in both):8.3f}")


def main(pairs: int) -> None:
    (made,) = run_local(1, session)
    bare = Bare()
    forward = bare.forward()
    compare(made, "evaluate", forward, pairs)
    compare(made, "train", [*forward, *bare.backward(), *bare.update()], pairs)
    made.close()
    for seconds, what in ((0.0, "nothing"), (2e-3, "one message")):
        spent = handshakes(max(pairs, 100), seconds) * 1e6
        print(f"handshakes  {spent:8.0f} us a step of 4 tasks on 3 streams, {what} in flight")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
