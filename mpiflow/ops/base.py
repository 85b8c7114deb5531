"""What all op files share."""

from __future__ import annotations

from mpiflow.errors import GraphError
from mpiflow.graph.graph import current, user_line
from mpiflow.graph.op import Op
from mpiflow.graph.tensor import Tensor, is_float

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


def apply(op: Op, *inputs: Tensor) -> Tensor:
    """Add a node with one output to the graph that is being built."""
    graph = inputs[0].graph if inputs else current()
    return graph.add(op, *inputs)[0]


def is_zero(x: Tensor) -> bool:
    """Whether a tensor is a constant zero, as the gradient of an output that nothing uses."""
    op = x.node.op if x.node else None
    return op is not None and op.name == "Fill" and not op.attributes().get("value")


def refusal(message: str) -> GraphError:
    """The error for a call that cannot become a node, with the user's line."""
    return GraphError(f"{message}\n  {user_line()}")


def require_float(op: Op, dtypes: tuple[str, ...]) -> None:
    """Raise unless all inputs are floating-point."""
    for dtype in dtypes:
        if not is_float(dtype):
            raise GraphError(f"{op.name} takes floating-point inputs, not {dtype}; cast it")


def dim_index(rank: int, dim: int, what: str) -> int:
    """`dim` counted from the front; negative ones count from the back."""
    if not -rank <= dim < rank:
        raise refusal(f"{what}: there is no dim {dim} in a tensor of {rank} dims")
    return dim % rank
