"""Elementwise arithmetic with broadcasting.

A dim of size 1 stretches to its partner's size, and a missing leading dim counts as 1, as in
NumPy. One thing is refused that NumPy allows: operands of different rank that both stretch, for
(n,) against (n, 1) gives (n, n), which nobody means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, ClassVar

import numpy as np

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor, arithmetic, is_float
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.reduction import reduce_to
from mpiflow.ops.work import clamp


class Elementwise(Op):
    """Base of ops whose output dims are those of their broadcast inputs."""

    precision = "follow"
    calls: ClassVar[str] = ""
    """The array function that is the whole kernel, where there is one."""

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        if not self.calls:
            return super().bind(shard, out, *arrays)
        return partial(getattr(shard.xp, self.calls), *arrays, *self.numbers(), out=out)

    def numbers(self) -> tuple[Any, ...]:
        """What `calls` takes after the arrays."""
        return ()

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        self.bind(shard, out, *arrays)()

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        rank = max(len(shape) for shape in shapes)
        padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
        out = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
        self._refuse_mutual_stretch(shapes, padded, out)
        inputs = tuple(
            tuple(
                (f"d{i}",) if n == out[i] or n != 1 else (f"one{operand}_{i}",)
                for i, n in enumerate(shape, rank - len(shape))
            )
            for operand, shape in enumerate(shapes)
        )
        return Rule(inputs, (tuple((f"d{i}",) for i in range(rank)),))

    def _refuse_mutual_stretch(
        self, shapes: tuple[Shape, ...], padded: list[Shape], out: Shape
    ) -> None:
        # A scalar has no dims that could line up with the wrong ones.
        ranks = {len(shape) for shape in shapes if shape}
        stretched = sum(full != out for full, shape in zip(padded, shapes, strict=True) if shape)
        if len(ranks) > 1 and stretched > 1:
            raise GraphError(
                f"{self.name}: shapes {' and '.join(map(str, shapes))} would both be stretched;"
                " reshape one so that their dims line up"
            )

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x.startswith("one"))


class FloatElementwise(Elementwise):
    """An elementwise op on floating-point inputs only."""

    precision = "high"

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes)


class Arithmetic(Elementwise):
    """An elementwise op on numbers of any dtype."""

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        if "bool" in dtypes:
            raise GraphError(f"{self.name} takes numbers, not bool; cast it")
        return super().dtypes(dtypes)


@op
class Add(Arithmetic):
    """x + y."""

    calls = "add"
    linear = ((0, 1),)
    inplace = ((0, 0), (1, 0))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return tuple(reduce_to(dys[0], x.shape) for x in inputs)


@op
class Subtract(Arithmetic):
    """x - y."""

    calls = "subtract"
    linear = ((0, 1),)
    inplace = ((0, 0), (1, 0))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, y = inputs
        return reduce_to(dys[0], x.shape), scale(reduce_to(dys[0], y.shape), -1.0)


@op
class Multiply(Arithmetic):
    """x * y."""

    calls = "multiply"
    linear = ((0,), (1,))
    inplace = ((0, 0), (1, 0))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, y = inputs
        return reduce_to(dys[0] * y, x.shape), reduce_to(dys[0] * x, y.shape)


@op
class Divide(FloatElementwise):
    """x / y."""

    calls = "divide"
    linear = ((0,),)
    inplace = ((0, 0), (1, 0))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        x, y = inputs
        dx = dys[0] / y
        return reduce_to(dx, x.shape), scale(reduce_to(dx * outputs[0], y.shape), -1.0)


@op
class Scale(Elementwise):
    """x times a number."""

    by: float
    calls = "multiply"
    linear = ((0,),)
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (scale(dys[0], self.by),)

    def numbers(self) -> tuple[Any, ...]:
        return (self.by,)


@op
class Shift(Elementwise):
    """x plus a number."""

    by: float
    calls = "add"
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (dys[0],)

    def numbers(self) -> tuple[Any, ...]:
        return (self.by,)


@op
class Reciprocal(FloatElementwise):
    """1 / x."""

    calls = "reciprocal"
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (scale(dys[0] * outputs[0] * outputs[0], -1.0),)


@op
class Relu(FloatElementwise):
    """max(x, 0)."""

    precision = "follow"
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(ReluGrad(), dys[0], outputs[0]),)

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        (x,) = arrays
        return partial(clamp, shard.xp, x, 0, inf, out)


@op
class ReluGrad(FloatElementwise):
    """dy where y > 0, else 0."""

    precision = "follow"
    linear = ((0,),)
    inplace = ((0, 0),)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        size = 1
        for n in outputs[0]:
            size *= n
        return size

    def kernel(self, shard: ShardView, out: Any, dy: Any, y: Any) -> None:
        mask = shard.work[: y.size].view(bool).reshape(y.shape)
        shard.xp.greater(y, 0, out=mask)
        shard.xp.multiply(dy, mask, out=out)


@op
class Exp(FloatElementwise):
    """e to the x."""

    calls = "exp"
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (dys[0] * outputs[0],)


@op
class Log(FloatElementwise):
    """The natural logarithm."""

    calls = "log"
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (dys[0] / inputs[0],)


@op
class Sqrt(FloatElementwise):
    """The square root."""

    calls = "sqrt"
    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (scale(dys[0] / outputs[0], 0.5),)


@op
class Square(FloatElementwise):
    """x times x."""

    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (scale(dys[0] * inputs[0], 2.0),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        shard.xp.multiply(x, x, out=out)


def scale(x: Tensor, by: float) -> Tensor:
    """x times a number."""
    return apply(Scale(as_number(x, by)), x)


def as_number(x: Tensor, by: Any) -> float:
    """The number `by` if it can stand beside the elements of `x`."""
    whole = isinstance(by, int) and not isinstance(by, bool)
    if not whole and not isinstance(by, float):
        raise refusal(f"{x.name}: {by!r} ({type(by).__name__}) is neither a tensor nor a number")
    if is_float(x.dtype):
        return float(by)
    if not whole or x.dtype == "bool":
        raise refusal(f"{x.name} is {x.dtype}; cast it before arithmetic with {by!r}")
    if not np.iinfo(x.dtype).min <= by <= np.iinfo(x.dtype).max:
        raise refusal(f"{x.name} is {x.dtype}, which cannot hold {by}; cast it")
    return by


def add(x: Tensor, y: Tensor | float) -> Tensor:
    """x + y; either may be stretched, y may be a number."""
    return apply(Add(), x, y) if isinstance(y, Tensor) else apply(Shift(as_number(x, y)), x)


def subtract(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x - y; either may be stretched, one may be a number."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return apply(Subtract(), x, y)
    if isinstance(x, Tensor):
        return add(x, -as_number(x, y))
    assert isinstance(y, Tensor)
    return add(scale(y, -1), x)


def multiply(x: Tensor, y: Tensor | float) -> Tensor:
    """x * y; either may be stretched, y may be a number."""
    return apply(Multiply(), x, y) if isinstance(y, Tensor) else scale(x, y)


def divide(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x / y; either may be stretched, one may be a number."""
    if not isinstance(y, Tensor):
        if y == 0:
            raise refusal(f"{x}: division by zero")
        assert isinstance(x, Tensor)
        return scale(x, 1.0 / y)
    return apply(Divide(), x, y) if isinstance(x, Tensor) else scale(apply(Reciprocal(), y), x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return apply(Relu(), x)


def exp(x: Tensor) -> Tensor:
    """e to the x."""
    return apply(Exp(), x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm."""
    return apply(Log(), x)


def sqrt(x: Tensor) -> Tensor:
    """The square root."""
    return apply(Sqrt(), x)


def square(x: Tensor) -> Tensor:
    """x times x."""
    return apply(Square(), x)


arithmetic.update(add=add, subtract=subtract, multiply=multiply, divide=divide)
