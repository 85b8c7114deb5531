"""Sums and maxima over dims, and their inverse, stretching."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor, is_float
from mpiflow.ops.base import Gradients, Tensors, apply, dim_index, refusal


class Reduction(Op):
    """Base of ops that reduce `dims` away, or to size 1 with `keep`.

    Subclasses have the attributes `dims: tuple[int, ...]` and `keep: bool`.
    """

    dims: tuple[int, ...]
    keep: bool

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = tuple((f"d{i}",) for i in range(len(shapes[0])))
        return Rule((full,), (_kept(full, self.dims, self.keep),))

    def sizes(self) -> dict[str, int]:
        return {f"one{dim}": 1 for dim in self.dims} if self.keep else {}

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x.startswith("one"))


@op
class ReduceSum(Reduction):
    """The sum over `dims`."""

    dims: tuple[int, ...]
    keep: bool = False
    linear = ((0,),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        if dtypes[0] == "bool":
            raise GraphError("a sum of bool counts nothing; cast it to float32 or int64")
        return dtypes

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        shape = inputs[0].shape
        return (apply(Expand(self.dims, tuple(shape[d] for d in self.dims), self.keep), dys[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        shard.xp.add.reduce(x, axis=self.dims, dtype=out.dtype, out=out, keepdims=self.keep)


@op
class ReduceMax(Reduction):
    """The maximum over `dims`; over a split dim the parts combine by maximum."""

    dims: tuple[int, ...]
    keep: bool = False
    reduce = "max"

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        if dtypes[0] == "bool":
            raise GraphError("ReduceMax takes numbers, not bool; cast it")
        return dtypes

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        xp = shard.xp
        lowest = -xp.inf if x.dtype.kind == "f" else xp.iinfo(x.dtype).min
        xp.maximum.reduce(x, axis=self.dims, out=out, keepdims=self.keep, initial=lowest)


@op
class Expand(Op):
    """Stretch `dims` to `lengths`; with `keep` they are there with size 1, else they are new."""

    precision = "follow"
    dims: tuple[int, ...]
    lengths: tuple[int, ...]
    keep: bool = False
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        rank = len(shapes[0]) + (0 if self.keep else len(self.dims))
        full = tuple((f"d{i}",) for i in range(rank))
        return Rule((_kept(full, self.dims, self.keep),), (full,))

    def sizes(self) -> dict[str, int]:
        return {f"d{dim}": length for dim, length in zip(self.dims, self.lengths, strict=True)}

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x.startswith("one"))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(ReduceSum(self.dims, self.keep), dys[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        shard.xp.copyto(out, x if self.keep else shard.xp.expand_dims(x, self.dims))


def _kept(
    full: tuple[tuple[str, ...], ...], dims: tuple[int, ...], keep: bool
) -> tuple[tuple[str, ...], ...]:
    if keep:
        return tuple((f"one{i}",) if i in dims else dim for i, dim in enumerate(full))
    return tuple(dim for i, dim in enumerate(full) if i not in dims)


def _dims(x: Tensor, dim: int | Sequence[int] | None, what: str) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    listed = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(sorted({dim_index(x.ndim, d, what) for d in listed}))


def reduce_sum(x: Tensor, dim: int | Sequence[int] | None = None, *, keep: bool = False) -> Tensor:
    """The sum over `dim` (all dims by default); `keep` leaves them with size 1."""
    return apply(ReduceSum(_dims(x, dim, "reduce_sum"), keep), x)


def reduce_max(x: Tensor, dim: int | Sequence[int] | None = None, *, keep: bool = False) -> Tensor:
    """The maximum over `dim` (all dims by default); it has no gradient."""
    return apply(ReduceMax(_dims(x, dim, "reduce_max"), keep), x)


def mean(x: Tensor, dim: int | Sequence[int] | None = None, *, keep: bool = False) -> Tensor:
    """The mean over `dim` (all dims by default) of the logical tensor; of bool, the share of true.

    An output that is a mean over the batch is averaged over all rows in an evaluation.
    """
    from mpiflow.ops.elementwise import scale
    from mpiflow.ops.shape import cast

    if x.dtype == "bool":
        x = cast(x, "float32")
    dims = _dims(x, dim, "mean")
    count = prod(x.shape[d] for d in dims)
    if not is_float(x.dtype):
        raise refusal(f"mean: {x.name} is {x.dtype}; cast it to float32")
    return scale(apply(ReduceSum(dims, keep), x), 1.0 / max(count, 1))


def total(x: Tensor) -> Tensor:
    """The sum over everything, marked as a sum: an evaluation adds it up over the batches."""
    from mpiflow.ops.shape import cast

    if x.dtype == "bool":
        x = cast(x, "float32")
    result = reduce_sum(x)
    result.graph.totals.add(result.name)
    return result


def reduce_to(dy: Tensor, shape: Shape) -> Tensor:
    """Sum a gradient over the dims that broadcasting stretched from `shape`."""
    missing = dy.ndim - len(shape)
    if missing:
        dy = apply(ReduceSum(tuple(range(missing))), dy)
    ones = tuple(i for i, n in enumerate(shape) if n == 1 and dy.shape[i] != 1)
    return apply(ReduceSum(ones, True), dy) if ones else dy
