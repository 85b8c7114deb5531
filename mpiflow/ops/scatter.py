"""Ops that write at an index of the last dim of each row; see `index` for those that read."""

from __future__ import annotations

from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import OUT, ShardView, op
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import DTYPES, Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.index import Pick, RowIndex, require_index


@op
class OneHot(RowIndex):
    """index (...) -> (..., c): one at the index of each row, else zero."""

    classes: int
    dtype: str = "float32"
    rule = "... -> ... c"
    indexes = ((0, 1, -1),)

    def sizes(self) -> dict[str, int]:
        return {"c": self.classes}

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[0])
        return (self.dtype,)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return super().workspace((*inputs, *inputs), outputs, dtype)

    def kernel(self, shard: ShardView, out: Any, index: Any) -> None:
        out.fill(0)
        if out.size:
            start = shard.start(OUT, out.ndim - 1)
            flat, mine, scratch = self._address(shard, index, out.shape[-1], start)
            values = scratch.view(out.dtype)[: index.size]
            shard.xp.copyto(values, mine)
            shard.xp.put(out, flat, values)


@op
class AddAt(RowIndex):
    """x (..., c) with `value` (...) added at the index (...) of each row."""

    rule = "... c, ..., ... -> ... c"
    linear = ((0, 1),)
    inplace = ((0, 0),)
    indexes = ((2, 0, -1),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[2])
        require_float(self, dtypes[:2])
        if dtypes[0] != dtypes[1]:
            raise GraphError(f"AddAt adds {dtypes[1]} to {dtypes[0]}; cast one")
        return dtypes[:1]

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return dys[0], apply(Pick(), dys[0], inputs[2]), None

    def kernel(self, shard: ShardView, out: Any, x: Any, value: Any, index: Any) -> None:
        xp = shard.xp
        xp.copyto(out, x)
        if not out.size:
            return
        start = shard.start(OUT, out.ndim - 1)
        flat, mine, scratch = self._address(shard, index, out.shape[-1], start)
        values = scratch.view(x.dtype)[: value.size]
        xp.take(out.reshape(-1), flat, out=values, mode="clip")
        xp.add(values, value.reshape(-1), out=values, where=mine)
        xp.put(out, flat, values)


def one_hot(index: Tensor, classes: int, dtype: str = "float32") -> Tensor:
    """index (...) -> (..., classes): one at the index, else zero."""
    if dtype not in DTYPES:
        raise refusal(f"one_hot: dtype {dtype!r} is none of {', '.join(DTYPES)}")
    return apply(OneHot(classes, dtype), index)


def add_at(x: Tensor, value: Tensor, index: Tensor) -> Tensor:
    """x (..., c) with value (...) added at the index (...) of each row."""
    return apply(AddAt(), x, value, index)
