"""Step 5: which activations stay for the backward pass, and which are computed again in it.

    none        all stay, but for what the model itself marks with `mf.recompute()`
    selective   what few operations make again goes, if all that they need stays anyway: norms,
                activations, softmax and dropout, the scores of attention
    full        of a block only what it is given stays

What is not kept the backward pass computes again, see again.py. What stays in any case is what is
small beside that which it is made of (statistics of a batch norm, which ranks add up) and what was
sent (rows of a table). No variable is updated twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from mpiflow.compiler.blocks import Block, find_blocks
from mpiflow.compiler.cost import op_seconds
from mpiflow.compiler.cuts import tensor_bytes
from mpiflow.compiler.forward import forward_nodes
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.owners import is_message
from mpiflow.errors import UsageError
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.tensor import Tensor

NONE, SELECTIVE, FULL, AUTO = LEVELS = ("none", "selective", "full", "auto")

_CHEAP = 8
"""How many times fewer operations an element than the dearest node of its block has a cheap one."""
_SMALL = 16
"""How many times smaller than what it is made of is a result that stays."""


def check_recompute(level: str | None) -> None:
    """UsageError for a level that is none."""
    if level is not None and level not in LEVELS:
        raise UsageError(f"--recompute takes {', '.join(LEVELS)}, not {level}")


@dataclass(frozen=True, slots=True)
class Kept:
    """The tensors of the forward pass that the backward pass reads, and the nodes it does again.

    `levels` are those of the blocks, and `seconds` what the copies take on one device.
    """

    tensors: tuple[Tensor, ...]
    blocks: tuple[Block, ...]
    levels: tuple[str, ...]
    again: tuple[tuple[Node, ...], ...]
    seconds: tuple[float, ...]

    @property
    def nbytes(self) -> int:
        """Bytes over the whole job."""
        return sum(map(tensor_bytes, self.tensors))

    def __str__(self) -> str:
        lines = [f"kept for the backward pass: {self.nbytes} bytes"]
        lines += [f"  {tensor}" for tensor in self.tensors]
        for block, level, again in zip(self.blocks, self.levels, self.again, strict=True):
            lines.append(f"block {block}: {level}, {len(again)} of {len(block.nodes)} nodes again")
        return "\n".join(lines)


def all_kept(graph: Graph) -> Kept:
    """What the backward pass of a graph reads, where nothing is computed again."""
    read = {t for node in graph.live() if node in graph.origins for t in node.inputs}
    made = (t for node in forward_nodes(graph) for t in node.outputs)
    return Kept(tuple(t for t in made if t in read), (), (), (), ())


class Recompute:
    """The blocks of a training graph, and what may be computed again of each.

    `pieces` says which piece of a pipeline the nodes are on, where there is one; they are then
    pinned to it. The last block, whose backward pass follows at once, keeps all unless `all_again`.
    """

    def __init__(
        self, graph: Graph, machine: Machine, pieces: Mapping[Node, int], all_again: bool = False
    ) -> None:
        self.graph, self.machine, self.pieces = graph, machine, pieces
        self.blocks = find_blocks(graph, pieces)
        self.block_of = {n: i for i, block in enumerate(self.blocks) for n in block.nodes}
        # Of what is differentiated the value itself may be of no use, as that of a scaled loss.
        self.forward = dict.fromkeys(forward_nodes(graph))
        self.backward = dict.fromkeys(n for n in graph.live() if n not in self.forward)
        self.readers: dict[Tensor, set[int]] = {}  # the blocks whose forward nodes read a tensor
        for node in self.block_of:
            for tensor in node.inputs:
                self.readers.setdefault(tensor, set()).add(self.block_of[node])
        self.read = {t for node in self.backward for t in node.inputs}
        self.last = -1 if all_again else len(self.blocks) - 1
        self.dearest = [max(map(_flops_an_element, block.nodes)) for block in self.blocks]

    def levels(self, level: str) -> tuple[str, ...]:
        """The level of each block: `level`, or full where the user marked it."""
        return tuple(
            FULL if block.marked else NONE if i == self.last else level
            for i, block in enumerate(self.blocks)
        )

    def steps(self) -> list[tuple[str, ...]]:
        """Levels that keep less and less: all selective, then more and more blocks full.

        Those that save most for a second that it takes to compute them again come first.
        """
        levels = self.levels(SELECTIVE)
        found = [levels]
        before = self.kept(levels)
        after = self.kept(self.levels(FULL))
        saved = [self._held(before, i) - self._held(after, i) for i in range(len(self.blocks))]
        more = [b - a for a, b in zip(before.seconds, after.seconds, strict=True)]
        order = sorted(range(len(levels)), key=lambda i: (-saved[i] / max(more[i], 1e-12), i))
        for i in order:
            if levels[i] == SELECTIVE:
                levels = (*levels[:i], FULL, *levels[i + 1 :])
                found.append(levels)
        return found

    def _held(self, kept: Kept, block: int) -> int:
        mine = (t for t in kept.tensors if t.node and self.block_of.get(t.node, -1) == block)
        return sum(map(tensor_bytes, mine))

    def kept(self, levels: tuple[str, ...]) -> Kept:
        """What stays, and what is computed again, at these levels."""
        gone = self._gone(levels)
        again = tuple(self._needed(i, gone) for i in range(len(self.blocks)))
        copied = {node for nodes in again for node in nodes}
        taken = {t for node in copied for t in node.inputs} | self.read
        made = (t for node in self.forward for t in node.outputs)
        seconds = tuple(sum(map(self._seconds, nodes)) for nodes in again)
        tensors = tuple(t for t in made if t in taken and t.node not in copied)
        return Kept(tensors, self.blocks, levels, again, seconds)

    def _gone(self, levels: tuple[str, ...]) -> set[Node]:
        """The nodes whose outputs do not stay, but can be made again within their block."""
        gone: set[Node] = set()
        stays: set[Tensor] = set()
        for index, block in enumerate(self.blocks):
            for node in block.nodes:
                given = all(
                    t.node not in self.block_of
                    or t in stays
                    or (t.node in gone and self.block_of[t.node] == index)
                    for t in node.inputs
                )
                others = {i for t in node.outputs for i in self.readers.get(t, ())} - {index}
                if given and not others and self._goes(node, index, levels[index]):
                    gone.add(node)
                elif (
                    not self.read.isdisjoint(node.outputs)
                    or any(levels[i] == FULL for i in others)
                    or (levels[index] == FULL and self._stays(node))
                ):
                    stays.update(node.outputs)
        return gone

    def _goes(self, node: Node, block: int, level: str) -> bool:
        if level == NONE or self._stays(node):
            return False
        return level == FULL or _flops_an_element(node) * _CHEAP <= self.dearest[block]

    def _stays(self, node: Node) -> bool:
        """Whether what a node gives is small, or was sent: then it is not made twice."""
        given = sum(tensor_bytes(t) for t in node.inputs if t.node in self.block_of)
        made = sum(map(tensor_bytes, node.outputs))
        return is_message(node.op) or made * _SMALL <= given

    def _needed(self, index: int, gone: set[Node]) -> tuple[Node, ...]:
        """The nodes that the backward pass of a block needs again."""
        needed = {
            t
            for node in self.backward
            if self.block_behind(node) == index
            for t in node.inputs
            if t.node in gone and self.block_of[t.node] == index
        }
        found = []
        for node in reversed(self.blocks[index].nodes):
            if node in gone and not needed.isdisjoint(node.outputs):
                found.append(node)
                needed.update(node.inputs)
        return tuple(reversed(found))

    def block_behind(self, node: Node) -> int:
        """The block whose gradients a node computes, -1 for none."""
        origin = self.graph.origins.get(node)
        return -1 if origin is None else self.block_of.get(origin, -1)

    def _seconds(self, node: Node) -> float:
        inputs, outputs = (tuple(t.shape for t in x) for x in (node.inputs, node.outputs))
        dtypes = tuple(t.dtype for t in (*node.inputs, *node.outputs))
        return op_seconds(self.machine, node.op, inputs, outputs, dtypes)


def _flops_an_element(node: Node) -> float:
    """The operations that an element of what a node gives takes."""
    inputs, outputs = (tuple(t.shape for t in x) for x in (node.inputs, node.outputs))
    return node.op.flops(inputs, outputs) / max(sum(map(prod, outputs)), 1)
