"""Which values of an input field are legal, as it is used as an index: checked where it is read."""

from __future__ import annotations

from dataclasses import dataclass

from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.random import Fill
from mpiflow.ops.select import Compare, Where


@dataclass(frozen=True, slots=True)
class Limits:
    """Values from 0 to below `below` are legal, and those in `ignored`, which are no indices."""

    below: int
    ignored: frozenset[int] = frozenset()

    def allows(self, value: int) -> bool:
        """Whether a value is legal."""
        return 0 <= value < self.below or value in self.ignored

    def __and__(self, other: Limits) -> Limits:
        """What both uses of a field allow."""
        ignored = {v for v in self.ignored | other.ignored if self.allows(v) and other.allows(v)}
        return Limits(min(self.below, other.below), frozenset(ignored))


def index_limits(graph: Graph) -> dict[str, Limits]:
    """Per input field that is used as an index: which values are legal."""
    fields = {tensor: name for name, tensor in graph.inputs.items()}
    limits: dict[str, Limits] = {}
    for node in graph.live():
        shapes = tuple(t.shape for t in (*node.inputs, *node.outputs))
        for operand, size in node.op.limits(shapes):
            tensor, ignored = _origin(node.inputs[operand])
            if tensor in fields:
                name, found = fields[tensor], Limits(size, ignored)
                limits[name] = found & limits.get(name, found)
    return limits


def _origin(tensor: Tensor) -> tuple[Tensor, frozenset[int]]:
    """The tensor that the values of this one are those of, and which of them it does not have."""
    ignored: set[int] = set()
    while (node := tensor.node) is not None:
        if _keeps_values(node):
            tensor = node.inputs[0]
        elif (value := _left_out(node)) is not None:
            ignored.add(value)
            tensor = node.inputs[1]
        else:
            break
    return tensor, frozenset(ignored)


def _keeps_values(node: Node) -> bool:
    return node.op.name in ("Cast", "Identity", "StopGradient", "Reshape", "Permute")


def _left_out(node: Node) -> int | None:
    """v, where the node is `where(not_equal(x, v), x, ...)`: the x of which v is no index."""
    test = node.inputs[0].node if isinstance(node.op, Where) else None
    if test is None or not isinstance(test.op, Compare) or test.op.by != "not_equal":
        return None
    fill = test.inputs[1].node
    if test.inputs[0] is not node.inputs[1] or fill is None or not isinstance(fill.op, Fill):
        return None
    return int(fill.op.value)
