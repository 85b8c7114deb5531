"""Blocks of the forward pass: what is computed again together, if it is computed again.

A block is a stretch of the model's list of nodes. Only those count that depend on the batch and on
weights: what depends on one of the two alone (masks, counts, casts of weights) is never made again.

    |  block 0  |x|  block 1  |x|  block 2  |   x: what one makes and a later one reads, kept

The model is cut where little is kept: between the layers of a transformer, or of a ResNet, that is
one tensor. Names and repeats of layers are not looked at. How many cuts there are is decided by
the memory that is left at the end: all that is kept at the cuts, and the activations of the largest
block, which are there while its gradients are computed; in a model of n equal layers that are cut
anywhere, about the square root of n (Chen, Xu, Zhang, Guestrin 2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.cuts import crossing_bytes, tensor_bytes
from mpiflow.compiler.forward import needing_both
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.tensor import Tensor, is_float

_FINEST = 64
"""The parts, at most, that the activations of a stretch are cut into."""


@dataclass(frozen=True, slots=True)
class Block:
    """Nodes of one pipeline piece, in order; `marked` where the user asked to run them again."""

    nodes: tuple[Node, ...]
    piece: int = 0
    marked: bool = False

    def __str__(self) -> str:
        return f"{self.nodes[0].name} .. {self.nodes[-1].name}"


def activation_nodes(graph: Graph) -> list[Node]:
    """The forward nodes that depend on the batch and on a weight, in order."""
    variables = (v.tensor for v in graph.variables.values())
    return needing_both(graph, (tensor for tensor in variables if is_float(tensor.dtype)))


def find_blocks(graph: Graph, pieces: Mapping[Node, int]) -> tuple[Block, ...]:
    """All blocks, in order. None is on two of the `pieces` that a pipeline cuts the model into.

    What the user marked is a block; the rest is cut where it keeps least.
    """
    found: list[Block] = []
    read = _read_behind(graph)
    nodes = activation_nodes(graph)

    def place(node: Node) -> tuple[int, int]:
        return pieces.get(node, 0), graph.marks.get(node, -1)

    for (piece, mark), group in groupby(nodes, place):
        stretch = list(group)
        if mark >= 0:
            found.append(Block(tuple(stretch), piece, marked=True))
        else:
            found += [Block(tuple(part), piece) for part in _cut(stretch, read)]
    return tuple(found)


def _read_behind(graph: Graph) -> set[Tensor]:
    """What the backward pass reads."""
    return {t for node in graph.live() if node in graph.origins for t in node.inputs}


def _cut(nodes: list[Node], read: set[Tensor]) -> list[list[Node]]:
    """A stretch in parts, so that what is left in memory is least."""
    crossing = crossing_bytes(nodes)
    made = [sum(tensor_bytes(t) for t in node.outputs if t in read) for node in nodes]
    total = np.concatenate(([0], np.cumsum(made)))
    places = _narrow(crossing)
    best, least = [0, len(nodes)], float(total[-1])
    for parts in range(2, min(_FINEST, len(places)) + 1):
        ends, held = _fewest_bytes(places, crossing, total, total[-1] / parts)
        if held < least:
            best, least = ends, held
    return [nodes[a:b] for a, b in pairwise(best)]


def _narrow(crossing: NDArray[np.float64]) -> list[int]:
    """The places where no more crosses than at either neighbour, and both ends.

    Where all that cross are alike, as in a chain, that is every place.
    """
    inner = [
        i
        for i in range(1, len(crossing) - 1)
        if crossing[i] <= min(crossing[i - 1] or np.inf, crossing[i + 1] or np.inf)
    ]
    return [0, *inner, len(crossing) - 1]


def _fewest_bytes(
    places: list[int], crossing: NDArray[np.float64], total: NDArray[np.float64], limit: float
) -> tuple[list[int], float]:
    """Cuts at some of the places that keep least, in parts of up to `limit` bytes where that goes.

    With the bytes that are left in memory: those kept, and those of the largest part.
    """
    at = np.array(places)
    kept = np.full(len(at), np.inf)
    kept[0] = 0.0
    came = [0] * len(at)
    for j in range(1, len(at)):
        first = min(int(np.searchsorted(total[at[:j]], total[at[j]] - limit)), j - 1)
        options = kept[first:j] + crossing[at[first:j]]
        i = int(options.argmin())
        kept[j], came[j] = options[i], first + i
    ends = [len(at) - 1]
    while ends[-1]:
        ends.append(came[ends[-1]])
    cuts = [places[i] for i in reversed(ends)]
    largest = max(total[b] - total[a] for a, b in pairwise(cuts))
    return cuts, float(kept[-1] + largest)
