"""Small training jobs that between them use most ops, for `mpiflow calibrate` to time.

Each is a model of `mpiflow.models` at a size that steps in milliseconds, without data files. A job
is there in several sizes, since a kernel's cost is a line: so much a call, so much for each byte
or operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.arrange import Target
from mpiflow.compiler.driver import compile_job
from mpiflow.compiler.machine import find_machine
from mpiflow.graph.mesh import Mesh
from mpiflow.models.bert import BERT
from mpiflow.models.convnet import small_alexnet
from mpiflow.models.faces import Faces
from mpiflow.models.gpt import GPT
from mpiflow.models.resnet import ResNet
from mpiflow.models.widedeep import WideDeep
from mpiflow.plan.records import READ, DataSet, Field, Plan

ALONE = Mesh((("data", 1),))
Fields = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class Reference:
    """A model on fields of rows, and how it is trained."""

    name: str
    fields: Fields
    model: Callable[[dict[str, mf.Tensor]], dict[str, mf.Tensor]]
    batch: int
    optimizer: Any

    def plan(self, mesh: Mesh = ALONE, micro_batches: int = 1) -> Plan:
        """The plan of its training, on one rank if not on others."""
        rows = 100 * self.batch
        given = mf.Dataset("none", batch=self.batch, fields=self.fields, rows=rows)
        job = mf.Job(self.name, self.model, train=given, optimizer=self.optimizer,
                     micro_batches=micro_batches)  # fmt: skip
        fields = tuple(Field(name, *field) for name, field in self.fields.items())
        data = DataSet("train", "none", fields, (), rows, self.batch, False, 0, 1, 1, "")
        return compile_job(job, {"train": data}, Target(mesh, find_machine("cpu")))


def references(*, quick: bool) -> list[Reference]:
    """The jobs to time, in two or three sizes each; four of them in one size if `quick`."""
    few = [_dense(128, 512), _images(8, 16), _bert(16, 128, 48), _faces(16, 512)]
    if quick:
        return few
    return [
        *few,
        *(_dense(32, 64), _images(2, 8), _bert(4, 64, 32), _faces(4, 64)),
        *(_dense(512, 1024), _images(8, 32), _alexnet(4), _alexnet(16)),
        *(_gpt(2, 64), _gpt(8, 192), _clicks(64, 8), _clicks(512, 32)),
    ]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A job in two stages, and `alone` the same kernels on one rank, without messages."""

    staged: Plan
    alone: Plan


def pipelines(ranks: int, *, quick: bool) -> list[Pipeline]:
    """Jobs in micro-batches, on an even number of ranks: many small messages."""
    copies = ranks // 2
    mesh = Mesh((("stage", 2), ("data", copies)) if copies > 1 else (("stage", 2),))
    kinds: list[Callable[[int], Reference]] = [
        lambda rows: _bert(rows, 64, 32),
        lambda rows: _gpt(rows, 64),
        lambda rows: _dense(16 * rows, 512),
    ]
    return [
        Pipeline(kind(16 * copies).plan(mesh, 8), kind(16).plan(ALONE, 8))
        for kind in kinds[: 1 if quick else None]
    ]


def _sgd() -> mf.SGD:
    return mf.SGD(lr=mf.Cosine(0.01), momentum=0.9, weight_decay=1e-4)


def _adam() -> mf.AdamW:
    return mf.AdamW(lr=mf.LinearDecay(1e-3, warmup=2), weight_decay=0.01, clip=1.0)


def _classified(logits: mf.Tensor, label: mf.Tensor) -> dict[str, mf.Tensor]:
    return {
        "loss": mf.mean(mf.cross_entropy(logits, label)),
        "accuracy": mf.mean(mf.equal(mf.argmax(logits), label)),
    }


