"""What a candidate of a search takes and holds, estimated without planning it.

Layouts are chosen once for the axes that a mesh has, whatever their sizes, and for the whole batch.
By them and by the cut into stages, what every stage computes, sends and keeps is added up;
micro-batches, schedules, levels of ZeRO and recomputation follow by formulas. The result is good
enough to say what to plan, and no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from mpiflow.compiler import boxing
from mpiflow.compiler.boxing import local_shape
from mpiflow.compiler.candidates import Candidate
from mpiflow.compiler.cost import collective_seconds, op_seconds
from mpiflow.compiler.domains import DATA, Choice
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.pipeline import Pipeline
from mpiflow.compiler.recompute import all_kept
from mpiflow.compiler.signature import Edge, Placed, choose
from mpiflow.compiler.stages import Stages, assign_stages
from mpiflow.compiler.zero import split_variables
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import Layout
from mpiflow.graph.tensor import Tensor
from mpiflow.plan.slice import itemsize

_WEIGHT_GRADIENTS = 1 / 3
"""The share of a micro-batch that gradients of weights take: products of the same size thrice."""
_AHEAD = 0.5
"""The share that counts of gathering the weights of level 3, which runs ahead of its use."""
_AGAIN = {"none": (1.0, 0.0), "selective": (0.6, 0.05), "full": (0.15, 1 / 3)}
"""By level of recomputation: the share of activations that stays, and the seconds that come to it,
as a share of a step."""
_SCRATCH = 2
"""As many of the largest tensor are there beside what is kept: the gradients at work."""

Conversion = tuple[Layout, Layout, tuple[int, ...], str, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step, and bytes of the arena of the rank that holds most.

    `forced` is whether only the limit on memory asks for the level of ZeRO or of recomputation.
    """

    seconds: float
    nbytes: float
    forced: bool = False


@dataclass
class _Work:
    """What a rank of a stage does with the whole batch in a step, and keeps for it.

    `loop` are seconds of kernels that fire for each micro-batch, besides `calls` seconds of
    starting them; `once` those of updates. `talk` and `reduce` are conversions in the loop and
    after it. `weights`, `state` (which ZeRO splits), `other` and `kept` activations are bytes;
    `largest` is the largest tensor.
    """

    loop: float = 0.0
    calls: float = 0.0
    once: float = 0.0
    talk: Counter[Conversion] = field(default_factory=Counter)
    reduce: Counter[Conversion] = field(default_factory=Counter)
    weights: int = 0
    state: int = 0
    other: int = 0
    kept: int = 0
    largest: int = 0


