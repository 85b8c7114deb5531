"""Jobs for pipeline stages, and what they do on any mesh, measured beside what plans predict."""

import random
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np
from jobs import CLASSES, MemoryReader, data_set, evaluate, on_ranks, target
from micro_jobs import WORDS, arrays, job

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.pipeline import SCHEDULES, Pipeline
from mpiflow.errors import CompileError, UsageError
from mpiflow.graph.mesh import parse_mesh
from mpiflow.plan.records import Field
from mpiflow.plan.traffic import bytes_sent

BATCH, STEPS, TEST_ROWS = 24, 4, 37


def layers(batch, dtype):
    """Dropout, and a mean over the rows with a label: their count takes a loop of its own."""
    x = mf.relu(nn.Dense(7, name="in")(mf.cast(batch["x"], dtype)))
    for i in range(3):
        x = x + mf.dropout(mf.gelu(nn.Dense(7, name=f"layer{i}")(x)), 0.1)
    logits = nn.Dense(CLASSES, name="out")(x)
    return {"loss": mf.mean_cross_entropy(logits, batch["label"], ignore=-1)}


def tied(batch, dtype):
    """A transformer whose first layer looks up the table that its last one multiplies with."""
    table = nn.Embedding(WORDS, 8, name="words", dtype=dtype)
    x = table(batch["ids"])
    attention = nn.MultiHeadAttention(8, 4, causal=True, dropout=0.1, axis="model", name="attend")
    mask = mf.not_equal(batch["ids"], 0)
    x = x + mf.dropout(attention(nn.LayerNorm(name="norm")(x), mask=mask), 0.2)
    label = mf.where(mask, batch["ids"], mf.cast(mask, "int64") - 1)
    logits = table.as_logits(x)
    return {"loss": mf.mean_cross_entropy(logits, label, smoothing=0.1, ignore=-1)}


def branches(batch, dtype):
    """Skips over several stages, a gain that is used at both ends, and several losses."""
    gain = nn.variable("gain", (7,), nn.constant(1.0), dtype=dtype)
    a = mf.tanh(nn.Dense(7, name="a")(mf.cast(batch["x"], dtype)) * gain)
    b = mf.tanh(nn.Dense(7, name="b")(a))
    c = mf.tanh(nn.Dense(7, name="c")(b) + a)
    d = nn.Dense(7, name="d")(mf.dropout(c, 0.1)) * gain + b
    y = mf.reshape(nn.Dense(1, name="y")(d), (-1,))
    rows = mf.square(y - mf.cast(batch["weight"], dtype))
    early = mf.mean(mf.square(b))
    return {
        "loss": mf.mean(rows) + 0.1 * early,
        "early": early,
        "worst": mf.reduce_max(rows),
        "sum": mf.total(rows),
    }


def weighted(batch, dtype):
    """Weights that are used at both ends, and whose sum is of the whole batch."""
    weight = mf.cast(batch["weight"], dtype)
    x = mf.cast(batch["x"], dtype) * mf.reshape(weight, (-1, 1))
    x = mf.tanh(nn.Dense(5, name="middle")(mf.tanh(nn.Dense(5, name="in")(x))))
    rows = mf.square(mf.reshape(nn.Dense(1, name="out")(x), (-1,)) - weight)
    return {"loss": mf.reduce_sum(rows * weight) / mf.reduce_sum(weight)}


def penalised(batch, dtype):
    """A loss that takes the squares of all weights, in turn."""
    x, penalty = mf.cast(batch["x"], dtype), 0.0
    for i in range(4):
        weight = nn.variable(f"weight{i}", (7, 7), nn.constant(0.1 * (i + 1)), dtype=dtype)
        x = mf.tanh(nn.Dense(7, name=f"in{i}")(x) @ weight)
        penalty = penalty + mf.mean(mf.square(weight))
    return {"loss": mf.mean(mf.square(x)) + 0.1 * penalty, "penalty": penalty}


OPTIMIZERS = {
    "sgd": mf.SGD(lr=0.05, momentum=0.9, nesterov=True, clip=1.0, weight_decay=0.01),
    "adam": mf.AdamW(mf.Cosine(0.02, warmup=3, steps=6), clip=0.5, ema=0.9),
    "lamb": mf.LAMB(mf.LinearDecay(0.02, steps=6), weight_decay=0.1),
}


