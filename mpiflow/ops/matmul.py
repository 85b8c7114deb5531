"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpiflow.graph.op import ShardView, op
from mpiflow.graph.rule import Rule, Shape, parse_rule
from mpiflow.graph.tensor import Tensor, arithmetic
from mpiflow.ops.base import Gradients, Tensors, apply, require_float
from mpiflow.ops.wide import Wide


class Product(Wide):
    """Base of products: floating-point, linear in each operand."""

    linear = ((0,), (1,))
    one_product = True

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes)


@op
class MatMul(Product):
    """Matrix product over the last two dims; the dims before them are a batch."""

    transpose_a: bool = False
    transpose_b: bool = False

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        a = "... k m" if self.transpose_a else "... m k"
        b = "... n k" if self.transpose_b else "... k n"
        return parse_rule(f"{a}, {b} -> ... m n", tuple(map(len, shapes)))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (a, b), (dy,) = inputs, dys
        if self.transpose_a:
            da = apply(MatMul(self.transpose_b, True), b, dy)
        else:
            da = apply(MatMul(False, not self.transpose_b), dy, b)
        if self.transpose_b:
            db = apply(MatMul(True, self.transpose_a), dy, a)
        else:
            db = apply(MatMul(not self.transpose_a, False), a, dy)
        return da, db

    def compute(self, shard: ShardView, out: Any, a: Any, b: Any) -> Callable[[], Any]:
        a = a.swapaxes(-1, -2) if self.transpose_a else a
        b = b.swapaxes(-1, -2) if self.transpose_b else b
        return partial(shard.xp.matmul, a, b, out=out)


@op
class Linear(Product):
    """Rows times a weight matrix: x (..., k), w (k, n) -> (..., n); transposed, w is (n, k)."""

    transpose: bool = False

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        w = "n k" if self.transpose else "k n"
        return parse_rule(f"... k, {w} -> ... n", tuple(map(len, shapes)))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (x, w), (dy,) = inputs, dys
        dx = apply(Linear(not self.transpose), dy, w)
        dw = apply(RowProduct(), dy, x) if self.transpose else apply(RowProduct(), x, dy)
        return dx, dw

    def compute(self, shard: ShardView, out: Any, x: Any, w: Any) -> Callable[[], Any]:
        w = w.T if self.transpose else w
        if x.ndim != 2 and x.size and out.size:  # rows as one matrix: one product, not many
            x, out = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        return partial(shard.xp.matmul, x, w, out=out)


@op
class RowProduct(Product):
    """The sum over rows of outer products: x (..., k), y (..., n) -> (k, n)."""

    rule = "... k, ... n -> k n"

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (x, y), (dz,) = inputs, dys
        return apply(Linear(True), y, dz), apply(Linear(), x, dz)

    def compute(self, shard: ShardView, out: Any, x: Any, y: Any) -> Callable[[], Any]:
        if not x.size or not y.size:
            return partial(out.fill, 0)
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        return partial(shard.xp.matmul, x.T, y, out=out)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product over the last two dims; leading dims must be equal."""
    return apply(MatMul(), a, b)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Rows x (..., k) times w (k, n)."""
    return apply(Linear(), x, w)


def linear_transposed(x: Tensor, w: Tensor) -> Tensor:
    """Rows x (..., k) times w (n, k) transposed: (..., n)."""
    return apply(Linear(transpose=True), x, w)


arithmetic.update(matmul=matmul)
