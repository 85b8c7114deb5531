"""How much of the communication of a step is hidden behind its kernels.

    python benchmarks/two_hosts.py mpiflow calibrate -o two.toml
    python benchmarks/two_hosts.py python benchmarks/overlap.py two.toml [mlp|resnet] [ROUNDS]

Of one bound plan on two ranks, by turns: a whole step, one without messages, and one without
kernels, each as long as the slower rank takes; hidden = (compute + communication - step) / the
shorter of the two, of each round. Prints the medians. Run it with one core for each rank, on two
hosts, real or emulated.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace

import numpy as np

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.exec.lanes import KernelLane, MessageLane
from mpiflow.exec.launch import connect
from mpiflow.exec.segments import Segment
from mpiflow.exec.session import Session
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import DataSet, Field

WARM = 3
MLP_BATCH, WIDTH, LAYERS = 1536, 724, 8  # 2 MB of weights a layer
RESNET_BATCH, IMAGE, CHANNELS, BLOCKS = 16, 8, 192, 4


class Random:
    """A reader of the same random rows."""

    def read(self, step, rows, out):
        for array in out.values():
            array[...] = np.random.default_rng(rows[0]).standard_normal(array.shape)

    def describe(self, step, row):
        return f"row {row}"


def mlp(batch):
    x = batch["x"]
    for _ in range(LAYERS):
        x = mf.relu(nn.Dense(WIDTH)(x))
    return {"loss": mf.mean(mf.square(x))}


def resnet(batch):
    x = nn.Conv(CHANNELS, 3, padding="same")(mf.reshape(batch["x"], (-1, 3, IMAGE, IMAGE)))
    for _ in range(BLOCKS):
        y = mf.relu(nn.GroupNorm(8)(nn.Conv(CHANNELS, 3, padding="same")(x)))
        x = mf.relu(x + nn.GroupNorm(8)(nn.Conv(CHANNELS, 3, padding="same")(y)))
    return {"loss": mf.mean(mf.square(x))}


MODELS = {"mlp": (mlp, MLP_BATCH, WIDTH), "resnet": (resnet, RESNET_BATCH, 3 * IMAGE * IMAGE)}


def plan_of(name: str, machine: str, ranks: int):
    model, batch, features = MODELS[name]
    field = (Field("x", (features,), "float32"),)
    spec = mf.Dataset("none", batch=batch)
    job = mf.Job(name, model, train=spec, optimizer=mf.SGD(lr=1e-3))
    data = {"train": DataSet("train", "none", field, (), batch, batch, False, 0, 1, 1, "")}
    return compile_job(job, data, Target(Mesh((("data", ranks),)), find_machine(machine)))


class Nothing:
    """A message that is over at once."""

    def start(self) -> None:
        """There is nothing to send."""

    def test(self) -> bool:
        return True


class Change:
    """What the lanes of a program do as planned, and instead of it; memory is the same."""

    def __init__(self, session: Session) -> None:
        lanes = [lane for step in session._programs["train"].steps for lane in step.lanes]
        self.messages = [lane for lane in lanes if isinstance(lane, MessageLane)]
        self.kernels = [lane for lane in lanes if isinstance(lane, KernelLane)]
        self.sent = [lane._messages for lane in self.messages]
        self.run = [lane.segments for lane in self.kernels]
        self.none = [tuple(map(_without_kernels, segments)) for segments in self.run]

    def to(self, *, messages: bool, kernels: bool) -> None:
        for lane, sent in zip(self.messages, self.sent, strict=True):
            lane._messages = sent if messages else (Nothing(),) * len(sent)
        for lane, run, none in zip(self.kernels, self.run, self.none, strict=True):
            lane.segments = run if kernels else none


def _without_kernels(segment: Segment) -> Segment:
    """The calls that give back what was read, without the first of each task: its kernel."""
    firsts = zip(segment.calls, segment.tasks, (None, *segment.tasks), strict=False)
    return replace(segment, calls=tuple(c if task is before else int for c, task, before in firsts))


WAYS = (("step", True, True), ("compute", False, True), ("communication", True, False))


def main(machine: str, name: str = "mlp", rounds: str = "20") -> None:
    transport = connect()
    plan = plan_of(name, machine, transport.size)
    session = Session(plan, transport, {"train": Random()})
    session.run("initialise")
    change, steps = Change(session), (WARM + int(rounds)) * len(WAYS)
    session.expect("train", range(steps))
    seconds: dict[str, list[float]] = {way: [] for way, _, _ in WAYS}
    for step in range(steps):
        way, messages, kernels = WAYS[step % len(WAYS)]
        change.to(messages=messages, kernels=kernels)
        transport.barrier().wait()
        began = time.perf_counter()
        session.run("train", step)
        seconds[way].append(time.perf_counter() - began)
    everyone = transport.all_gather(json.dumps(list(seconds.values())).encode())
    if transport.rank == 0:
        # Of each round, so that a machine that gets slower for a while does so for all three.
        slowest = np.max([json.loads(each) for each in everyone], axis=0)[:, WARM:]
        whole, compute, messages = slowest
        hidden = (compute + messages - whole) / np.minimum(compute, messages)
        low, middle, high = np.percentile(hidden, (25, 50, 75))
        buckets = [t for t in plan.program("train").tasks if t.kind == "collective"]
        print(f"{name}: {len(buckets)} collectives, {sum(t.nbytes for t in buckets):,} bytes")
        print("medians: " + ", ".join(
            f"{way} {statistics.median(found) * 1e3:.1f} ms"
            for way, found in zip(seconds, slowest, strict=True)
        ))  # fmt: skip
        print(
            f"of the shorter is hidden: {middle:.0%} (half of the rounds {low:.0%} to {high:.0%})"
        )
    session.close()
    transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
