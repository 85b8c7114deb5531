"""Ops that look at indices: they ask where their shard begins, and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor, is_float
from mpiflow.ops.base import Gradients, Tensors, apply, dim_index
from mpiflow.ops.elementwise import Elementwise
from mpiflow.ops.work import in_turn


@op
class Equal(Elementwise):
    """Whether x and y are equal; integers of any width compare exactly."""

    calls = "equal"

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(dtypes)) > 1 and any(map(is_float, dtypes)):
            raise GraphError(f"Equal compares {dtypes[0]} with {dtypes[1]}; cast one")
        return ("bool",)


@op
class ArgMax(Op):
    """The index of the first maximum along `dim`."""

    dim: int

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = tuple((f"d{i}",) for i in range(len(shapes[0])))
        return Rule((full,), (full[: self.dim] + full[self.dim + 1 :],))

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset({f"d{self.dim}"})

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return ("int64",)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return 0 if self.dim == len(inputs[0]) - 1 else 8 * prod(inputs[0])

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        xp = shard.xp
        if self.dim != x.ndim - 1:  # argmax would copy x to bring its dim to the end
            moved = xp.moveaxis(x, self.dim, -1)
            x = shard.work[: x.nbytes].view(x.dtype).reshape(moved.shape)
            xp.copyto(x, moved)
        xp.argmax(x, axis=-1, out=out)


class RowIndex(Op):
    """Base of ops that address one entry, `index`, of the last dim of each row."""

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return address_bytes(inputs[1])

    def _address(
        self, shard: ShardView, index: Any, columns: int, start: int
    ) -> tuple[Any, Any, Any]:
        call, *found = address(shard.xp, shard.work, index, columns, start)
        call()
        return found[0], found[1], found[2]


def address_bytes(index: Shape) -> int:
    """The workspace of `address`: two int64, one value of at most 8 bytes, one bool per row."""
    return prod(index) * 25


def address(
    xp: Any, work: Any, index: Any, columns: int, start: int
) -> tuple[Callable[[], None], Any, Any, Any]:
    """A call that finds flat positions of the entries that a shard holds, and which these are.

    Then both, and scratch. The shard has the `columns` from `start` on. Rows whose entry lies
    elsewhere get their own first position.
    """
    n = index.size
    flat, rows = work[: 8 * n].view(xp.int64), work[8 * n : 16 * n].view(xp.int64)
    mine, scratch = work[24 * n : 25 * n].view(bool), work[16 * n : 24 * n].view(xp.int64)
    calls = [
        partial(xp.copyto, flat, index.reshape(-1), "unsafe"),
        # One unsigned comparison is 0 <= flat < columns.
        partial(xp.less, flat.view(xp.uint64), columns, mine),
        partial(xp.multiply, flat, mine, flat),
        partial(rows.fill, columns),
        partial(rows[:1].fill, 0),
        partial(xp.add.accumulate, rows, 0, None, rows),
        partial(xp.add, flat, rows, flat),
    ]
    if start:
        calls.insert(1, partial(xp.subtract, flat, start, flat))
    return in_turn(calls), flat, mine, scratch


@op
class Pick(RowIndex):
    """One entry of each row: x (..., c), index (...) -> x[..., index]; zero if held elsewhere."""

    rule = "... c, ... -> ..."
    linear = ((0,),)
    indexes = ((1, 0, -1),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[1])
        return dtypes[:1]

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, index = inputs
        return apply(PickGrad(x.shape[-1]), dys[0], index), None

    def kernel(self, shard: ShardView, out: Any, x: Any, index: Any) -> None:
        columns = x.shape[-1]
        if not x.size:
            out.fill(0)
            return
        start = shard.start(0, x.ndim - 1)
        flat, mine, _ = self._address(shard, index, columns, start)
        values = out.reshape(-1)
        shard.xp.take(x.reshape(-1), flat, out=values, mode="clip")
        # Not a product with the mask: an infinity held elsewhere must not become NaN here.
        shard.xp.logical_not(mine, out=mine)
        shard.xp.copyto(values, 0, where=mine)


@op
class PickGrad(RowIndex):
    """The gradient of `Pick`: dy (...), index (...) -> zeros (..., c) with dy at the index."""

    columns: int
    rule = "..., ... -> ... c"
    linear = ((0,),)
    indexes = ((1, 2, -1),)

    def sizes(self) -> dict[str, int]:
        return {"c": self.columns}

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[1])
        return dtypes[:1]

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return apply(Pick(), dys[0], inputs[1]), None

    def kernel(self, shard: ShardView, out: Any, dy: Any, index: Any) -> None:
        out.fill(0)
        if not out.size:
            return
        start = shard.start(OUT, out.ndim - 1)
        flat, mine, scratch = self._address(shard, index, out.shape[-1], start)
        values = scratch.view(dy.dtype)[: dy.size]
        values.fill(0)
        shard.xp.copyto(values, dy.reshape(-1), where=mine)
        shard.xp.put(out, flat, values)


def require_index(op: Op, dtype: str) -> None:
    """Raise unless the dtype is that of indices."""
    if is_float(dtype) or dtype == "bool":
        raise GraphError(f"{op.name} takes integers as indices, not {dtype}; cast them")


def argmax(x: Tensor, dim: int = -1) -> Tensor:
    """The index of the first maximum along `dim`."""
    return apply(ArgMax(dim_index(x.ndim, dim, "argmax")), x)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """One entry of the last dim of each row: x (..., c), index (...) -> (...)."""
    return apply(Pick(), x, index)
