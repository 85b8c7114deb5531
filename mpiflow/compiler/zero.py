"""ZeRO: which variables are split over the axis that splits the batch, instead of replicated.

Rajbhandari, Rasley, Ruwase, He 2020, by level, each with what the ones before it have:

    1  what the optimizer keeps beside a weight    its gradient is reduce-scattered, the update
                                                   runs on the part, the new weight is gathered
    2  gradients                                   in a loop over micro-batches they are
                                                   reduce-scattered before they are added up
    3  weights                                     gathered for the forward pass, let go, and
                                                   gathered again for the backward pass; in a
                                                   loop over micro-batches, once for all of them

Nothing else is needed: updates are elementwise, so their signatures and boxing give the rest.
"""

from __future__ import annotations

from mpiflow.errors import UsageError
from mpiflow.graph.graph import Graph, Node, Variable
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.rowupdate import RowUpdate

LEVELS = range(4)


def check_level(level: int) -> None:
    """UsageError for a level that is none."""
    if level not in LEVELS:
        raise UsageError(f"--zero takes a level from 0 to 3, not {level}")


def level_note(level: int, micro_batches: int = 1) -> str:
    """What a level does, for the plan."""
    parts = ("optimizer state", "gradients", "weights")[:level]
    note = f"ZeRO {level} splits over the axis data: {', '.join(parts)}"
    if level < 3:
        return note
    if micro_batches > 1:
        return f"{note}; each step gathers all weights once, for all its micro-batches"
    return f"{note}; each step gathers a weight twice, for the forward and the backward pass"


def split_variables(graph: Graph, level: int) -> set[str]:
    """The names of the variables that are split.

    A table that is updated by rows stays whole, and what is kept beside it: a step changes little
    of it, and to gather it would take more than what that saves.
    """
    if not level:
        return set()
    by_rows = {
        tensor for node in graph.nodes if isinstance(node.op, RowUpdate) for tensor in node.inputs
    }
    used = {
        tensor for node in graph.live() if node not in graph.updates for tensor in node.inputs
    }  # fmt: skip
    return {
        name
        for name, variable in graph.variables.items()
        if variable.tensor not in by_rows
        and (_is_state(variable, used) or (level > 2 and variable.trainable))
    }


def of_variables(graph: Graph) -> set[Tensor]:
    """The variables, and what is made of them alone (a cast weight)."""
    found = {variable.tensor for variable in graph.variables.values()}
    for node in graph.live():
        if node.inputs and found.issuperset(node.inputs):
            found.update(node.outputs)
    return found


def is_backward(node: Node) -> bool:
    """Whether a node belongs to the backward pass; so does what it computes again."""
    return node.name.startswith(("grad/", "again/"))


def _is_state(variable: Variable, used: set[Tensor]) -> bool:
    """Whether only the optimizer reads a variable."""
    return not variable.trainable and variable.tensor not in used
