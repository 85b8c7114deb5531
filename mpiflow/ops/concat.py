"""Ops that join and part tensors along a dim, which no rank may split."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, dim_index, refusal


class AlongDim(Op):
    """Base of ops on whole dims: pieces of a dim have letters of their own."""

    dim: int

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        raise NotImplementedError(self.name)

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x.startswith("whole"))

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return sum(map(prod, outputs))

    def _letters(self, rank: int, piece: str) -> tuple[tuple[str, ...], ...]:
        return tuple((piece if i == self.dim else f"d{i}",) for i in range(rank))

    def _at(self, part: slice | int) -> tuple[slice | int, ...]:
        return (*(slice(None),) * self.dim, part)

    def _check(self, shapes: tuple[Shape, ...]) -> None:
        if not shapes or not all(self.dim < len(shape) for shape in shapes):
            raise GraphError(f"{self.name}: there is no dim {self.dim} in {shapes}")
        self.pattern(shapes).sizes(self.name, shapes, self.sizes())


@op
class Concat(AlongDim):
    """Tensors one after the other along `dim`."""

    precision = "follow"
    dim: int

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        inputs = (self._letters(len(s), f"whole{i}") for i, s in enumerate(shapes))
        return Rule(tuple(inputs), (self._letters(len(shapes[0]), "whole"),))

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        self._check(shapes)
        first = shapes[0]
        total = sum(shape[self.dim] for shape in shapes)
        return ((*first[: self.dim], total, *first[self.dim + 1 :]),)

    def groups(self, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(len(dtypes))),) if dtypes[0] != "bool" else ()

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        sizes = tuple(x.shape[self.dim] for x in inputs)
        return dys[0].graph.add(Split(self.dim, sizes), dys[0])

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        first = 0
        for x in arrays:
            part = slice(first, first + x.shape[self.dim])
            shard.xp.copyto(out[self._at(part)], x)
            first = part.stop


@op
class Split(AlongDim):
    """The pieces of `sizes` along `dim`."""

    precision = "follow"
    dim: int
    parts: tuple[int, ...]
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        rank = len(shapes[0])
        outputs = (self._letters(rank, f"whole{i}") for i in range(len(self.parts)))
        return Rule((self._letters(rank, "whole"),), tuple(outputs))

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        self._check(shapes)
        (shape,) = shapes
        if sum(self.parts) != shape[self.dim] or min(self.parts) < 0:
            raise GraphError(
                f"split: pieces of {self.parts} do not make up dim {self.dim} of {shape}"
            )
        return tuple((*shape[: self.dim], n, *shape[self.dim + 1 :]) for n in self.parts)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return dtypes * len(self.parts)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(Concat(self.dim), *dys),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        first = 0
        for y in (out,) if len(self.parts) == 1 else out:
            part = slice(first, first + y.shape[self.dim])
            shard.xp.copyto(y, x[self._at(part)])
            first = part.stop


@op
class Cut(AlongDim):
    """The entries `start` to `stop` of `dim`."""

    precision = "follow"
    dim: int
    start: int
    stop: int
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        rank = len(shapes[0])
        return Rule((self._letters(rank, "whole"),), (self._letters(rank, "whole0"),))

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        self._check(shapes)
        (shape,) = shapes
        if not 0 <= self.start <= self.stop <= shape[self.dim]:
            raise GraphError(
                f"cut: {self.start} to {self.stop} is no range of dim {self.dim} of {shape}"
            )
        return ((*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :]),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(Pad(self.dim, self.start, inputs[0].shape[self.dim]), dys[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        shard.xp.copyto(out, x[self._at(slice(self.start, self.stop))])


@op
class Pad(AlongDim):
    """Zeros with x in them, from entry `start` of `dim`, which gets `size` entries."""

    precision = "follow"
    dim: int
    start: int
    size: int
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        rank = len(shapes[0])
        return Rule((self._letters(rank, "whole0"),), (self._letters(rank, "whole"),))

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        self._check(shapes)
        (shape,) = shapes
        if self.start < 0 or self.start + shape[self.dim] > self.size:
            raise GraphError(f"{self.name}: {shape} does not fit into {self.size} of {self.dim}")
        return ((*shape[: self.dim], self.size, *shape[self.dim + 1 :]),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        stop = self.start + inputs[0].shape[self.dim]
        return (apply(Cut(self.dim, self.start, stop), dys[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        out.fill(0)
        part = slice(self.start, self.start + x.shape[self.dim])
        shard.xp.copyto(out[self._at(part)], x)


@op
class Stack(AlongDim):
    """Tensors of one shape side by side along a new `dim`."""

    precision = "follow"
    dim: int

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        plain = tuple((f"d{i}",) for i in range(len(shapes[0])))
        out = (*plain[: self.dim], ("whole",), *plain[self.dim :])
        return Rule((plain,) * len(shapes), (out,))

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        if not shapes or self.dim > len(shapes[0]):
            raise GraphError(f"stack: there is no place for dim {self.dim} in {shapes}")
        self.pattern(shapes).sizes(self.name, shapes, {})
        return ((*shapes[0][: self.dim], len(shapes), *shapes[0][self.dim :]),)

    def groups(self, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(len(dtypes))),) if dtypes[0] != "bool" else ()

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return dys[0].graph.add(Unstack(self.dim, len(inputs)), dys[0])

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        for i, x in enumerate(arrays):
            shard.xp.copyto(out[self._at(slice(i, i + 1))], shard.xp.expand_dims(x, self.dim))


@op
class Unstack(AlongDim):
    """The `count` entries of `dim`, each without it."""

    precision = "follow"
    dim: int
    count: int
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = self._letters(len(shapes[0]), "whole")
        return Rule((full,), (full[: self.dim] + full[self.dim + 1 :],) * self.count)

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        self._check(shapes)
        (shape,) = shapes
        if shape[self.dim] != self.count:
            raise GraphError(f"unstack: dim {self.dim} of {shape} is not {self.count}")
        return (shape[: self.dim] + shape[self.dim + 1 :],) * self.count

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return dtypes * self.count

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(Stack(self.dim), *dys),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        for i, y in enumerate((out,) if self.count == 1 else out):
            shard.xp.copyto(y, x[self._at(i)])


def concat(tensors: Sequence[Tensor], dim: int = -1) -> Tensor:
    """Tensors one after the other along `dim`."""
    if not tensors:
        raise refusal("concat: there is nothing to join")
    return apply(Concat(dim_index(tensors[0].ndim, dim, "concat")), *tensors)


def split(x: Tensor, parts: int | Sequence[int], dim: int = -1) -> tuple[Tensor, ...]:
    """The pieces of `dim`: a number of equal ones, or pieces of the given sizes."""
    dim = dim_index(x.ndim, dim, "split")
    if isinstance(parts, int):
        if parts < 1 or x.shape[dim] % parts:
            raise refusal(f"split: dim {dim} of {x} has no {parts} equal parts")
        parts = (x.shape[dim] // parts,) * parts
    if not parts:
        raise refusal(f"split: {x} into no parts")
    return x.graph.add(Split(dim, tuple(parts)), x)


def cut(x: Tensor, start: int, stop: int, dim: int = -1) -> Tensor:
    """The entries `start` to `stop` of `dim`."""
    return apply(Cut(dim_index(x.ndim, dim, "cut"), start, stop), x)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape side by side along a new `dim`."""
    if not tensors:
        raise refusal("stack: there is nothing to stack")
    return apply(Stack(dim_index(tensors[0].ndim + 1, dim, "stack")), *tensors)


def unstack(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """The entries of `dim`, each without it."""
    dim = dim_index(x.ndim, dim, "unstack")
    if not x.shape[dim]:
        raise refusal(f"unstack: dim {dim} of {x} is empty")
    return x.graph.add(Unstack(dim, x.shape[dim]), x)
