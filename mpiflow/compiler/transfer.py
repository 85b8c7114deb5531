"""Step 8b: what one pipeline stage makes and another needs is sent, once for each stage.

Every rank sends to the one with the same place in the other stage. The layout on the way is the one
for which the conversions before, the message and those behind it take the least predicted time: a
tensor that all ranks of a stage hold is better sent in parts, and gathered where it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, prod

from mpiflow.compiler import boxing
from mpiflow.compiler.cost import message_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.signature import Placed
from mpiflow.compiler.stages import Stages
from mpiflow.graph.graph import Node
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Layout, S, Sbp
from mpiflow.graph.tensor import Tensor, is_narrow
from mpiflow.plan.slice import itemsize


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor from stage `source` to `target`, which both know by `message`.

    It is sent once for each micro-batch in a `loop`, or once a step where that is 0, in the even
    `phase`. Messages of one `lane` are sent and received in the same order; each piece of the model
    has a lane forward and one backward. `nbytes` are those of a rank's message.
    """

    message: int
    tensor: Tensor
    layout: Layout
    source: int
    target: int
    lane: str
    loop: int
    phase: int
    nbytes: int
    seconds: float


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
    placed: Placed, stages: Stages, timing: Timing | None, whole: Mesh, machine: Machine
) -> tuple[Transfer, ...]:
    """All of a step, in the order in which they are made; `whole` has the stage axis."""
    index = {node: i for i, (node, _) in enumerate(placed.nodes)}
    found = _Finder(placed, stages, timing).find()
    found.sort(key=lambda wanted: index[node] if (node := wanted.tensor.node) else -1)
    layouts = _layouts(placed)
    mesh = whole.within_stage().in_time(timing.micro_batches if timing else 1)
    made = []
    for message, wanted in enumerate(found):
        tensor, given = wanted.tensor, layouts[wanted.tensor]
        layout = _best_layout(wanted, given, mesh, whole, machine)
        nbytes = _bytes(tensor, layout, mesh)
        made.append(
            Transfer(
                message, tensor, layout, wanted.source, wanted.target, wanted.lane,
                wanted.loop,
                2 * timing.before[tensor] if timing and not wanted.loop else 0,
                nbytes, message_seconds(machine, nbytes, whole),
            )
        )  # fmt: skip
    return tuple(made)


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

    def __init__(self, placed: Placed, stages: Stages, timing: Timing | None) -> None:
        self.placed, self.stages, self.timing = placed, stages, timing
        self.layouts = _layouts(placed)
        self.found: dict[tuple[Tensor, int, int], _Wanted] = {}

    def find(self) -> list[_Wanted]:
        graph = self.placed.graph
        for node, choice in self.placed.nodes:
            for chunk in self.stages.nodes[node]:
                for tensor, layout in zip(node.inputs, choice.inputs, strict=True):
                    for loop in (self.timing.loops[node] if self.timing else ()) or (0,):
                        self._want(tensor, layout, chunk, loop)
        everywhere = (B,) * len(next(iter(self.layouts.values())))
        for tensor in graph.outputs.values():
            for stage in range(self.stages.stages):
                if not tensor.shape:
                    self._want(tensor, everywhere, stage, 0)
        for name, value in graph.assigns.items():
            variable = graph.variables[name].tensor
            for chunk in self.stages.variables[variable]:
                self._want(value, self.layouts[variable], chunk, 0)
        return list(self._needed())

    def _want(self, tensor: Tensor, layout: Layout, chunk: int, loop: int) -> None:
        """Note that a chunk needs a tensor, unless its stage has it."""
        chunks, target = self.stages.of(tensor), self.stages.stage(chunk)
        held = [self.stages.stage(c) for c in chunks]
        if not chunks or target in held:
            return
        nearest = max((c for c in chunks if c <= chunk), default=min(chunks))
        once = self.timing is None or self.layouts[tensor][0] == B or layout[0] == B
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
        backward = tensor.node in self.placed.graph.origins
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
    """The layout on the way."""
    tensor, targets = wanted.tensor, list(wanted.layouts)
    splits = [S(dim) for dim in range(len(tensor.shape))]
    used = {sbp for layout in (given, *targets) for sbp in layout[mesh.timed :]}
    if is_narrow(tensor.dtype):
        used = {sbp for sbp in used if sbp == B or isinstance(sbp, S)} or {B}
    others: list[Sbp] = list(dict.fromkeys([B, *splits, *sorted(used, key=str)]))
    choices: list[list[Sbp]] = []
    if mesh.timed:
        choices.append([given[0] if wanted.loop else B])
    choices += [others if size > 1 else [B] for size in mesh.sizes[mesh.timed :]]
    best, least = given, inf
    for layout in product(*choices):
        if not boxing.is_legal(layout, tensor.shape, mesh):
            continue
        price = message_seconds(machine, _bytes(tensor, layout, mesh), whole)
        price += _convert(tensor, given, layout, mesh, machine)
        price += sum(_convert(tensor, layout, target, mesh, machine) for target in targets)
        if price < least:
            best, least = layout, price
    return best


def _convert(tensor: Tensor, source: Layout, target: Layout, mesh: Mesh, machine: Machine) -> float:
    table = boxing.prices([source], [target], tensor.shape, tensor.dtype, mesh, machine)
    return float(table[0, 0])


def _bytes(tensor: Tensor, layout: Layout, mesh: Mesh) -> int:
    return prod(boxing.local_shape(tensor.shape, layout, mesh)) * itemsize(tensor.dtype)
