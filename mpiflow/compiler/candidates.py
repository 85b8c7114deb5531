"""What a search may try: meshes, micro-batches, schedules, levels of ZeRO and of recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from mpiflow.compiler.domains import DATA
from mpiflow.compiler.pipeline import ONE_FORWARD_ONE_BACKWARD, Pipeline
from mpiflow.compiler.recompute import FULL, SELECTIVE
from mpiflow.graph.mesh import STAGE, Mesh

MODEL = "model"
"""The axis over which the compiler splits what it likes; all but its name is as any other's."""
_TURNS = 8
"""Micro-batches for each stage, at most."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """How a job may run.

    `zero` None is level 0, `recompute` None is none of it. If it is `auto`, a limit on memory may
    ask for more of both, piece by piece, which takes many plans; any other is planned as it is.
    """

    mesh: Mesh
    micro_batches: int
    zero: int | None = None
    pipeline: Pipeline = ONE_FORWARD_ONE_BACKWARD
    recompute: str | None = None
    auto: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `mpiflow plan` that make it."""
        found = ["--mesh", str(self.mesh), "--micro-batches", str(self.micro_batches)]
        if self.pipeline.schedule != ONE_FORWARD_ONE_BACKWARD.schedule:
            found += ["--schedule", self.pipeline.schedule]
        if self.pipeline.virtual > 1:
            found += ["--virtual", str(self.pipeline.virtual)]
        if self.zero is not None:
            found += ["--zero", str(self.zero)]
        if self.recompute is not None:
            found += ["--recompute", self.recompute]
        return tuple(found)

    def __str__(self) -> str:
        return " ".join(self.options)


@dataclass(frozen=True, slots=True)
class Space:
    """What bounds a search; what is not None is given and stays.

    `layers` is how many pieces the model can be cut into, `devices` the ranks of a node.
    Recomputation is tried where the model is `recomputable` and something limits memory.
    """

    ranks: int
    batch: int
    layers: int
    devices: int
    mesh: Mesh | None = None
    micro_batches: int | None = None
    zero: int | None = None
    pipeline: Pipeline | None = None
    recompute: str | None = None
    recomputable: bool = False

    def candidates(self) -> list[Candidate]:
        """All that there is to try, few stages and a short axis `model` first."""
        return [
            Candidate(mesh, count, zero, pipeline, recompute)
            for mesh in self._meshes()
            for count in self._counts(mesh)
            for pipeline in self._pipelines(mesh, count)
            for zero in self._levels(mesh, count)
            for recompute in self._recomputed()
        ]

    def _meshes(self) -> list[Mesh]:
        if self.mesh is not None:
            return [self.mesh]
        return [
            _mesh(stages, self.ranks // stages // model, model)
            for stages in _divisors(self.ranks, self.layers)
            for model in _divisors(self.ranks // stages, self.devices)
        ]

    def _counts(self, mesh: Mesh) -> list[int]:
        """Numbers of micro-batches: powers of two, and such times the number of stages."""
        if self.micro_batches is not None:
            return [self.micro_batches]
        data = dict(mesh.axes).get(DATA, 1)
        powers = [2**i for i in range(self.batch.bit_length())]
        wanted = {*powers, *(mesh.stages * power for power in powers)}
        return [
            count
            for count in sorted(wanted)
            if self.batch % count == 0
            and count <= _TURNS * mesh.stages
            and (count == 1 or count * data <= self.batch)  # a row for each rank
        ]

    def _pipelines(self, mesh: Mesh, count: int) -> list[Pipeline]:
        if self.pipeline is not None:
            known = [self.pipeline]
        elif mesh.stages == 1 or count == 1:
            known = [ONE_FORWARD_ONE_BACKWARD]
        else:
            # gpipe is left out: its bubble is that of 1f1b, and it holds more.
            known = [ONE_FORWARD_ONE_BACKWARD, Pipeline("zero-bubble"), Pipeline("interleaved", 2)]
        return [p for p in known if self._possible(p, mesh, count)]

    def _possible(self, pipeline: Pipeline, mesh: Mesh, count: int) -> bool:
        if self.mesh is not None and self.micro_batches is not None and self.pipeline is not None:
            return True  # which says what is wrong with it when it is planned
        if pipeline != ONE_FORWARD_ONE_BACKWARD and (mesh.stages == 1 or count == 1):
            return False
        return pipeline.virtual == 1 or (
            count % mesh.stages == 0 and mesh.stages * pipeline.virtual <= self.layers
        )

    def _levels(self, mesh: Mesh, count: int) -> list[int | None]:
        """Of one micro-batch gradients are not kept, so that level 2 is as level 1."""
        if self.zero is not None:
            return [self.zero]
        if dict(mesh.axes).get(DATA, 1) == 1:
            return [None]
        return [None, 1, 2, 3] if count > 1 else [None, 1, 3]

    def _recomputed(self) -> list[str | None]:
        if self.recompute is not None:
            return [self.recompute]
        return [None, SELECTIVE, FULL] if self.recomputable else [None]


def _mesh(stages: int, data: int, model: int) -> Mesh:
    """Stages outermost, which send the least; the axis `model` within a node, which sends most."""
    axes = ((STAGE, stages), (DATA, data), (MODEL, model))
    return Mesh(tuple(a for a in axes if a[1] > 1) or ((DATA, 1),))


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, max(most, 1)) + 1) if number % n == 0]
