"""Ops that compare and choose: masks of bool, and values by them."""

from __future__ import annotations

from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor, is_float
from mpiflow.ops.base import Gradients, Tensors, apply, refusal
from mpiflow.ops.elementwise import Arithmetic, Elementwise, FloatElementwise, as_number
from mpiflow.ops.index import Equal
from mpiflow.ops.random import fill
from mpiflow.ops.reduction import reduce_to

_COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "not_equal")
_LOGICAL = ("logical_and", "logical_or")


@op
class Compare(Elementwise):
    """Whether x `by` y, which is one of the comparisons' NumPy names."""

    by: str

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        _require_one_of(self.name, self.by, _COMPARISONS)
        return super().pattern(shapes)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(dtypes)) > 1 and any(map(is_float, dtypes)):
            raise GraphError(f"{self.by} compares {dtypes[0]} with {dtypes[1]}; cast one")
        return ("bool",)

    def kernel(self, shard: ShardView, out: Any, x: Any, y: Any) -> None:
        getattr(shard.xp, self.by)(x, y, out=out)


@op
class Logical(Elementwise):
    """x `by` y, both bool: logical_and or logical_or."""

    by: str
    inplace = ((0, 0), (1, 0))

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        _require_one_of(self.name, self.by, _LOGICAL)
        return super().pattern(shapes)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        _require_bool(self, *dtypes)
        return ("bool",)

    def kernel(self, shard: ShardView, out: Any, x: Any, y: Any) -> None:
        getattr(shard.xp, self.by)(x, y, out=out)


