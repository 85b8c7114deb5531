"""Step 8b: what one pipeline stage makes and another needs is sent, once for each stage.

Between stages of equal ranks, each sends to the one with the same place in the other stage. The
layout on the way is the one for which the conversions before, the message and those behind it take
the least predicted time: a tensor that all ranks of a stage hold is better sent in parts, and
gathered where it arrives.

Where the ranks of two stages differ, a tensor leaves as it is, once it is summed, and arrives in
the layout for which the message and the conversions behind it take the least; see `plan.pieces`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, prod
from typing import Any

from mpiflow.compiler import boxing
from mpiflow.compiler.cost import message_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.signature import Placed
from mpiflow.compiler.stages import Stages
from mpiflow.graph.graph import Node
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Layout, Partial, S, Sbp, layout_text
from mpiflow.graph.tensor import Tensor, is_narrow
from mpiflow.plan.pieces import messages_of_one, most_elements, pieces_between
from mpiflow.plan.records import SEND
from mpiflow.plan.slice import itemsize


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor from stage `source` to `target`, which both know by `message`.

    It is sent once for each micro-batch in a `loop`, or once a step where that is 0, in the even
    `phase`. Messages of one `lane` are sent and received in the same order; each piece of the model
    has a lane forward and one backward. `nbytes` are the most that a rank sends, or receives. It
    leaves in a `layout` and is `received` in the same one, unless the `meshes` of the two stages,
    empty where they are the same, differ.
    """

    message: int
    tensor: Tensor
    layout: Layout
    received: Layout
    meshes: tuple[str, ...]
    source: int
    target: int
    lane: str
    loop: int
    phase: int
    nbytes: int
    seconds: float

    def attributes(self, kind: str) -> dict[str, Any]:
        """Those of the task that sends it, or receives it."""
        sends = kind == SEND
        found = {"stage": self.target if sends else self.source, "message": self.message}
        if not self.meshes:
            return found
        layout = layout_text(self.received if sends else self.layout)
        return {**found, "mesh": self.meshes[sends], "layout": layout}


@dataclass
class _Wanted:
    """A tensor that a stage needs of another, in some layouts."""

    tensor: Tensor
    source: int
    target: int
    lane: str
    loop: int
    layouts: dict[Layout, None] = field(default_factory=dict)


