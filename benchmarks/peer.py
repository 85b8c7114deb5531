"""mpiflow's side of a suite that runs the same training workloads in several frameworks.

    MPIFLOW_PY=... MPIFLOW_PEER=benchmarks/peer.py ./run_all.sh        in the suite's folder
    BENCH_SUITE=FOLDER python benchmarks/peer.py --workload W1 --ranks 2 --steps 60 --json out.json

The suite's `common.py` (in BENCH_SUITE, by default the current folder) says sizes, parameters and
batches, pins each rank to a core, and measures; here stand the models, as a user writes them. Plans
are priced for MPIFLOW_CLUSTER, a machine file or a built-in machine (default: cpu).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("BENCH_SUITE", os.getcwd()))
for ours, theirs in (("PMI_RANK", "RANK"), ("PMI_SIZE", "WORLD_SIZE")):
    if ours in os.environ:
        os.environ.setdefault(theirs, os.environ[ours])

import common

VARIANTS = {
    "W1": ["mp", "zero", "dp"],
    "W2": ["auto"],
    "W3": ["auto"],
    "W4": ["mp", "dp"],
    "W5": ["1f1b", "gpipe", "dp", "nomicro"],
    "W6": ["mp-sparse", "dp-sparse"],
    "W7": ["mm", "ew"],
}
ARGUMENTS = common.parse_args("mpiflow", VARIANTS)


def _mpiexec(ranks: int, port: int, arguments: list[str]) -> list[str]:
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else "mpiexec"
    return [program, "-n", str(ranks), sys.executable, *arguments]


common.launch_if_needed(ARGUMENTS, _mpiexec)

import numpy as np

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.exec.failure import guard
from mpiflow.exec.launch import connect
from mpiflow.exec.session import Session
from mpiflow.graph.mesh import parse_mesh
from mpiflow.optim import Optimizer
from mpiflow.plan.records import DataSet, Field, Plan
from mpiflow.planning import pipeline_of

Arrays = dict[str, np.ndarray]
Model = Callable[[dict[str, mf.Tensor]], dict[str, mf.Tensor]]


@dataclass(frozen=True)
class Workload:
    """A model with its optimizer; `names` gives a parameter's name in the suite and its shape."""

    model: Model
    optimizer: Optimizer
    stored: Callable[[str], tuple[str, Callable[[np.ndarray], np.ndarray]]]
    mesh: str = "data={ranks}"
    micro_batches: int = 1
    schedule: str | None = None
    zero: int = 0
    batches: list[Arrays] = field(default_factory=list)
    values: dict[str, np.ndarray] = field(default_factory=dict)


# ---------------------------------------------------------------- names and forms of parameters
def _same(array: np.ndarray) -> np.ndarray:
    return array


def _transposed(array: np.ndarray) -> np.ndarray:
    return array.T


def _stored(name: str) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """The suite's name of a variable, and what makes ours of its array."""
    layer, _, part = name.rpartition(".")
    renamed = {"scale": "weight", "shift": "bias"}.get(part, part)
    dense = part == "weight" and layer not in ("tok", "pos", "head", "table")
    return f"{layer}.{renamed}", _transposed if dense else _same


def _image(name: str) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    stored, _ = _stored(name)
    return stored, _transposed if stored == "fc.weight" else _same


def _transformer(heads: int) -> Callable[[str], tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """Columns of `qkv` are in groups of one head here, and of queries, keys, values there."""

    def grouped(array: np.ndarray) -> np.ndarray:
        rest = array.shape[1:]
        parts = array.reshape(3, heads, -1, *rest).swapaxes(0, 1)
        return parts.reshape(array.shape[0], *rest).T

    def stored(name: str) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
        if name == "head_bias":
            return name, _same
        theirs, made = _stored(name.replace(".attention.", ".").replace(".feed.up", ".fc1")
                               .replace(".feed.down", ".fc2"))  # fmt: skip
        return theirs, grouped if ".qkv." in theirs else made

    return stored


# ---------------------------------------------------------------- the workloads
def _w1() -> Workload:
    c = common.W1

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        x = mf.relu(nn.Dense(c["hidden"], name="fc1")(batch["x"]))
        x = mf.relu(nn.Dense(c["hidden"], name="fc2")(x))
        logits = nn.Dense(c["classes"], name="fc3")(x)
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["y"]))}

    # `mpiflow plan --search --ranks 2` names the first as the best, and the second about as good,
    # for machine `cpu` and for this kind as calibrated.
    mesh = "model={ranks}" if ARGUMENTS.variant == "mp" else "data={ranks}"
    zero = 3 if ARGUMENTS.variant == "zero" else 0
    return Workload(
        model, mf.SGD(lr=c["lr"], momentum=c["momentum"]), _stored, mesh=mesh, zero=zero
    )


