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
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import Any

from mpiflow.compiler import boxing
from mpiflow.compiler.cost import message_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.signature import Placed
from mpiflow.compiler.stages import Stages
from mpiflow.compiler.wanted import Wanted, all_wanted
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
    empty where they are the same, differ. If there are `parts`, it is their sum, of which no node
    knows.
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
    parts: tuple[Tensor, ...] = ()

    @property
    def made_of(self) -> tuple[Tensor, ...]:
        """What has to be there for it to leave, in the order in which it is made."""
        return self.parts or (self.tensor,)

    def attributes(self, kind: str) -> dict[str, Any]:
        """Those of the task that sends it, or receives it."""
        sends = kind == SEND
        found = {"stage": self.target if sends else self.source, "message": self.message}
        if not self.meshes:
            return found
        layout = layout_text(self.received if sends else self.layout)
        return {**found, "mesh": self.meshes[sends], "layout": layout}


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
    made = []
    for message, wanted in enumerate(all_wanted(placed, stages, timing)):
        way = _way(wanted, timing, whole, machine)
        phase = 0
        if timing and not wanted.loop:
            phase = 2 * max(timing.before[tensor] for tensor in wanted.made_of)
        made.append(
            Transfer(
                message, wanted.tensor, way.layout, way.received, way.meshes, wanted.source,
                wanted.target, wanted.lane, wanted.loop, phase,
                way.nbytes, message_seconds(machine, way.nbytes, whole, way.pieces), wanted.parts,
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


def _way(wanted: Wanted, timing: Timing | None, whole: Mesh, machine: Machine) -> _Way:
    """The best one."""
    inside = [whole.within_stage(stage) for stage in (wanted.source, wanted.target)]
    here, there = (mesh.in_time(timing.micro_batches if timing else 1) for mesh in inside)
    tensor = wanted.tensor
    if here == there:
        layout = _best_layout(wanted, here, whole, machine)
        return _Way(layout, layout, (), _bytes(tensor, layout, here))
    layout = _summed(wanted, here, machine)
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


def _best_layout(wanted: Wanted, mesh: Mesh, whole: Mesh, machine: Machine) -> Layout:
    """The layout on the way between stages of equal ranks."""
    tensor, given = wanted.tensor, wanted.given
    used = _used(tensor, (given, *wanted.layouts), mesh)
    best, least = given, inf
    for layout in _legal(wanted, given, used, mesh):
        price = message_seconds(machine, _bytes(tensor, layout, mesh), whole)
        price += _convert(tensor, given, layout, mesh, machine)
        price += sum(_convert(tensor, layout, t, mesh, machine) for t in wanted.layouts)
        if price < least:
            best, least = layout, price
    return best


def _summed(wanted: Wanted, mesh: Mesh, machine: Machine) -> Layout:
    """The layout that is `given`, or the nearest that is no partial value on any axis of ranks."""
    tensor, given = wanted.tensor, wanted.given
    legal = list(_legal(wanted, given, _whole(_used(tensor, (given,), mesh)), mesh))
    if given in legal:
        return given
    return min(legal, key=lambda layout: _convert(tensor, given, layout, mesh, machine))


def _best_received(
    wanted: Wanted, sent: Layout, here: Mesh, there: Mesh, whole: Mesh, machine: Machine
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


def _legal(wanted: Wanted, given: Layout, used: set[Sbp], mesh: Mesh) -> Iterator[Layout]:
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
