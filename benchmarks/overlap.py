"""How much of the communication of a step is hidden behind its kernels.

    python benchmarks/two_hosts.py python benchmarks/overlap.py [mlp|resnet] [ROUNDS]

Of one bound plan on two ranks, by turns: its whole steps, steps without messages, and steps without
kernels; hidden = (compute + communication - step) / the shorter of the two, of the medians. Prints
the figures of the slower rank. Run it with one core for each rank, on two hosts, real or emulated.
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


def plan_of(name: str, ranks: int):
    model, batch, features = MODELS[name]
    field = (Field("x", (features,), "float32"),)
    spec = mf.Dataset("none", batch=batch)
    job = mf.Job(name, model, train=spec, optimizer=mf.SGD(lr=1e-3))
    data = {"train": DataSet("train", "none", field, (), batch, batch, False, 0, 1, 1, "")}
    return compile_job(job, data, Target(Mesh((("data", ranks),)), find_machine("cpu")))


class Nothing:
    """A message that is over at once."""

    def start(self) -> None:
        """There is nothing to send."""

    def test(self) -> bool:
        return True


def without_messages(lane):
    if isinstance(lane, MessageLane):
        lane._messages = (Nothing(),) * lane.count


def without_kernels(lane):
    if isinstance(lane, KernelLane):
        lane.segments = tuple(
            replace(s, calls=tuple(map(_give_back, s.calls, s.tasks, (None, *s.tasks))))
            for s in lane.segments
        )


def _give_back(call, task, before):
    """The call, if it is not the first of its task, which is the kernel."""
    return call if task is before else int


def sessions(plan, transport):
    """The plan bound three times: whole, without messages, without kernels."""
    for change in (None, without_messages, without_kernels):
        session = Session(plan, transport, {"train": Random()})
        session.run("initialise")
        if change:
            for step in session._programs["train"].steps:
                for lane in step.lanes:
                    change(lane)
        yield session


def main(name: str, rounds: int) -> None:
    transport = connect()
    plan = plan_of(name, transport.size)
    made = list(sessions(plan, transport))
    seconds: list[list[float]] = [[], [], []]
    for session in made:
        session.expect("train", range(WARM + rounds))
    for step in range(WARM + rounds):
        for found, session in zip(seconds, made, strict=True):
            transport.barrier().wait()
            began = time.perf_counter()
            session.run("train", step)
            if step >= WARM:
                found.append(time.perf_counter() - began)
    medians = [statistics.median(found) for found in seconds]
    everyone = [json.loads(data) for data in transport.all_gather(json.dumps(medians).encode())]
    if transport.rank == 0:
        whole, compute, messages = (max(values) for values in zip(*everyone, strict=True))
        hidden = (compute + messages - whole) / min(compute, messages)
        buckets = [t for t in plan.program("train").tasks if t.kind == "collective"]
        print(f"{name}: {len(buckets)} collectives, {sum(t.nbytes for t in buckets):,} bytes")
        print(f"step {whole * 1e3:.1f} ms, compute {compute * 1e3:.1f} ms, communication"
              f" {messages * 1e3:.1f} ms: {hidden:.0%} of the shorter is hidden")  # fmt: skip
    for session in made:
        session.close()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp", int((sys.argv[2:] or ["20"])[0]))