def transfers(
    placed: tuple[Placed, ...],
    stages: Stages,
    timing: Timing | None,
    whole: Mesh,
    machine: Machine,
) -> tuple[Transfer, ...]:
    """All of a step, in the order in which they are made; `whole` has the stage axis.

    `placed` is the graph with the layouts of each stage.
    """
    index = {node: i for i, (node, _) in enumerate(placed[0].nodes)}
    finder = _Finder(placed, stages, timing)
    found = finder.find()
    found.sort(key=lambda wanted: index[node] if (node := wanted.tensor.node) else -1)
    made = []
    for message, wanted in enumerate(found):
        way = _way(wanted, finder.layouts[wanted.source][wanted.tensor], timing, whole, machine)
        made.append(
            Transfer(
                message, wanted.tensor, way.layout, way.received, way.meshes, wanted.source,
                wanted.target, wanted.lane, wanted.loop,
                2 * timing.before[wanted.tensor] if timing and not wanted.loop else 0,
                way.nbytes, message_seconds(machine, way.nbytes, whole, way.pieces),
            )
        )  # fmt: skip
    return tuple(made)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a tensor goes from a stage to another; its bytes and pieces are the most of a rank."""

    layout: Layout
    received: Layout
    meshes: tuple[str, ...]
    nbytes: int
    pieces: int = 1


def _way(
    wanted: _Wanted, given: Layout, timing: Timing | None, whole: Mesh, machine: Machine
) -> _Way:
    """The best one of a tensor that is made in the layout `given`."""
    inside = [whole.within_stage(stage) for stage in (wanted.source, wanted.target)]
    here, there = (mesh.in_time(timing.micro_batches if timing else 1) for mesh in inside)
    tensor = wanted.tensor
    if here == there:
        layout = _best_layout(wanted, given, here, whole, machine)
        return _Way(layout, layout, (), _bytes(tensor, layout, here))
    layout = _summed(wanted, given, here, machine)
    received = _best_received(wanted, layout, here, there, whole, machine)
    pieces = pieces_between(tensor.shape, layout, here, received, there)
    return _Way(
        layout,
        received,
        (str(inside[0]), str(inside[1])),
        most_elements(pieces) * itemsize(tensor.dtype),
        messages_of_one(pieces),
    )


def first_uses(segments: dict[Node, int]) -> dict[Tensor, int]:
    """The first of the segments of nodes that read a tensor, by tensor."""
    first: dict[Tensor, int] = {}
    for node, segment in segments.items():
        for tensor in node.inputs:
            first[tensor] = min(segment, first.get(tensor, segment))
    return first


def in_lanes(
    messages: tuple[Transfer, ...], ways: dict[Transfer, tuple[int, int]]
) -> tuple[Transfer, ...]:
    """With a lane of their own for messages of one that go other `ways` than the rest of it.

    A way is the segment in which a message is sent, and that in which it is first used: where those
    of two differ, they are sent in one order and used in another.
    """
    found: dict[tuple[int, int, str], set[tuple[int, int]]] = {}
    for m, way in ways.items():
        found.setdefault((m.source, m.target, m.lane), set()).add(way)
    return tuple(
        replace(m, lane="{}.{}.{}".format(m.lane, *ways[m]))
        if len(found.get((m.source, m.target, m.lane), ())) > 1
        else m
        for m in messages
    )


def _layouts(placed: Placed) -> dict[Tensor, Layout]:
    """The layout in which each tensor is made."""
    layouts = dict(placed.sources)
    for node, choice in placed.nodes:
        layouts.update(zip(node.outputs, choice.outputs, strict=True))
    return layouts


class _Finder:
    """Collects what stages need of one another."""

    def __init__(self, placed: tuple[Placed, ...], stages: Stages, timing: Timing | None) -> None:
        self.placed, self.stages, self.timing = placed, stages, timing
        self.graph = placed[0].graph
        made = {id(one): _layouts(one) for one in placed}
        self.layouts = [made[id(one)] for one in placed]
        self.found: dict[tuple[Tensor, int, int], _Wanted] = {}

    def find(self) -> list[_Wanted]:
        choices = [dict(placed.nodes) for placed in self.placed]
        for node, _ in self.placed[0].nodes:
            for chunk in self.stages.nodes[node]:
                choice = choices[self.stages.stage(chunk)][node]
                for tensor, layout in zip(node.inputs, choice.inputs, strict=True):
                    for loop in (self.timing.loops[node] if self.timing else ()) or (0,):
                        self._want(tensor, layout, chunk, loop)
        everywhere = (B,) * len(next(iter(self.layouts[0].values())))
        for tensor in self.graph.outputs.values():
            for stage in range(self.stages.stages):
                if not tensor.shape:
                    self._want(tensor, everywhere, stage, 0)
        for name, value in self.graph.assigns.items():
            variable = self.graph.variables[name].tensor
            for chunk in self.stages.variables[variable]:
                self._want(value, self.layouts[self.stages.stage(chunk)][variable], chunk, 0)
        return list(self._needed())

    def _want(self, tensor: Tensor, layout: Layout, chunk: int, loop: int) -> None:
        """Note that a chunk needs a tensor, unless its stage has it."""
        chunks, target = self.stages.of(tensor), self.stages.stage(chunk)
        held = [self.stages.stage(c) for c in chunks]
        if not chunks or target in held:
            return
        nearest = max((c for c in chunks if c <= chunk), default=min(chunks))
        made = self.layouts[self.stages.stage(nearest)][tensor]
        once = self.timing is None or made[0] == B or layout[0] == B
        key = tensor, target, 0 if once else loop
        wanted = self.found.setdefault(
            key,
            _Wanted(
                tensor, self.stages.stage(nearest), target, self._lane(tensor, nearest, key[2]),
                key[2],
            ),
        )  # fmt: skip
        wanted.layouts[layout] = None

    def _lane(self, tensor: Tensor, chunk: int, loop: int) -> str:
        backward = tensor.node in self.graph.origins
        return f"{'backward' if backward else 'forward'}{chunk}" if loop else "step"

    def _needed(self) -> list[_Wanted]:
        """Without what a stage can add up, or collect, from what it gets in the loop anyway."""
        kept = []
        for (tensor, target, loop), wanted in self.found.items():
            made = self.timing.made.get(tensor, 0) if self.timing and not loop else 0
            if not made or (tensor, target, made) not in self.found:
                kept.append(wanted)
        return kept


def _best_layout(
    wanted: _Wanted, given: Layout, mesh: Mesh, whole: Mesh, machine: Machine
) -> Layout:
    """The layout on the way between stages of equal ranks."""
    tensor = wanted.tensor
    used = _used(tensor, (given, *wanted.layouts), mesh)
    best, least = given, inf
    for layout in _legal(wanted, given, used, mesh):
        price = message_seconds(machine, _bytes(tensor, layout, mesh), whole)
        price += _convert(tensor, given, layout, mesh, machine)
        price += sum(_convert(tensor, layout, t, mesh, machine) for t in wanted.layouts)
        if price < least:
            best, least = layout, price
    return best


def _summed(wanted: _Wanted, given: Layout, mesh: Mesh, machine: Machine) -> Layout:
    """The layout `given`, or the nearest one that is no partial value on any axis of ranks."""
    tensor = wanted.tensor
    legal = list(_legal(wanted, given, _whole(_used(tensor, (given,), mesh)), mesh))
    if given in legal:
        return given
    return min(legal, key=lambda layout: _convert(tensor, given, layout, mesh, machine))


def _best_received(
    wanted: _Wanted, sent: Layout, here: Mesh, there: Mesh, whole: Mesh, machine: Machine
) -> Layout:
    """The layout in which a stage of other ranks receives what is `sent`."""
    tensor = wanted.tensor
    used = _whole(_used(tensor, wanted.layouts, there))
    best, least = sent, inf
    for layout in _legal(wanted, sent, used, there):
        received = _bytes(tensor, layout, there)
        nbytes = max(received, received * there.size // here.size)  # what senders send, if evenly
        price = message_seconds(machine, nbytes, whole)
        price += sum(_convert(tensor, layout, t, there, machine) for t in wanted.layouts)
        if price < least:
            best, least = layout, price
    return best


def _used(tensor: Tensor, layouts: Iterable[Layout], mesh: Mesh) -> set[Sbp]:
    """What these layouts have on axes of ranks, as far as it can be sent."""
    used = {sbp for layout in layouts for sbp in layout[mesh.timed :]}
    if is_narrow(tensor.dtype):
        used = {sbp for sbp in used if sbp == B or isinstance(sbp, S)} or {B}
    return used


def _whole(used: Iterable[Sbp]) -> set[Sbp]:
    """Without partial values."""
    return {sbp for sbp in used if not isinstance(sbp, Partial)}


def _legal(wanted: _Wanted, given: Layout, used: set[Sbp], mesh: Mesh) -> Iterator[Layout]:
    """The layouts on the way: in time that of the message, B, any S or what is used on others."""
    tensor = wanted.tensor
    splits = [S(dim) for dim in range(len(tensor.shape))]
    others: list[Sbp] = list(dict.fromkeys([B, *splits, *sorted(used, key=str)]))
    choices: list[list[Sbp]] = []
    if mesh.timed:
        choices.append([given[0] if wanted.loop else B])
    choices += [others if size > 1 else [B] for size in mesh.sizes[mesh.timed :]]
    for layout in product(*choices):
        if boxing.is_legal(layout, tensor.shape, mesh):
            yield layout


def _convert(tensor: Tensor, source: Layout, target: Layout, mesh: Mesh, machine: Machine) -> float:
    table = boxing.prices([source], [target], tensor.shape, tensor.dtype, mesh, machine)
    return float(table[0, 0])


def _bytes(tensor: Tensor, layout: Layout, mesh: Mesh) -> int:
    return prod(boxing.local_shape(tensor.shape, layout, mesh)) * itemsize(tensor.dtype)