def _dense(batch: int, width: int) -> Reference:
    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        x = mf.cast(batch["x"], "float32") / 16
        for i in range(2):
            x = mf.relu(nn.Dense(width, name=f"dense{i}")(x))
        return _classified(nn.Dense(10, name="out")(x), batch["label"])

    fields: Fields = {"x": ((width // 2,), "uint8"), "label": ((), "int64")}
    return Reference(f"dense-{batch}x{width}", fields, model, batch, _sgd())


def _images(batch: int, width: int) -> Reference:
    network = ResNet((1, 1, 1, 1), classes=10, width=width, small=True)
    return _pictures(f"images-{batch}x{width}", network, batch)


def _alexnet(batch: int) -> Reference:
    return _pictures(f"alexnet-{batch}", small_alexnet(), batch)


def _pictures(name: str, network: Callable[[mf.Tensor], mf.Tensor], batch: int) -> Reference:
    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        image = (mf.cast(batch["image"], "float32") - 128.0) / 64
        return _classified(network(image), batch["label"])

    fields: Fields = {"image": ((1, 28, 28), "uint8"), "label": ((), "uint16")}
    return Reference(name, fields, model, batch, _sgd())


def _bert(batch: int, width: int, length: int) -> Reference:
    encoder = BERT(2, width, 4, vocabulary=8 * width, positions=length)
    hidden = length // 6

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        given = (batch[name] for name in ("tokens", "segment", "label", "next", "positions"))
        masked, order = encoder.losses(*given)
        return {"loss": masked + order, "masked": masked, "next": order}

    fields: Fields = {
        "tokens": ((length,), "uint16"), "segment": ((length,), "uint8"),
        "positions": ((hidden,), "int32"), "label": ((hidden,), "int32"), "next": ((), "uint8"),
    }  # fmt: skip
    return Reference(f"bert-{batch}x{width}", fields, model, batch, _adam())


def _gpt(batch: int, width: int) -> Reference:
    decoder = GPT(2, width, 4, 8 * width, 48, rotary_base=10000.0, gated=True, rms=True,
                  dropout=0.1, bias=False)  # fmt: skip

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        return {"loss": decoder.loss(batch["tokens"])}

    fields: Fields = {"tokens": ((49,), "uint16")}
    return Reference(f"gpt-{batch}x{width}", fields, model, batch, _adam())


def _clicks(batch: int, width: int) -> Reference:
    tables = (40, 1000, 20_000)
    network = WideDeep(tables, width, (8 * width, 4 * width))

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        ids = [batch[f"id{i}"] for i in range(len(tables))]
        logits = network(ids, batch["numbers"])
        return {"loss": mf.mean(mf.binary_cross_entropy(logits, batch["click"]))}

    fields: Fields = {f"id{i}": ((), "int64") for i in range(len(tables))}
    fields |= {"numbers": ((8,), "float32"), "click": ((), "uint8")}
    return Reference(f"clicks-{batch}x{width}", fields, model, batch, mf.Adam(lr=1e-3))


def _faces(batch: int, classes: int) -> Reference:
    faces = Faces(ResNet((1, 1, 1, 1), width=4, small=True), classes, 32, "arc", 0.3, 16.0)

    def model(batch: dict[str, mf.Tensor]) -> dict[str, mf.Tensor]:
        image = mf.cast(batch["image"], "float32") / 64
        cosines, column = faces.compared(faces(image), batch["label"])
        nearest = mf.greater_equal(mf.pick(cosines, column), mf.reduce_max(cosines, -1))
        return {"loss": faces.loss(cosines, column), "accuracy": mf.mean(nearest)}

    fields: Fields = {"image": ((1, 28, 28), "uint8"), "label": ((), "uint16")}
    return Reference(f"faces-{batch}x{classes}", fields, model, batch, _sgd())


class Drawn:
    """A reader of random values; indices are below the limits that the reads of the plan have."""

    reading = ""

    def __init__(self, plan: Plan) -> None:
        reads = [t.attributes for p in plan.programs for t in p.tasks if t.kind == READ]
        self._limits = {
            field: limit
            for read in reads
            for field, limit in zip(
                read["fields"], read.get("limits") or [0] * len(read["fields"]), strict=True
            )
        }
        self._random = np.random.default_rng(0)

    def read(self, step: int, rows: tuple[int, int], out: Mapping[str, Any]) -> None:
        """Fill `out`."""
        for name, array in out.items():
            if array.dtype.kind == "f":
                array[...] = self._random.random(array.shape)
            else:
                array[...] = self._random.integers(0, self._limits[name] or 2, array.shape)

    def describe(self, step: int, row: int) -> str:
        """Where a row is from."""
        return f"row {row} of step {step}"