class Estimator:
    """Estimates candidates for a training graph on a machine, under a limit of bytes (0: none)."""

    def __init__(self, graph: Graph, machine: Machine, limit: int = 0) -> None:
        self.graph, self.machine, self.limit = graph, machine, limit
        self.placed: dict[tuple[str, ...], Placed] = {}
        self.works: dict[tuple[Mesh, int, int], list[_Work]] = {}
        self.seconds: dict[tuple[Mesh, Conversion, int], float] = {}
        self.kernels: dict[Any, float] = {}
        self.splittable = split_variables(graph, 1)
        self.kept = set(all_kept(graph).tensors)

    def __call__(self, candidate: Candidate) -> Estimate:
        """The estimate; CompileError where the model cannot be cut like that."""
        mesh, pipeline = candidate.mesh, candidate.pipeline
        works = self._works(mesh.within_stage(), mesh.stages, pipeline.virtual)
        ways = _ways(candidate)
        for way in ways:
            nbytes = self._bytes(candidate, works, *way)
            if not self.limit or nbytes <= self.limit:
                break
        return Estimate(self._seconds(candidate, works, *way), nbytes, way != ways[0])

    def _seconds(
        self, candidate: Candidate, works: list[_Work], level: int, recompute: str
    ) -> float:
        mesh, count = candidate.mesh.within_stage(), candidate.micro_batches
        again = 1 + _AGAIN[recompute][1]
        turns = [
            again * (w.loop / count + w.calls) + self._conversions(mesh, w.talk, count)
            for w in works
        ]
        rest = max(self._rest(mesh, w, level, count) for w in works)
        return count * max(turns) + _bubble(turns, candidate.pipeline) + rest

    def _rest(self, mesh: Mesh, work: _Work, level: int, count: int) -> float:
        """The end of a step: gradients over all ranks, and updates."""
        parts = dict(mesh.axes).get(DATA, 1)
        reduced = self._conversions(mesh, work.reduce, 1)
        if not level or parts == 1:
            return reduced + work.once
        axes = (mesh.index(DATA),)
        gather = collective_seconds(self.machine, "all_gather", work.weights, mesh, axes)
        if level > 2:
            gather *= _AHEAD * (1 if count > 1 else 2)
        scattered = count if level > 1 else 1  # once for each micro-batch
        return scattered * reduced / 2 + gather + work.once / parts

    def _bytes(self, candidate: Candidate, works: list[_Work], level: int, recompute: str) -> float:
        count, pipeline = candidate.micro_batches, candidate.pipeline
        parts = dict(candidate.mesh.axes).get(DATA, 1)
        optimizer, gradients, weights = (parts if level > n else 1 for n in range(3))
        held = []
        for stage, work in enumerate(works):
            nbytes = work.other + work.state / optimizer
            nbytes += work.weights / gradients if count > 1 else work.weights
            nbytes += work.weights / weights + (work.weights if level > 2 and count > 1 else 0)
            alive = pipeline.alive(stage, len(works), count) if len(works) > 1 else 1.0
            nbytes += _AGAIN[recompute][0] * work.kept * alive / count
            nbytes += _SCRATCH * work.largest / count
            held.append(nbytes)
        return max(held)

    def _conversions(self, mesh: Mesh, found: Counter[Conversion], count: int) -> float:
        """Seconds of conversions of one micro-batch."""
        return sum(times * self._convert(mesh, one, count) for one, times in found.items())

    def _convert(self, mesh: Mesh, conversion: Conversion, count: int) -> float:
        key = mesh, conversion, count
        if key not in self.seconds:
            source, target, shape, dtype, share = conversion
            shape = (max(1, shape[0] // count), *shape[1:]) if shape else shape
            table = boxing.prices([source], [target], shape, dtype, mesh, self.machine)
            self.seconds[key] = share * float(table[0, 0])
        return self.seconds[key]

    def _works(self, mesh: Mesh, stages: int, virtual: int) -> list[_Work]:
        key = mesh, stages, virtual
        if key not in self.works:
            if mesh.names not in self.placed:
                self.placed[mesh.names] = choose(self.graph, mesh, self.machine)
            placed = self.placed[mesh.names]
            seconds = {node: self._kernel(node, choice, mesh) for node, choice in placed.nodes}
            cut = None
            if stages > 1:
                cut = assign_stages(self.graph, [seconds] * stages, virtual)
            self.works[key] = self._add_up(placed, mesh, seconds, stages, cut)
        return self.works[key]

    def _kernel(self, node: Node, choice: Choice, mesh: Mesh) -> float:
        """The seconds of a node's kernel with the layouts of a choice, for the whole batch."""
        pairs = [*zip(node.inputs, choice.inputs, strict=True)]
        pairs += zip(node.outputs, choice.outputs, strict=True)
        shapes = tuple(local_shape(tensor.shape, layout, mesh) for tensor, layout in pairs)
        dtypes = tuple(tensor.dtype for tensor, _ in pairs)
        key = node.op, shapes, dtypes
        if key not in self.kernels:
            count = len(node.inputs)
            self.kernels[key] = op_seconds(
                self.machine, node.op, shapes[:count], shapes[count:], dtypes
            )
        return self.kernels[key]

    def _add_up(
        self,
        placed: Placed,
        mesh: Mesh,
        seconds: dict[Node, float],
        stages: int,
        cut: Stages | None,
    ) -> list[_Work]:
        works = [_Work() for _ in range(stages)]
        for node, choice in placed.nodes:
            sizes = [
                _nbytes(tensor, layout, mesh)
                for tensor, layout in zip(node.outputs, choice.outputs, strict=True)
            ]
            pairs = list(zip(node.outputs, sizes, strict=True))
            for stage in _stages(cut, node):
                self._add_node(works[stage], node, seconds[node], pairs)
        for edge in placed.problem.edges:
            self._add_edge(works, placed, edge, cut)
        for name, variable in self.graph.variables.items():
            nbytes = _nbytes(variable.tensor, placed.sources[variable.tensor], mesh)
            on = {cut.stage(c) for c in cut.variables[variable.tensor]} if cut else {0}
            for stage in on:
                if variable.trainable:
                    works[stage].weights += nbytes
                elif name in self.splittable:
                    works[stage].state += nbytes
                else:
                    works[stage].other += nbytes
        return works

    def _add_node(
        self, work: _Work, node: Node, seconds: float, outputs: list[tuple[Tensor, int]]
    ) -> None:
        if node in self.graph.updates:
            work.once += seconds
            return
        measured = self.machine.kernels.get(node.op.name)
        call = min(seconds, measured.seconds if measured else self.machine.launch)
        work.loop += seconds - call
        work.calls += call
        for tensor, nbytes in outputs:
            work.kept += nbytes if tensor in self.kept else 0
            work.largest = max(work.largest, nbytes)

    def _add_edge(self, works: list[_Work], placed: Placed, edge: Edge, cut: Stages | None) -> None:
        """A conversion, on the stages where the tensor is made."""
        problem, tensor = placed.problem, edge.tensor
        domain, output = problem.position[tensor]
        source = problem.domains[domain][placed.choice[domain]].outputs[output]
        if edge.reader is None or tensor.node is None:
            return  # scalars, and weights that are gathered: by _rest
        taken = problem.domains[edge.reader][placed.choice[edge.reader]]
        target = taken.outputs[0] if edge.operand is None else taken.inputs[edge.operand]
        if source == target:
            return
        reader = edge.reader - problem.first
        ends = reader < 0 or problem.nodes[reader] in self.graph.updates
        conversion = source, target, tensor.shape, tensor.dtype, edge.share
        for stage in _stages(cut, tensor.node):
            (works[stage].reduce if ends else works[stage].talk)[conversion] += 1


def _ways(candidate: Candidate) -> list[tuple[int, str]]:
    """Levels of ZeRO and of recomputation that a candidate may have, in the order of their cost."""
    levels, again = [candidate.zero or 0], [candidate.recompute or "none"]
    if candidate.auto and candidate.zero is None:
        levels = [0, 1, 2, 3]
    if again == ["auto"] or (candidate.auto and candidate.recompute is None):
        again = ["none", "selective", "full"]
    return [(level, recompute) for recompute in again for level in levels]


def _stages(cut: Stages | None, node: Node) -> Iterable[int]:
    """The stages that a node is on."""
    return sorted({cut.stage(chunk) for chunk in cut.nodes[node]}) if cut else (0,)


def _nbytes(tensor: Tensor, layout: Layout, mesh: Mesh) -> int:
    return prod(local_shape(tensor.shape, layout, mesh)) * itemsize(tensor.dtype)


def _bubble(turns: list[float], pipeline: Pipeline) -> float:
    """How long the slowest stage stands still while a pipeline fills and drains.

    A micro-batch goes through all others once; with virtual stages through a part of each, and
    where gradients of weights wait, these fill two thirds of it (Qi et al. 2024, ZB-H1).
    """
    idle = sum(turns) - max(turns)
    if pipeline.schedule == "zero-bubble":
        return idle * (1 - 2 * _WEIGHT_GRADIENTS)
    return idle / pipeline.virtual
