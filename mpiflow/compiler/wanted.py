"""Step 8a: what each pipeline stage needs of the others, as what it is made there and taken here.

Of scalars that a stage does nothing with but to add them up, as of the squares that make up the
norm of all gradients, each of the others sends the sum of its own:

    stage 0   a, b -> sum.stage0 -> send
    stage 1                         receive, c -> sum
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.signature import Placed
from mpiflow.compiler.stages import Stages
from mpiflow.graph.graph import Node
from mpiflow.graph.sbp import B, Layout, layout_text
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.gradnorm import SumScalars


@dataclass(slots=True)
class Wanted:
    """A tensor that a stage needs of another, in some layouts; that one makes it as `given`.

    It is needed in a `loop`, or once a step where that is 0, by `readers`: nodes, or None for
    whatever else. If there are `parts`, it is their sum, of which no node knows.
    """

    tensor: Tensor
    given: Layout
    source: int
    target: int
    lane: str
    loop: int
    layouts: dict[Layout, None] = field(default_factory=dict)
    readers: dict[Node | None, None] = field(default_factory=dict)
    parts: tuple[Tensor, ...] = ()

    @property
    def made_of(self) -> tuple[Tensor, ...]:
        """What has to be there before it can be sent, in the order in which it is made."""
        return self.parts or (self.tensor,)


def all_wanted(
    placed: tuple[Placed, ...], stages: Stages, timing: Timing | None
) -> Iterable[Wanted]:
    """What stages need of one another, in the order in which it is made.

    `placed` is the graph with the layouts of each stage.
    """
    index = {node: i for i, (node, _) in enumerate(placed[0].nodes)}

    def made_at(wanted: Wanted) -> int:
        node = wanted.made_of[-1].node
        return index[node] if node else -1

    groups: dict[object, list[Wanted]] = {}
    for i, wanted in enumerate(sorted(_Finder(placed, stages, timing).find(), key=made_at)):
        groups.setdefault(_sum_of(wanted, timing) or i, []).append(wanted)
    return sorted((_joined(group) for group in groups.values()), key=made_at)


def _sum_of(wanted: Wanted, timing: Timing | None) -> tuple[object, ...]:
    """What is the same for all scalars that are added up before they are sent; () for others."""
    tensor, readers = wanted.tensor, list(wanted.readers)
    in_loop = wanted.loop or (timing is not None and tensor in timing.made)
    if in_loop or len(readers) != 1 or readers[0] is None:
        return ()
    if not isinstance(readers[0].op, SumScalars) or readers[0].inputs.count(tensor) > 1:
        return ()
    return readers[0], wanted.source, wanted.target, wanted.lane, wanted.given


def _joined(group: list[Wanted]) -> Wanted:
    """One for all of a group: the sum of what they want, if these are several."""
    first, reader = group[0], next(iter(group[0].readers))
    if len(group) == 1 or reader is None:
        return first
    graph, dtype = first.tensor.graph, first.tensor.dtype
    # Partial sums and whole ones are added up, and sent, by themselves.
    partial = "" if set(first.given) == {B} else f".{layout_text(first.given)}"
    name = f"{reader.name}.stage{first.source}{partial}"
    total = Tensor(graph, name, (), dtype, where=reader.where)
    return replace(first, tensor=total, parts=tuple(wanted.tensor for wanted in group))


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
        self.found: dict[tuple[Tensor, int, int], Wanted] = {}

    def find(self) -> list[Wanted]:
        choices = [dict(placed.nodes) for placed in self.placed]
        for node, _ in self.placed[0].nodes:
            for chunk in self.stages.nodes[node]:
                choice = choices[self.stages.stage(chunk)][node]
                for tensor, layout in zip(node.inputs, choice.inputs, strict=True):
                    for loop in (self.timing.loops[node] if self.timing else ()) or (0,):
                        self._want(tensor, layout, chunk, loop, node)
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

    def _want(
        self, tensor: Tensor, layout: Layout, chunk: int, loop: int, reader: Node | None = None
    ) -> None:
        """Note that a chunk needs a tensor, unless its stage has it."""
        chunks, target = self.stages.of(tensor), self.stages.stage(chunk)
        held = [self.stages.stage(c) for c in chunks]
        if not chunks or target in held:
            return
        nearest = max((c for c in chunks if c <= chunk), default=min(chunks))
        source = self.stages.stage(nearest)
        made = self.layouts[source][tensor]
        if self.timing is None or made[0] == B or layout[0] == B:
            loop = 0  # once a step
        lane = self._lane(tensor, nearest, loop)
        wanted = Wanted(tensor, made, source, target, lane, loop)
        wanted = self.found.setdefault((tensor, target, loop), wanted)
        wanted.layouts[layout] = None
        wanted.readers[reader] = None

    def _lane(self, tensor: Tensor, chunk: int, loop: int) -> str:
        backward = tensor.node in self.graph.origins
        return f"{'backward' if backward else 'forward'}{chunk}" if loop else "step"

    def _needed(self) -> list[Wanted]:
        """Without what a stage can add up, or collect, from what it gets in the loop anyway."""
        kept = []
        for (tensor, target, loop), wanted in self.found.items():
            made = self.timing.made.get(tensor, 0) if self.timing and not loop else 0
            if not made or (tensor, target, made) not in self.found:
                kept.append(wanted)
        return kept
