"""Where a list of nodes is cut into pieces: for time, for what fits, and for what is sent.

An interval program over (pieces, nodes), as in Alpa's stage cut (Zheng et al. 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from mpiflow.compiler.bounds import Table
from mpiflow.errors import CompileError
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.tensor import Tensor
from mpiflow.plan.slice import itemsize

_SLACK = 1.05
"""How much longer than need be the longest piece may take, so that less is sent at the cuts."""


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that each node in the list adds to a stage, and those that there are for them."""

    nbytes: Table
    limit: float


def tensor_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor over the whole job."""
    return prod(tensor.shape) * itemsize(tensor.dtype)


def crossing_bytes(nodes: list[Node]) -> Table:
    """The bytes of the tensors that are made before each place in the list and read behind it."""
    index = {node: i for i, node in enumerate(nodes)}
    last: dict[Tensor, int] = {}
    for i, node in enumerate(nodes):
        last.update({t: i for t in node.inputs if t.node in index})
    change = np.zeros(len(nodes) + 2)
    for tensor, reader in last.items():
        assert tensor.node is not None
        change[index[tensor.node] + 1] += tensor_bytes(tensor)
        change[reader + 1] -= tensor_bytes(tensor)
    return np.cumsum(change)[:-1]


def pinned_pieces(graph: Graph, nodes: list[Node], count: int) -> list[int]:
    """The piece that each node is pinned to, -1 for none.

    One model serves any number of stages: where it names more, neighbours share one.
    """
    named = 1 + max(graph.stages.values(), default=-1)
    if 0 < named < count:
        raise CompileError(
            f"the model names {named} stages with mf.stage, and the mesh asks for {count} pieces;"
            " name more, or none"
        )
    pins = [graph.stages[node] * count // named if node in graph.stages else -1 for node in nodes]
    latest = 0
    for node, pin in zip(nodes, pins, strict=True):
        if 0 <= pin < latest:
            raise CompileError(
                f"{node.name} is pinned to stage {graph.stages[node]}, but stands behind nodes of a"
                f" later stage; stages are named in the order of the model\n  {node.where}"
            )
        latest = max(latest, pin)
    return pins


def ends(
    seconds: list[Table], crossing: Table, pins: list[int], rooms: Sequence[Room] = ()
) -> list[int] | None:
    """Where each piece begins, and the end: the least longest piece, then the fewest bytes sent.

    `seconds` has those of the nodes in each piece that they may be in, `rooms` what there is for
    them; none, where nothing is limited. None, where no cut keeps that and the pins.
    """
    count, size = len(seconds), len(pins) + 1
    pinned, backward = np.array(pins), np.tri(size, dtype=bool)

    def spans(piece: int) -> Table:
        """The seconds of each span that a piece may be: it has no node pinned to another."""
        span = _between(seconds[piece])  # from a first node to the end of a piece
        span[backward] = np.inf
        if rooms:
            span[_between(rooms[piece].nbytes) > rooms[piece].limit] = np.inf
        others = np.concatenate(([0], np.cumsum((pinned >= 0) & (pinned != piece))))
        return np.where(others[None, :] == others[:, None], span, np.inf)

    longest = np.full(size, np.inf)
    longest[0] = 0.0
    for piece in range(count):
        longest = np.maximum(longest[:, None], spans(piece)).min(0)
    if longest[-1] == np.inf:
        return None
    limit = longest[-1] * _SLACK
    sent = np.full(size, np.inf)
    sent[0] = 0.0
    came = []
    for piece in range(count):
        cost = sent[:, None] + np.where(spans(piece) <= limit, crossing[:, None], np.inf)
        came.append(cost.argmin(0))
        sent = cost.min(0)
    found = [size - 1]
    for first in reversed(came):
        found.append(int(first[found[-1]]))
    return found[::-1]


def _between(each: Table) -> Table:
    """The sums of what is from one place in a list to another, by both."""
    total = np.concatenate(([0.0], np.cumsum(each)))
    return total[None, :] - total[:, None]
