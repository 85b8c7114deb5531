"""Softmax along the last dim, which no rank may split; its gradient is one kernel.

For classes split over ranks see `cross_entropy`, which needs no whole row anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, ClassVar

from mpiflow.errors import GraphError
from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.blocks import is_widened, row_blocks, row_bytes
from mpiflow.ops.work import dot_rows, in_turn


class Rowwise(Op):
    """Base of ops on rows of the last dim: subclasses compute a block of rows at a time.

    `scratch` counts blocks of scratch, `columns` those of one number a row, `passes` the
    operations on an element.
    """

    rule = "... c -> ... c"
    whole = "c"
    scratch: ClassVar[int] = 0
    columns: ClassVar[int] = 1
    passes: ClassVar[int] = 5

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return row_bytes(
            outputs[0],
            dtype,
            scratch=self.scratch,
            columns=self.columns,
            operands=1 + len(inputs),
        )

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return self.passes * prod(outputs[0])

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        self.bind(shard, out, *arrays)()

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        if is_widened(out):
            return partial(self._walk, shard, out, *arrays)
        blocks = row_blocks(shard, out, arrays, scratch=self.scratch, columns=self.columns)
        return in_turn([partial(self.block, shard.xp, y, *xs, *a, *c) for y, xs, a, c in blocks])

    def _walk(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        blocks = row_blocks(shard, out, arrays, scratch=self.scratch, columns=self.columns)
        for y, xs, scratch, columns in blocks:
            self.block(shard.xp, y, *xs, *scratch, *columns)

    def block(self, xp: Any, y: Any, /, *arrays: Any) -> None:
        """Write `y` from the inputs; then come scratch blocks and columns."""
        raise NotImplementedError(self.name)


@op
class Softmax(Rowwise):
    """e^x over the sum of it along the last dim."""

    inplace = ((0, 0),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(SoftmaxGrad(), dys[0], outputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, t: Any) -> None:
        xp.maximum.reduce(x, axis=1, keepdims=True, out=t)
        xp.subtract(x, t, out=y)
        xp.exp(y, out=y)
        xp.add.reduce(y, axis=1, keepdims=True, out=t)
        xp.reciprocal(t, out=t)
        xp.multiply(y, t, out=y)


class RowwiseGrad(Rowwise):
    """Base of gradients, linear in dy, whose other input is y."""

    rule = "... c, ... c -> ... c"
    linear = ((0,),)
    inplace = ((0, 0),)


@op
class SoftmaxGrad(RowwiseGrad):
    """y (dy - sum(dy y)). Where y is zero, as where it was masked, it is zero."""

    def block(self, xp: Any, out: Any, dy: Any, y: Any, t: Any) -> None:
        dot_rows(xp, dy, y, t[:, 0])
        xp.subtract(dy, t, out=out)
        xp.multiply(out, y, out=out)


@op
class LogSoftmax(Rowwise):
    """The logarithm of the softmax along the last dim."""

    inplace = ((0, 0),)
    scratch = 1

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(LogSoftmaxGrad(), dys[0], outputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, a: Any, t: Any) -> None:
        xp.maximum.reduce(x, axis=1, keepdims=True, out=t)
        xp.subtract(x, t, out=y)
        xp.exp(y, out=a)
        xp.add.reduce(a, axis=1, keepdims=True, out=t)
        xp.log(t, out=t)
        xp.subtract(y, t, out=y)


@op
class LogSoftmaxGrad(RowwiseGrad):
    """dy - e^y sum(dy)."""

    scratch = 1

    def block(self, xp: Any, out: Any, dy: Any, y: Any, a: Any, t: Any) -> None:
        xp.add.reduce(dy, axis=1, keepdims=True, out=t)
        xp.exp(y, out=a)
        xp.multiply(a, t, out=a)
        xp.subtract(dy, a, out=out)


@op
class MaskedSoftmax(Rowwise):
    """Softmax of scores (..., queries, keys) over the keys that a query may look at.

    The mask, if there is one, is true at those keys, and stretches to the scores as in
    arithmetic; `causal` hides the keys after the query. A query without any key gets zeros. With
    `group` > 1 the rows are group x queries: several heads that share their keys.
    """

    causal: bool = False
    group: int = 1

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        if len(shapes[0]) < 2:
            raise GraphError(f"{self.name}: scores {shapes[0]} need a dim of queries and of keys")
        if len(shapes) > 1 and len(shapes[1]) != len(shapes[0]):
            raise GraphError(
                f"{self.name}: a mask of shape {shapes[1]} does not stretch to scores {shapes[0]}"
            )
        rows, keys = shapes[0][-2:]
        if rows % self.group or (self.causal and rows != self.group * keys):
            raise GraphError(
                f"{self.name}: {rows} rows of {keys} keys do not fit {self.group} heads a group"
                + (" where each key is a query" if self.causal else "")
            )
        names = [f"d{i}" for i in range(len(shapes[0]) - 2)]
        row = ("t",) if self.group == 1 else ("group", "t")
        full = (*((name,) for name in names), row, ("whole",))
        inputs = [full]
        for shape in shapes[1:]:
            inputs.append(
                tuple(
                    letters if n == size else (f"one{i}",)
                    for i, (letters, n, size) in enumerate(zip(full, shape, shapes[0], strict=True))
                )
            )
        return Rule(tuple(inputs), (full,))

    def sizes(self) -> dict[str, int]:
        return {"group": self.group} if self.group > 1 else {}

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        rule = self.pattern(shapes)
        sizes = rule.sizes(self.name, shapes, self.sizes())
        stretched = {x: n for x, n in sizes.items() if x.startswith("one") and n != 1}
        if stretched:
            raise GraphError(f"{self.name}: mask {shapes[1]} does not stretch to {shapes[0]}")
        return rule.output_shapes(sizes)

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x == "whole" or x.startswith("one"))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes[:1])
        if dtypes[1:] not in ((), ("bool",)):
            raise GraphError(f"{self.name}: the mask is {dtypes[1]}, not bool; compare it")
        return dtypes[:1]

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return row_bytes(outputs[0], dtype, scratch=0, columns=1, operands=2)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        dx = apply(SoftmaxGrad(), dys[0], outputs[0])
        return (dx,) if len(inputs) == 1 else (dx, None)

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        rows = super().bind(shard, out, out)
        return in_turn([partial(self._hide, shard, out, *arrays), rows])

    def _hide(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        xp = shard.xp
        if len(arrays) == 1:
            xp.copyto(out, arrays[0])
        else:
            out.fill(-xp.inf)
            xp.copyto(out, arrays[0], where=arrays[1])
        if self.causal and out.size:
            self._hide_later_keys(xp, out, shard.start(OUT, out.ndim - 2))

    def _hide_later_keys(self, xp: Any, out: Any, start: int) -> None:
        # Shards of grouped rows begin with a head, so that only t-split shards have a start here.
        keys = out.shape[-1]
        rows = out.shape[-2] if self.group == 1 else keys
        first = start if self.group == 1 else 0
        apart = out.reshape(*out.shape[:-2], -1, rows, keys)
        for row in range(rows):
            apart[..., row, first + row + 1 :] = -xp.inf

    def block(self, xp: Any, y: Any, x: Any, t: Any) -> None:
        xp.maximum.reduce(x, axis=1, keepdims=True, out=t)
        # A row without keys has the maximum -inf: e^(-inf - lowest) is 0, and so is 0 / 1. In any
        # other row the largest term is 1, so that the sum is no smaller.
        xp.maximum(t, xp.finfo(t.dtype).min, out=t)
        xp.subtract(x, t, out=y)
        xp.exp(y, out=y)
        xp.add.reduce(y, axis=1, keepdims=True, out=t)
        xp.maximum(t, 1, out=t)
        xp.reciprocal(t, out=t)
        xp.multiply(y, t, out=y)


def softmax(x: Tensor) -> Tensor:
    """e^x over its sum along the last dim."""
    return apply(Softmax(), _with_rows(x, "softmax"))


def log_softmax(x: Tensor) -> Tensor:
    """The logarithm of the softmax along the last dim."""
    return apply(LogSoftmax(), _with_rows(x, "log_softmax"))


def _with_rows(x: Tensor, what: str) -> Tensor:
    if not x.ndim:
        raise refusal(f"{what}: {x} is a scalar; it needs a dim of classes")
    return x


def masked_softmax(
    scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, group: int = 1
) -> Tensor:
    """Softmax of scores (..., queries, keys) over the keys where the bool mask is true.

    `causal` hides the keys after each query; a query that may look at no key gets zeros. With
    `group` the rows are those of several heads that share their keys, one head after the other.
    """
    inputs = (scores,) if mask is None else (scores, mask)
    return apply(MaskedSoftmax(causal, group), *inputs)


_SMALLEST = 1e-12
"""A norm below this counts as this."""


@op
class Normalise(Rowwise):
    """x over its Euclidean norm along the last dim."""

    scratch = 0
    passes = 3

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(NormaliseGrad(), dys[0], inputs[0]),)

    def block(self, xp: Any, y: Any, x: Any, t: Any) -> None:
        xp.multiply(x, x, out=y)
        xp.add.reduce(y, axis=1, keepdims=True, out=t)
        xp.sqrt(t, out=t)
        xp.maximum(t, _SMALLEST, out=t)
        xp.divide(x, t, out=y)


@op
class NormaliseGrad(RowwiseGrad):
    """(dy - y sum(dy y)) / |x| with y = x / |x|."""

    scratch = 1
    columns = 2

    def block(self, xp: Any, out: Any, dy: Any, x: Any, a: Any, t: Any, u: Any) -> None:
        xp.multiply(x, x, out=a)
        xp.add.reduce(a, axis=1, keepdims=True, out=t)
        xp.sqrt(t, out=t)
        xp.maximum(t, _SMALLEST, out=t)
        xp.multiply(dy, x, out=a)
        xp.add.reduce(a, axis=1, keepdims=True, out=u)
        xp.divide(u, t, out=u)
        xp.divide(u, t, out=u)
        xp.multiply(x, u, out=a)
        xp.subtract(dy, a, out=out)
        xp.divide(out, t, out=out)


def normalise(x: Tensor) -> Tensor:
    """x over its Euclidean norm along the last dim (or over 1e-12, if that is larger)."""
    return apply(Normalise(), _with_rows(x, "normalise"))
