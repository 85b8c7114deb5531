"""What each node of a model adds to what a pipeline stage holds: what a cut under a limit weighs.

A node brings variables and the sums of their gradients, which are always there, and activations,
which are there for each micro-batch in flight. Whatever else a stage holds at its fullest is taken
to stay as it is in a plan that was made; that plan's arena says how much that is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiflow.compiler.bounds import Table
from mpiflow.compiler.budget import LASTING, budget
from mpiflow.compiler.cuts import Room
from mpiflow.compiler.parts import Step
from mpiflow.compiler.signature import Placed
from mpiflow.compiler.stages import Stages, assign_stages, node_by_node
from mpiflow.compiler.zero import is_backward
from mpiflow.errors import CompileError
from mpiflow.graph.graph import Node


def moved(step: Step, arenas: Sequence[int], limit: int) -> Stages | None:
    """The cut of least time that keeps a limit, where `arenas` are the bytes of a step's stages.

    None where there is none, or no other one.
    """
    stages, layouts = step.stages, step.layouts
    if stages is None or sum(arenas) > limit * len(arenas):
        return None  # no stage has room for what another has too much
    seconds = [placed.kernel_seconds() for placed in layouts]
    try:
        virtual = step.pipeline.virtual
        cut = assign_stages(step.placed.graph, seconds, virtual, _rooms(step, arenas, limit))
    except CompileError:
        return None  # other layouts may fit
    return None if cut.nodes == stages.nodes else cut


def _rooms(step: Step, arenas: Sequence[int], limit: int) -> list[Room]:
    """What the nodes that are cut would hold on each stage, and how much of it fits there."""
    stages, pipeline = step.stages, step.pipeline
    assert stages is not None
    count = step.timing.micro_batches if step.timing else 1
    nodes, alone = node_by_node(step.placed.graph)
    known = {id(placed): _added(placed, nodes, alone) for placed in step.layouts}
    found = []
    for stage, placed in enumerate(step.layouts):
        always, turn = known[id(placed)]
        nbytes = always + pipeline.alive(stage, stages.stages, count) * turn
        mine = [stages.on(node, stage) for node in nodes]
        found.append(Room(nbytes, limit - (arenas[stage] - float(nbytes[mine].sum()))))
    return found


def _added(placed: Placed, nodes: Sequence[Node], alone: Stages) -> tuple[Table, Table]:
    """The bytes that each of the nodes brings: for all time, and for each micro-batch in flight."""
    held = budget(placed.problem, scatter=bool(placed.limit and placed.limit.zero > 1))
    timing = placed.problem.choices.timing
    turn = next((i for i, node in enumerate(held.nodes) if is_backward(node)), len(held.nodes))
    always, activations = np.zeros(len(nodes)), np.zeros(len(nodes))
    for one in held.held:
        maker = one.tensor.node
        pieces = alone.variables.get(one.tensor, ()) if maker is None else alone.nodes[maker]
        looping = maker is not None and (timing is None or bool(timing.loops[maker]))
        stays = one.what == "tensor" and looping and one.start < turn <= one.stop
        if pieces and (stays or one.what in LASTING):
            # What several have, as tied weights, may end up on the stages of the first and last.
            table = activations if stays else always
            table[sorted({pieces[0], pieces[-1]})] += one.bytes_of(placed.choice)
    return always, activations
