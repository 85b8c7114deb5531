"""Step 5: which activations stay for the backward pass. All do; none is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mpiflow.graph.graph import Graph
from mpiflow.graph.tensor import Tensor
from mpiflow.plan.slice import itemsize


@dataclass(frozen=True, slots=True)
class Kept:
    """The tensors of the forward pass that the backward pass reads."""

    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes over the whole job."""
        return sum(prod(t.shape) * itemsize(t.dtype) for t in self.tensors)

    def __str__(self) -> str:
        lines = [f"kept for the backward pass: {self.nbytes} bytes"]
        return "\n".join([*lines, *(f"  {tensor}" for tensor in self.tensors)])


def keep_activations(graph: Graph) -> Kept:
    """Every forward tensor that a gradient node reads."""
    backward = [node for node in graph.live() if node.name.startswith("grad/")]
    made = {t for node in backward for t in node.outputs}
    read = dict.fromkeys(t for node in backward for t in node.inputs if t not in made)
    return Kept(tuple(t for t in read if t.node is not None))