@op
class LogicalNot(Elementwise):
    """Whether x is false."""

    calls = "logical_not"
    inplace = ((0, 0),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        _require_bool(self, *dtypes)
        return ("bool",)


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    # What a plan names is looked up in the array module: only these names may be.
    if value not in allowed:
        raise GraphError(f"{name}: {value!r} is none of {', '.join(allowed)}")


def _require_bool(op: Op, *dtypes: str) -> None:
    for dtype in dtypes:
        if dtype != "bool":
            raise GraphError(f"{op.name} takes a bool here, not {dtype}; compare it with something")


@op
class Where(Elementwise):
    """x where the condition holds, else y."""

    linear = ((1, 2),)
    inplace = ((2, 0),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        _require_bool(self, dtypes[0])
        return super().dtypes(dtypes[1:])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        condition, x, y = inputs
        dx, dy = (apply(Keep(holds), dys[0], condition) for holds in (True, False))
        return None, reduce_to(dx, x.shape), reduce_to(dy, y.shape)

    def kernel(self, shard: ShardView, out: Any, condition: Any, x: Any, y: Any) -> None:
        shard.xp.copyto(out, y)
        shard.xp.copyto(out, x, where=condition)


@op
class Keep(Elementwise):
    """x where the condition is `holds`, else zero, even where x is not finite."""

    holds: bool = True
    linear = ((0,),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        _require_bool(self, dtypes[1])
        return dtypes[:1]

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, condition = inputs
        return reduce_to(apply(Keep(self.holds), dys[0], condition), x.shape), None

    def kernel(self, shard: ShardView, out: Any, x: Any, condition: Any) -> None:
        if self.holds:
            out.fill(0)
            shard.xp.copyto(out, x, where=condition)
        else:
            shard.xp.copyto(out, x)
            shard.xp.copyto(out, 0, where=condition)


@op
class Maximum(Arithmetic):
    """The larger of x and y."""

    calls = "maximum"
    inplace = ((0, 0), (1, 0))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, y = inputs
        dx, dy = (apply(LargerGrad(), dys[0], *pair) for pair in ((x, y), (y, x)))
        return reduce_to(dx, x.shape), reduce_to(dy, y.shape)


@op
class Minimum(Arithmetic):
    """The smaller of x and y."""

    calls = "minimum"
    inplace = ((0, 0), (1, 0))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, y = inputs
        dx, dy = (apply(LargerGrad(), dys[0], *pair) for pair in ((y, x), (x, y)))
        return reduce_to(dx, x.shape), reduce_to(dy, y.shape)


@op
class LargerGrad(FloatElementwise):
    """dy where x > y, half of it where they are equal, else zero."""

    linear = ((0,),)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return prod(outputs[0])

    def kernel(self, shard: ShardView, out: Any, dy: Any, x: Any, y: Any) -> None:
        if not out.size:
            return
        mask = shard.work[: out.size].view(bool).reshape(out.shape)
        out.fill(0)
        shard.xp.greater(x, y, out=mask)
        shard.xp.copyto(out, dy, where=mask)
        shard.xp.equal(x, y, out=mask)
        shard.xp.multiply(dy, 0.5, out=out, where=mask)


@op
class Clip(Arithmetic):
    """x, but at least `low` and at most `high`."""

    low: float | None = None
    high: float | None = None
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(ClipGrad(self.low, self.high), dys[0], inputs[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        if self.low is not None:
            x = shard.xp.maximum(x, self.low, out=out)
        if self.high is not None:
            shard.xp.minimum(x, self.high, out=out)


@op
class ClipGrad(FloatElementwise):
    """dy where x lies within the limits, else zero."""

    low: float | None = None
    high: float | None = None
    linear = ((0,),)
    inplace = ((0, 0),)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return prod(outputs[0])

    def kernel(self, shard: ShardView, out: Any, dy: Any, x: Any) -> None:
        if not out.size:
            return
        xp, mask = shard.xp, shard.work[: out.size].view(bool).reshape(out.shape)
        xp.copyto(out, dy)
        if self.low is not None:
            xp.copyto(out, 0, where=xp.less(x, self.low, out=mask))
        if self.high is not None:
            xp.copyto(out, 0, where=xp.greater(x, self.high, out=mask))


Number = Tensor | float


def _compare(by: str, x: Tensor, y: Number) -> Tensor:
    return apply(Compare(by), x, _tensor(y, x))


def _tensor(value: Number, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return fill((), as_number(like, value), like.dtype)


def greater(x: Tensor, y: Number) -> Tensor:
    """Whether x > y, elementwise; y may be a number."""
    return _compare("greater", x, y)


def greater_equal(x: Tensor, y: Number) -> Tensor:
    """Whether x >= y, elementwise; y may be a number."""
    return _compare("greater_equal", x, y)


def less(x: Tensor, y: Number) -> Tensor:
    """Whether x < y, elementwise; y may be a number."""
    return _compare("less", x, y)


def less_equal(x: Tensor, y: Number) -> Tensor:
    """Whether x <= y, elementwise; y may be a number."""
    return _compare("less_equal", x, y)


def equal(x: Tensor, y: Number) -> Tensor:
    """Whether x and y are equal, elementwise; y may be a number."""
    return apply(Equal(), x, _tensor(y, x))


def not_equal(x: Tensor, y: Number) -> Tensor:
    """Whether x and y differ, elementwise; y may be a number."""
    return _compare("not_equal", x, y)


def logical_and(x: Tensor, y: Tensor) -> Tensor:
    """Whether both hold."""
    return apply(Logical("logical_and"), x, y)


def logical_or(x: Tensor, y: Tensor) -> Tensor:
    """Whether one of them holds."""
    return apply(Logical("logical_or"), x, y)


def logical_not(x: Tensor) -> Tensor:
    """Whether x is false."""
    return apply(LogicalNot(), x)


def where(condition: Tensor, x: Number, y: Number) -> Tensor:
    """x where the condition holds, else y; one of them may be a number."""
    if isinstance(x, Tensor):
        return apply(Where(), condition, x, _tensor(y, x))
    if not isinstance(y, Tensor):
        raise refusal(f"where: {x!r} and {y!r} are both numbers; one must be a tensor")
    return apply(Where(), condition, _tensor(x, y), y)


def keep(x: Tensor, condition: Tensor) -> Tensor:
    """x where the condition holds, else zero."""
    return apply(Keep(), x, condition)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """The larger of x and y; where they are equal, each gets half of the gradient."""
    return apply(Maximum(), x, y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    """The smaller of x and y; where they are equal, each gets half of the gradient."""
    return apply(Minimum(), x, y)


def clip(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """x, but at least `low` and at most `high`; outside of them there is no gradient."""
    if low is None and high is None:
        raise refusal(f"clip: {x} needs `low`, `high` or both")
    limits = (None if limit is None else as_number(x, limit) for limit in (low, high))
    return apply(Clip(*limits), x)