def _w2() -> Workload:
    c = common.W2

    def normed(x: mf.Tensor, width: int, kernel: int, stride: int, conv: str, norm: str):
        conv = nn.Conv(width, kernel, stride=stride, padding=kernel // 2, bias=False, name=conv)
        group = c["batch"] // ARGUMENTS.ranks
        return nn.BatchNorm(group=group, epsilon=c["eps"], name=norm)(conv(x))

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        x = mf.relu(normed(batch["x"], c["widths"][0], 3, 1, "conv0", "bn0"))
        for stage, width in enumerate(c["widths"]):
            for block in range(c["blocks"]):
                name = f"s{stage}b{block}"
                stride = 2 if x.shape[1] != width else 1
                y = mf.relu(normed(x, width, 3, stride, f"{name}.conv1", f"{name}.bn1"))
                y = normed(y, width, 3, 1, f"{name}.conv2", f"{name}.bn2")
                if x.shape[1] != width:
                    x = normed(x, width, 1, stride, f"{name}.down", f"{name}.bnd")
                x = mf.relu(x + y)
        logits = nn.Dense(c["classes"], name="fc")(mf.global_mean_pool(x))
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["y"]))}

    return Workload(model, mf.SGD(lr=c["lr"], momentum=c["momentum"]), _image)


def _attention(c: dict[str, Any], x: mf.Tensor, name: str, *, causal: bool) -> mf.Tensor:
    layer = nn.MultiHeadAttention(c["hidden"], c["heads"], causal=causal, name=f"{name}.attention")
    return layer(x)


def _w3() -> Workload:
    c = common.W3

    def norm(name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=c["ln_eps"], name=name)

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        words = nn.Embedding(c["vocab"], c["hidden"], name="tok")
        x = norm("ln0")(nn.Positions(c["seq"], name="pos")(words(batch["ids"])))
        for i in range(c["layers"]):
            x = norm(f"l{i}.ln1")(x + _attention(c, x, f"l{i}", causal=False))
            x = norm(f"l{i}.ln2")(x + nn.FeedForward(c["ffn"], name=f"l{i}.feed")(x))
        h = mf.gather(x, batch["mpos"])
        h = norm("mlm_ln")(mf.gelu(nn.Dense(c["hidden"], name="mlm")(h)))
        bias = nn.variable("head_bias", (c["vocab"],), nn.constant(0.0))
        logits = words.as_logits(h) + bias
        return {"loss": mf.mean_cross_entropy(logits, batch["y"])}

    optimizer = mf.Adam(c["lr"], betas=c["betas"], eps=c["eps"])
    return Workload(model, optimizer, _transformer(c["heads"]))


def _w4() -> Workload:
    c = common.W4

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        x = mf.relu(nn.Dense(c["feat"], name="fc1")(batch["x"]))
        x = nn.Dense(c["feat"], name="fc2")(x)
        replicated = mf.B if ARGUMENTS.variant == "dp" else None
        head = nn.Embedding(c["classes"], c["feat"], name="head", sbp=replicated)
        return {"loss": mf.mean(mf.cross_entropy(head.as_logits(x), batch["y"]))}

    return Workload(model, mf.SGD(lr=c["lr"], momentum=c["momentum"]), _stored)


def _w5() -> Workload:
    c = common.W5

    def norm(name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=c["ln_eps"], name=name)

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        with mf.stage(0):
            x = nn.Positions(c["seq"], name="pos")(
                nn.Embedding(c["vocab"], c["hidden"], name="tok")(batch["ids"])
            )
        for i in range(c["layers"]):
            with mf.stage(int(i >= c["split"])):
                x = x + _attention(c, norm(f"l{i}.ln1")(x), f"l{i}", causal=True)
                x = x + nn.FeedForward(c["ffn"], name=f"l{i}.feed")(norm(f"l{i}.ln2")(x))
        with mf.stage(1):
            head = nn.Embedding(c["vocab"], c["hidden"], name="head")
            logits = head.as_logits(norm("lnf")(x))
            return {"loss": mf.mean(mf.cross_entropy(logits, batch["y"]))}

    optimizer = mf.Adam(c["lr"], betas=c["betas"], eps=c["eps"])
    stored, variant, ranks = _transformer(c["heads"]), ARGUMENTS.variant, ARGUMENTS.ranks
    if variant in ("dp", "nomicro") or ranks == 1:
        micro = 1 if variant == "nomicro" else c["micro"] // ranks
        return Workload(model, optimizer, stored, micro_batches=micro)
    return Workload(model, optimizer, stored, "stage={ranks}", c["micro"], variant)


def _w6() -> Workload:
    c = common.W6

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        sbp = mf.B if ARGUMENTS.variant.startswith("dp") else mf.S(0)
        table = nn.Embedding(c["rows"], c["dim"], name="table", sbp=sbp, sparse=True)
        rows = mf.reshape(table(batch["ids"]), (c["batch"], c["fields"] * c["dim"]))
        d = mf.relu(nn.Dense(c["bottom"], name="bottom1")(batch["dense"]))
        d = mf.relu(nn.Dense(c["bottom"], name="bottom2")(d))
        x = mf.concat([rows, d])
        for i, width in enumerate(c["top"]):
            x = mf.relu(nn.Dense(width, name=f"top{i + 1}")(x))
        logits = mf.reshape(nn.Dense(1, name="top3")(x), (c["batch"],))
        return {"loss": mf.mean(mf.binary_cross_entropy(logits, batch["y"]))}

    return Workload(model, mf.SGD(lr=c["lr"]), _stored)


