"""The part of a step that each pipeline stage does: its nodes, its messages, its segments."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpiflow.compiler.arrange import Target
from mpiflow.compiler.lower import StageWork, lower
from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.pipeline import ONE_FORWARD_ONE_BACKWARD, Pipeline, Sequence
from mpiflow.compiler.signature import Placed
from mpiflow.compiler.stages import Stages, part
from mpiflow.compiler.transfer import Transfer, first_uses, in_lanes, transfers
from mpiflow.graph.graph import Node
from mpiflow.plan.records import Program, Variable


@dataclass(frozen=True, slots=True)
class Step:
    """A traced graph with its layouts, its stages and the messages between them.

    `layouts` has the graph with those of each stage: the same where stages have equal ranks. One
    that is only `forward` has no backward pass, as evaluations and predictions. `pipeline`
    says in which turn its stages do what.
    """

    layouts: tuple[Placed, ...]
    data: str
    rows: int
    target: Target
    timing: Timing | None = None
    stages: Stages | None = None
    messages: tuple[Transfer, ...] = ()
    zero: int = 0
    forward: bool = False
    pipeline: Pipeline = ONE_FORWARD_ONE_BACKWARD

    @property
    def placed(self) -> Placed:
        """The graph with layouts: where stages differ, those of the stage that would take longest.

        They are of the whole graph, on the ranks of that stage alone.
        """
        return max(self.layouts, key=lambda placed: placed.seconds)

    def part(self, stage: int) -> Placed:
        """The nodes, variables and fields of one stage; everything, where there are none."""
        placed = self.layouts[stage]
        return part(placed, self.stages, stage) if self.stages else placed

    def program(self, stage: int, variables: dict[str, Variable]) -> Program:
        """The tasks of a stage, whose variables these are."""
        placed = self.part(stage)
        mesh = self.target.mesh.within_stage(stage)
        return lower(
            placed,
            variables,
            mesh.in_time(self.timing.micro_batches if self.timing else 1),
            self.target.machine,
            data=self.data,
            rows=self.rows,
            timing=self._timing(stage, placed),
            zero=self.zero,
            stage=self._work(stage) if self.stages else None,
        )

    def _timing(self, stage: int, placed: Placed) -> Timing | None:
        """Of the whole step, without the turns of nodes that only other stages need."""
        if self.timing is None or self.stages is None:
            return self.timing
        going = [(t, m.loop) for m in self.messages if m.source == stage for t in m.made_of]
        kept = [(t, 0) for t in (*placed.graph.outputs.values(), *placed.graph.assigns.values())]
        return self.timing.needed([node for node, _ in placed.nodes], [*kept, *going])

    def _work(self, stage: int) -> StageWork:
        assert self.stages is not None
        pipeline = self.pipeline
        sequence: Sequence = ()
        if self.timing:
            stages, count = self.stages.stages, self.timing.micro_batches
            sequence = (
                pipeline.streaming(stages, count)
                if self.forward
                else pipeline.sequence(stage, stages, count)
            )
        return StageWork(
            stage,
            tuple(m for m in self.messages if m.target == stage),
            tuple(m for m in self.messages if m.source == stage),
            sequence,
            self.segments(stage),
        )

    def in_lanes(self) -> Step:
        """With the lanes of messages as the segments ask for in which they are made and used."""
        if self.stages is None or self.timing is None:
            return self
        made, used = [], []
        for stage in range(self.stages.stages):
            segments = self.segments(stage)
            made.append(segments)
            used.append(first_uses(segments))
        ways = {
            m: (made[m.source][m.tensor.node], used[m.target].get(m.tensor, 0))
            for m in self.messages
            if m.loop and m.tensor.node
        }
        return replace(self, messages=in_lanes(self.messages, ways))

    def with_ahead(self, ahead: int) -> Step:
        """With so many more micro-batches in flight than 1F1B needs if messages take no time."""
        return replace(self, pipeline=replace(self.pipeline, ahead=ahead))

    def segments(self, stage: int) -> dict[Node, int]:
        """The segment of each node of a stage: of the first of its pieces that it has."""
        assert self.stages is not None
        graph, virtual = self.placed.graph, self.pipeline.virtual
        backward = False
        found = {}
        for node, _ in self.part(stage).nodes:
            backward = backward or node in graph.origins or node in graph.updates
            chunk = next(c for c in self.stages.nodes[node] if self.stages.stage(c) == stage)
            piece = chunk // self.stages.stages
            found[node] = 2 * virtual - 1 - piece if backward else piece
        if self.pipeline.schedule == "zero-bubble":
            found.update(self._weight_gradients(stage, found, virtual))
        return found

    def _weight_gradients(
        self, stage: int, segments: dict[Node, int], virtual: int
    ) -> dict[Node, int]:
        """The backward nodes that no other stage waits for, in segments of their own."""
        awaited = {m.tensor for m in self.messages if m.source == stage and m.loop}
        later = {}
        for node in reversed(list(segments)):
            if awaited.isdisjoint(node.outputs) and segments[node] >= virtual:
                later[node] = segments[node] + virtual
            else:
                awaited.update(node.inputs)
        return later


def make_step(
    layouts: tuple[Placed, ...],
    data: str,
    rows: int,
    target: Target,
    timing: Timing | None = None,
    stages: Stages | None = None,
    zero: int = 0,
    *,
    forward: bool = False,
) -> Step:
    """A step, with the messages that its stages need, to be lowered at a level of `zero`."""
    messages: tuple[Transfer, ...] = ()
    if stages is not None:
        messages = transfers(layouts, stages, timing, target.mesh, target.machine)
    step = Step(
        layouts, data, rows, target, timing, stages, messages, zero, forward, target.pipeline
    )
    return step.in_lanes()
