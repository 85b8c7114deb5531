"""Tensor: a symbolic value of the whole job, with dtype and logical shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpiflow.errors import GraphError

if TYPE_CHECKING:
    from mpiflow.graph.graph import Graph, Node

DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float32", "float64",
)  # fmt: skip

arithmetic: dict[str, Callable[..., Tensor]] = {}
"""What the operators of a tensor call; the ops put themselves here, as the graph knows none."""


def is_float(dtype: str) -> bool:
    """Whether gradients flow through tensors of this dtype."""
    return "float" in dtype


def is_narrow(dtype: str) -> bool:
    """Whether this is a float of 16 bits."""
    return dtype in ("float16", "bfloat16")


class Tensor:
    """A value of a graph. `node` is None for inputs and variables, which no node makes."""

    __slots__ = ("dtype", "graph", "index", "name", "node", "shape", "where")
    __array_ufunc__ = None  # numpy_array * tensor must come to us, not to NumPy

    def __init__(
        self,
        graph: Graph,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        node: Node | None = None,
        index: int = 0,
        where: str = "",
    ) -> None:
        if dtype not in DTYPES:
            raise GraphError(f"{name}: dtype {dtype!r} is none of {', '.join(DTYPES)}")
        self.graph, self.name, self.shape, self.dtype = graph, name, shape, dtype
        self.node, self.index, self.where = node, index, where

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"

    def __bool__(self) -> bool:
        raise GraphError(
            f"{self.name} has no value while the model is traced, so it cannot decide an `if`"
            f"\n  {self.where}"
        )

    def __add__(self, other: Any) -> Tensor:
        return arithmetic["add"](self, other)

    def __radd__(self, other: Any) -> Tensor:
        return arithmetic["add"](self, other)

    def __sub__(self, other: Any) -> Tensor:
        return arithmetic["subtract"](self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return arithmetic["subtract"](other, self)

    def __mul__(self, other: Any) -> Tensor:
        return arithmetic["multiply"](self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return arithmetic["multiply"](self, other)

    def __truediv__(self, other: Any) -> Tensor:
        return arithmetic["divide"](self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return arithmetic["divide"](other, self)

    def __neg__(self) -> Tensor:
        return arithmetic["multiply"](self, -1)

    def __matmul__(self, other: Any) -> Tensor:
        return arithmetic["matmul"](self, other)