def _w7() -> Workload:
    ops = common.W7["ops"]
    start, second, third = common.w7_mm() if ARGUMENTS.variant == "mm" else common.w7_ew()
    batches = [{"start": start[None], "second": second[None]}]

    def products(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        n = len(start)
        weights = [nn.variable(f"w{i}", (n, n), nn.constant(0.0)) for i in range(len(third))]
        y, r = (mf.reshape(batch[name], (n, n)) for name in ("start", "second"))
        for i in range(ops):
            y = y @ weights[i % len(weights)]
        return {"loss": mf.reduce_sum(y * r)}

    def elementwise(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        y = nn.variable("start", start.shape, nn.constant(0.0))
        a, c = (mf.reshape(batch[name], start.shape) for name in ("second", "third"))
        for _ in range(ops // 4):
            y = y + mf.tanh(y) * a - c
        return {"loss": mf.reduce_sum(y)}

    optimizer = mf.SGD(lr=common.W7_LR)
    if ARGUMENTS.variant == "mm":
        values = {f"w{i}": weight for i, weight in enumerate(third)}
        return Workload(products, optimizer, _stored, batches=batches, values=values)
    batches = [{"second": second[None], "third": third[None]}]
    return Workload(elementwise, optimizer, _stored, batches=batches, values={"start": start})


WORKLOADS = {"W1": _w1, "W2": _w2, "W3": _w3, "W4": _w4, "W5": _w5, "W6": _w6, "W7": _w7}


# ---------------------------------------------------------------- running one
class Batches:
    """A reader (plan.protocols) of batches in memory, used in turn."""

    def __init__(self, batches: list[Arrays]) -> None:
        self.batches = batches

    def read(self, step: int, rows: tuple[int, int], out: Arrays) -> None:
        batch = self.batches[step % len(self.batches)]
        for name, array in out.items():
            np.copyto(array, batch[name][slice(*rows)])

    def describe(self, step: int, row: int) -> str:
        return f"row {row} of batch {step % len(self.batches)}"


def planned(workload: Workload, batches: list[Arrays]) -> Plan:
    first = batches[0]
    rows = len(next(iter(first.values())))
    fields = tuple(Field(n, a.shape[1:], a.dtype.name) for n, a in first.items())
    data = {"train": DataSet("train", "memory", fields, (), 10**9, rows, False, 0, 1, 1, "")}
    job = mf.Job(
        "peer", workload.model, train=mf.Dataset("memory", batch=rows),
        optimizer=workload.optimizer, micro_batches=workload.micro_batches,
    )  # fmt: skip
    machine = find_machine(os.environ.get("MPIFLOW_CLUSTER", "cpu")).with_ranks(ARGUMENTS.ranks)
    mesh = parse_mesh(workload.mesh.format(ranks=ARGUMENTS.ranks))
    pipeline = pipeline_of(workload.schedule, None)
    return compile_job(job, data, Target(mesh, machine, zero=workload.zero, pipeline=pipeline))


def load(session: Session, workload: Workload) -> None:
    """The suite's parameters in place of ours; what the optimizer keeps starts at 0."""
    spec = {} if workload.values else common.param_spec(ARGUMENTS.workload)
    boxes, found = session.boxes(), set()
    for name, array in session.variables.items():
        stored, made = workload.stored(name)
        if name in workload.values:
            array[...] = workload.values[name]
        elif stored in spec:
            found.add(stored)
            box = boxes[name]
            if made is _same and box:
                part = common.make_param(ARGUMENTS.workload, stored, rows=box[0])
                array[...] = part[(slice(None), *(slice(*span) for span in box[1:]))]
            else:
                whole = made(common.make_param(ARGUMENTS.workload, stored))
                array[...] = whole[tuple(slice(*span) for span in box)]
    if session.plan.mesh.size == ARGUMENTS.ranks and not workload.values:
        assert found == set(spec), f"not found: {set(spec) - found}"


def main() -> None:
    began = time.perf_counter()
    workload = WORKLOADS[ARGUMENTS.workload]()
    batches = workload.batches or [
        common.make_batch(ARGUMENTS.workload, i) for i in range(common.POOL)
    ]
    transport = connect()
    with guard(transport):
        session = Session(planned(workload, batches), transport, {"train": Batches(batches)})
        session.run("initialise")
        load(session, workload)
        session.expect("train", range(10**6))
        common.measure(
            ARGUMENTS,
            lambda step: session.run("train", step)["loss"],
            float,
            lambda loss: None,
            0 if ARGUMENTS.workload == "W7" else common.samples(ARGUMENTS.workload),
            time.perf_counter() - began,
            mf.__version__,
            barrier=lambda: transport.barrier().wait(),
            async_ok=False,
            micro_ops=common.W7["ops"] if ARGUMENTS.workload == "W7" else 0,
        )
        session.forget("train")
        session.close()


if __name__ == "__main__":
    main()
