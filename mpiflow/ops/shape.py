"""Ops that change form but not value: casts, transposes, reshapes, and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import DTYPES, Tensor, is_float
from mpiflow.ops.base import Gradients, Tensors, apply, dim_index, refusal


class View(Op):
    """Base of ops whose output is their input byte for byte."""

    precision = "follow"
    linear = ((0,),)
    inplace = ((0, 0),)
    view = True

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        self.bind(shard, out, x)()

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        x = arrays[0].reshape(out.shape)
        shared = shard.xp.may_share_memory(out, x)
        return _nothing if shared else partial(shard.xp.copyto, out, x)


def _nothing() -> None:
    """What there is to do where the output lies where the input does."""


@op
class Cast(Op):
    """The same values in another dtype."""

    precision = "any"
    dtype: str
    rule = "... -> ..."

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return (self.dtype,)

    def groups(self, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        # The parts of a sum may be cast one by one only where that rounds nothing away.
        exact = is_float(dtypes[0]) and self.dtype in ("float32", "float64")
        return ((0,),) if exact and dtypes[0] != "float64" else ()

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (cast(dys[0], inputs[0].dtype) if is_float(inputs[0].dtype) else None,)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        shard.xp.copyto(out, x, casting="unsafe")


@op
class Identity(View):
    """A copy."""

    rule = "... -> ..."

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return dys


@op
class StopGradient(View):
    """The same value, through which no gradient flows."""

    rule = "... -> ..."

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (None,)


@op
class Permute(Op):
    """The dims in another order: output dim i is input dim `order[i]`."""

    precision = "follow"
    order: tuple[int, ...]
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        if sorted(self.order) != list(range(len(shapes[0]))):
            raise GraphError(f"permute: {self.order} does not order the dims of {shapes[0]}")
        full = tuple((f"d{i}",) for i in range(len(self.order)))
        return Rule((full,), (tuple(full[i] for i in self.order),))

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        inverse = tuple(self.order.index(i) for i in range(len(self.order)))
        return (apply(Permute(inverse), dys[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        shard.xp.copyto(out, x.transpose(self.order))


@op
class Reshape(View):
    """The same elements in another shape.

    Dims that one side has joined and the other apart are compound dims, whose leading part may
    be split: (n, c, h) -> (n, c*h) keeps a batch split and allows one of c.
    """

    shape: tuple[int, ...]

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        if prod(shapes[0]) != prod(self.shape):
            raise GraphError(
                f"reshape: {shapes[0]} has {prod(shapes[0])} elements,"
                f" {self.shape} has {prod(self.shape)}"
            )
        left: list[tuple[str, ...]] = []
        right: list[tuple[str, ...]] = []
        for number, (a, b) in enumerate(_groups(shapes[0], self.shape)):
            names = tuple(f"g{number}_{i}" for i in range(max(len(a), len(b))))
            apart: list[tuple[str, ...]] = [(name,) for name in names]
            joined: list[tuple[str, ...]] = [names]
            if len(a) == 1 and b:
                left, right = left + joined, right + apart
            elif len(b) == 1 and a:
                left, right = left + apart, right + joined
            else:
                left += [(f"whole{name}",) for name in names[: len(a)]]
                right += [(f"whole{name}'",) for name in names[: len(b)]]
        return Rule((tuple(left),), (tuple(right),))

    def sizes(self) -> dict[str, int]:
        return {}

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        self.pattern(shapes)
        return (self.shape,)

    def signatures(self, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> Any:
        rule = self.pattern(shapes)
        sizes: dict[str, int] = {}
        for dims, shape in ((rule.inputs[0], shapes[0]), (rule.outputs[0], self.shape)):
            for letters, size in zip(dims, shape, strict=True):
                if len(letters) == 1:
                    sizes[letters[0]] = size
        return rule.signatures(sizes, self.unsplittable(rule), self.groups(dtypes), self.reduce)

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x.startswith("whole"))

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return prod(outputs[0])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(Reshape(inputs[0].shape), dys[0]),)


def _groups(a: Shape, b: Shape) -> list[tuple[Shape, Shape]]:
    """The shortest runs of dims on both sides with equal numbers of elements."""
    groups, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        first_i, first_j = i, j
        left = a[i] if i < len(a) else 1
        right = b[j] if j < len(b) else 1
        i, j = min(i + 1, len(a)), min(j + 1, len(b))
        while left != right:
            if left < right and i < len(a):
                left, i = left * a[i], i + 1
            else:
                right, j = right * b[j], j + 1
        groups.append((a[first_i:i], b[first_j:j]))
    return groups


def cast(x: Tensor, dtype: str) -> Tensor:
    """The same values in another dtype."""
    if dtype not in DTYPES:
        raise refusal(f"cast: dtype {dtype!r} is none of {', '.join(DTYPES)}")
    return x if x.dtype == dtype else apply(Cast(dtype), x)


def identity(x: Tensor) -> Tensor:
    """A copy."""
    return apply(Identity(), x)


def stop_gradient(x: Tensor) -> Tensor:
    """The same value, through which no gradient flows."""
    return apply(StopGradient(), x)


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """The dims in another order: output dim i is input dim `order[i]`."""
    return apply(Permute(tuple(dim_index(x.ndim, i, "permute") for i in order)), x)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in another shape; one size may be -1."""
    sizes = tuple(shape)
    if sizes.count(-1) == 1:
        known = prod(n for n in sizes if n != -1)
        sizes = tuple(prod(x.shape) // max(known, 1) if n == -1 else n for n in sizes)
    if any(n < 0 for n in sizes):
        raise refusal(f"reshape: {tuple(shape)} is no shape for {x}")
    return apply(Reshape(sizes), x)
