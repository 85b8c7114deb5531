"""Step 5b: the rewrite of a graph by which its backward pass computes activations again.

Forward nodes of a block that its backward nodes need are copied to where these begin, and come
after the gradient of what the block gives; so what they make is in memory from then on only:

    forward    x -> [ a -> b -> c ] -> y
    backward             dy -> [ again/a -> again/b ] -> gradients of c, b, a

A copy has the op of the node that it copies, the key of its random numbers included: it gives the
same numbers. In `origins` it stands as what that node is differentiated by, which puts it on the
same pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod

from mpiflow.compiler.boxing import local_shape
from mpiflow.compiler.recompute import Kept, Recompute
from mpiflow.compiler.signature import Placed
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.tensor import Tensor
from mpiflow.plan.slice import itemsize
from mpiflow.plan.text import size_text

AGAIN = "again/"
"""What names of copies begin with."""


def rewritten(recompute: Recompute, kept: Kept) -> Graph:
    """The graph that computes again what is not kept; the one given, if that is nothing.

    Its nodes are pinned to the pieces of a pipeline within which blocks were found.
    """
    if not any(kept.again):
        return recompute.graph
    graph = _Rewrite(recompute, kept).graph()
    return replace(graph, stages=dict(recompute.pieces)) if recompute.pieces else graph


def recompute_notes(placed: Placed, stages: int) -> list[str]:
    """What a plan says of what is computed again: how much, its price, and what need not stay."""
    graph = placed.graph
    again = [node for node in graph.origins if node.name.startswith(AGAIN)]
    if not again:
        return []
    seconds = placed.kernel_seconds()
    again = [node for node in again if node in seconds]
    more = sum(seconds[node] for node in again)
    share = more / (sum(seconds.values()) - more)
    layouts = {
        t: x for n, choice in placed.nodes for t, x in zip(n.outputs, choice.outputs, strict=True)
    }
    mesh = placed.problem.choices.mesh

    def held(tensors: Iterable[Tensor]) -> int:
        return sum(
            prod(local_shape(t.shape, layouts[t], mesh)) * itemsize(t.dtype) for t in tensors
        )

    behind = [node for node, _ in placed.nodes if node in graph.origins]
    read = {t for node in behind for t in node.inputs}
    forward = [node for node, _ in placed.nodes if node not in graph.origins]
    stay = [t for node in forward for t in node.outputs if t in read]
    graded = {t for node in set(behind).difference(again) for t in node.inputs}
    gone = [t for node in again for t in node.outputs if t in graded]
    now, before = held(stay), held(stay) + held(gone)
    of = f"{' of a micro-batch' if mesh.timed else ''}{' on all stages' if stages > 1 else ''}"
    return [
        f"recompute: {len(again):,} nodes of the forward pass run again in the backward pass, which"
        f" adds {share:.0%} to the seconds of kernels; activations{of} of {size_text(now)} stay"
        f" for it instead of {size_text(before)}"
    ]


@dataclass
class _Rewrite:
    """Copies nodes into the backward pass, and lets what is behind read the copies."""

    given: Recompute
    kept: Kept
    tensors: dict[Tensor, Tensor] = field(default_factory=dict)
    """What takes the place of the tensors of the backward pass."""

    def graph(self) -> Graph:
        old = self.given.graph
        # The names that are taken are counted anew in this graph.
        self.made = replace(
            old, nodes=[], hints=dict(old.hints), hint_lines=dict(old.hint_lines), after={},
            origins={}, updates=set(), _counts=dict(old._counts),
        )  # fmt: skip
        begun: set[int] = set()
        copies: list[dict[Tensor, Tensor]] = [{} for _ in self.given.blocks]
        self.made.nodes += self.given.forward
        for node in self.given.backward:
            block = self.given.block_behind(node)
            if block >= 0 and block not in begun and self.kept.again[block]:
                begun.add(block)
                copies[block] = self._copy(block)
            self._behind(node, copies[block] if block >= 0 else {})
        self.made.assigns = {name: self._now(t) for name, t in old.assigns.items()}
        self.made.outputs = {name: self._now(t) for name, t in old.outputs.items()}
        return self.made

    def _now(self, tensor: Tensor) -> Tensor:
        return self.tensors.get(tensor, tensor)

    def _copy(self, block: int) -> dict[Tensor, Tensor]:
        """The copies of a block's nodes; what each tensor is copied to."""
        found: dict[Tensor, Tensor] = {}
        gradient = self._gradient(block)
        for node in self.kept.again[block]:
            inputs = tuple(found.get(t, t) for t in node.inputs)
            copy = self._node(node, self.made.unique(f"{AGAIN}{node.name}"), inputs)
            found.update(zip(node.outputs, copy.outputs, strict=True))
            self.made.origins[copy] = node
            if gradient is not None:
                self.made.after[copy] = gradient
            self._hint(node, copy)
        return found

    def _hint(self, node: Node, copy: Node) -> None:
        """Ask for the layout of a copy as for that of the node."""
        name, hints = node.outputs[0].name, self.made.hints
        if name in hints:
            hints[copy.name] = hints[name]
            self.made.hint_lines[copy.name] = self.made.hint_lines[name]

    def _gradient(self, block: int) -> Tensor | None:
        """The latest of the gradients that the backward pass of a block is given."""
        place = {t: i for i, node in enumerate(self.made.nodes) for t in node.outputs}
        given = [
            self._now(t)
            for node in self.given.backward
            if self.given.block_behind(node) == block
            for t in node.inputs
            if t.node in self.given.backward
        ]
        return max((t for t in given if t in place), key=place.__getitem__, default=None)

    def _behind(self, node: Node, copies: dict[Tensor, Tensor]) -> None:
        """A node of the backward pass, as it is or with the copies as its inputs."""
        inputs = tuple(copies[t] if t in copies else self._now(t) for t in node.inputs)
        now = node
        if inputs == node.inputs:
            self.made.nodes.append(node)
        else:
            now = self._node(node, node.name, inputs)
            self.tensors.update(zip(node.outputs, now.outputs, strict=True))
        if node in self.given.graph.origins:
            self.made.origins[now] = self.given.graph.origins[node]
        if node in self.given.graph.updates:
            self.made.updates.add(now)

    def _node(self, node: Node, name: str, inputs: tuple[Tensor, ...]) -> Node:
        outputs = tuple(
            Tensor(
                self.made, name if i == 0 else f"{name}:{i}", t.shape, t.dtype,
                index=i, where=t.where,
            )
            for i, t in enumerate(node.outputs)
        )  # fmt: skip
        made = Node(node.op, name, inputs, outputs, node.where)
        for tensor in outputs:
            tensor.node = made
        self.made.nodes.append(made)
        return made