@dataclass(frozen=True)
class Case:
    """A model with how it is trained, and on what. `forced` is the seed of random layouts."""

    model: object
    mesh: str
    micro_batches: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    zero: int = 0
    optimizer: str = "adam"
    dtype: str = "float64"
    precision: str = "float32"
    forced: int | None = None
    recompute: str | None = None

    @property
    def ranks(self):
        return parse_mesh(self.mesh).size

    @property
    def alone(self):
        """The same training on one rank; in 16 bits that of as many micro-batches."""
        cut = 1 if self.precision == "float32" else self.micro_batches
        return replace(
            self, mesh="data=1", micro_batches=cut, schedule="1f1b", virtual=1, zero=0, forced=None,
            recompute=None,
        )  # fmt: skip

    def __str__(self):
        return (
            f"{self.model.__name__}-{self.optimizer}-{self.mesh}-{self.micro_batches}"
            f"-{self.schedule}-{self.zero}{self.recompute or ''}"
        )


def random_case(seed):
    """Any model on any mesh of up to six ranks, in any way that its plan can be made."""
    draw = random.Random(seed)
    while True:
        axes = {
            "stage": draw.randint(1, 4),
            "data": draw.randint(1, 3),
            "model": draw.randint(1, 2),
        }
        if prod(axes.values()) > 6:
            continue
        case = Case(
            draw.choice((layers, tied, branches, weighted)),
            ",".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "data=1",
            draw.choice([n for n in range(1, 13) if BATCH % n == 0]),
            draw.choice(SCHEDULES),
            optimizer=draw.choice(sorted(OPTIMIZERS)),
            zero=draw.randint(0, 3),
            recompute=draw.choice((None, "selective", "full")),
            forced=draw.choice((None, draw.randrange(1000))),
        )
        if case.schedule == "interleaved":
            case = replace(case, virtual=draw.randint(2, 3))
        with suppress(UsageError, CompileError):  # as not every mesh has stages that can be cut
            plan_of(case)
            return case


@cache
def plan_of(case):
    from forced_layouts import forced

    made = job(
        lambda rows: case.model(rows, case.dtype),
        BATCH,
        case.micro_batches,
        OPTIMIZERS[case.optimizer],
        precision=case.precision,
        evaluate=mf.Dataset("test-*.h5", batch=BATCH),
    )
    fields = tuple(Field(n, a.shape[1:], a.dtype.name) for n, a in arrays(BATCH).items())
    rows = len(arrays(BATCH)["x"])
    data = {
        name: replace(data_set(name, count, BATCH), fields=fields)
        for name, count in (("train", rows), ("evaluate", TEST_ROWS))
    }
    pipeline = Pipeline(case.schedule, case.virtual)
    wanted = target(case.mesh, zero=case.zero, pipeline=pipeline, recompute=case.recompute)
    with forced(case.forced):
        return compile_job(made, data, wanted)


@dataclass(frozen=True)
class Measured:
    """What a rank found: outputs of steps and of an evaluation, bytes of its arena and sent."""

    outputs: list
    evaluated: list
    peak: int
    sent: list


@cache
def ran(case):
    """What each rank measured."""

    def work(session):
        session.expect("train", range(STEPS))
        outputs, sent = [], [session.sent]
        for step in range(STEPS):
            outputs.append(session.run("train", step))
            sent.append(session.sent)
        return Measured(outputs, evaluate(session), session.arena.peak, np.diff(sent).tolist())

    plan = plan_of(case)
    readers = {d.name: MemoryReader(arrays(BATCH), BATCH) for d in plan.data}
    return on_ranks(plan, work, readers)


def of_stages(plan, found):
    """(plan of a stage, what its ranks found) of each stage."""
    stages = plan.stages()
    return [
        (stage, [f for rank, f in enumerate(found) if plan.mesh.stage_of(rank)[0] == i])
        for i, stage in enumerate(stages)
    ]


def predicted(stage):
    """Bytes of a stage's arena, and those that its rank that sends most sends in a step."""
    return stage.arena(), bytes_sent(stage, stage.program("train"))
