"""What attention adds to matrix products: heads, rotary positions, and the product of all three.

Heads that share their keys and values (grouped-query attention) stand one after the other along
the dim of queries, so that one batched product serves them and nothing is repeated:

    q (n, k, g t, d)   keys (n, k, t, d)   values (n, k, t, d)      k groups of g heads
"""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal
from mpiflow.ops.blocks import BLOCK
from mpiflow.ops.dropout import dropout
from mpiflow.ops.elementwise import scale
from mpiflow.ops.matmul import MatMul, matmul
from mpiflow.ops.softmax import masked_softmax

_FLAT = (("n",), ("t",), ("k", "r", "d"))


class Heads(Op):
    """Base of the ops between (n, t, k r d) and heads (n, k, p t, d) for each p of `parts`.

    Only n and whole groups k may be split, and t where all parts are 1.
    """

    groups_of_heads: int
    parts: tuple[int, ...]

    def sizes(self) -> dict[str, int]:
        sizes = {"k": self.groups_of_heads, "r": sum(self.parts)}
        return sizes | {f"p{i}": part for i, part in enumerate(self.parts) if part > 1}

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x not in ("n", "t", "k"))

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return sum(map(prod, outputs))

    def _heads(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        rows = (("t",) if part == 1 else (f"p{i}", "t") for i, part in enumerate(self.parts))
        return tuple((("n",), ("k",), row, ("d",)) for row in rows)

    def _views(self, flat: Any, heads: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """Pairs of views (n, k, part, t, d) of the same elements on both sides."""
        width = heads[0].shape[-1]
        n, t, _ = flat.shape
        apart = flat.reshape(n, t, -1, sum(self.parts), width).transpose(0, 2, 3, 1, 4)
        pairs, first = [], 0
        for part, head in zip(self.parts, heads, strict=True):
            view = head.reshape(*head.shape[:2], part, t, width)
            pairs.append((apart[:, :, first : first + part], view))
            first += part
        return pairs


@op
class SplitHeads(Heads):
    """x (n, t, k r d) -> (n, k, p t, d) for each p of `parts`, whose sum is r."""

    precision = "follow"
    groups_of_heads: int
    parts: tuple[int, ...] = (1,)
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return Rule((_FLAT,), self._heads())

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return dtypes * len(self.parts)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(MergeHeads(self.groups_of_heads, self.parts), *dys),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        heads = (out,) if len(self.parts) == 1 else out
        for source, target in self._views(x, heads) if x.size else ():
            shard.xp.copyto(target, source)


@op
class MergeHeads(Heads):
    """Heads (n, k, p t, d) for each p of `parts` -> (n, t, k r d): what `SplitHeads` parted."""

    precision = "follow"
    groups_of_heads: int
    parts: tuple[int, ...] = (1,)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return Rule(self._heads(), (_FLAT,))

    def groups(self, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(len(self.parts))),)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return dys[0].graph.add(SplitHeads(self.groups_of_heads, self.parts), dys[0])

    def kernel(self, shard: ShardView, out: Any, *heads: Any) -> None:
        for target, source in self._views(out, heads) if out.size else ():
            shard.xp.copyto(target, source)


@op
class Rotary(Op):
    """Rotary positions (Su et al. 2021): x (..., t, d), each position turned by its angle.

    Elements i and i + d/2 are a plane; position p turns it by p base^(-2i/d), with `inverse` the
    other way. That is the pairing of Hugging Face's Llama. Where `positions` is given, x is
    (..., g t, d) with t = positions: several heads one after the other.
    """

    positions: int = 0
    base: float = 10000.0
    inverse: bool = False
    linear = ((0,),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        (shape,) = shapes
        if len(shape) < 2 or shape[-1] % 2 or (self.positions and shape[-2] % self.positions):
            raise GraphError(
                f"Rotary takes (..., {self.positions or 'positions'}, an even width), not {shape}"
            )
        names = tuple((f"d{i}",) for i in range(len(shape) - 2))
        full = (*names, ("group", "t") if self.positions else ("t",), ("whole",))
        return Rule((full,), (full,))

    def sizes(self) -> dict[str, int]:
        return {"t": self.positions} if self.positions else {}

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset({"whole"})

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return 3 * prod(outputs[0])

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        # Cosines and sines in float64, then in the dtype of x; scratch for some matrices.
        rows, width = outputs[0][-2:]
        size = (self.positions or rows) * (width // 2)
        return 32 * size + 8 * min(max(size, BLOCK), prod(outputs[0]) // 2)

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        return (apply(Rotary(self.positions, self.base, not self.inverse), dys[0]),)

    def kernel(self, shard: ShardView, out: Any, x: Any) -> None:
        if not out.size:
            return
        xp, half = shard.xp, x.shape[-1] // 2
        # Shards of several heads begin with a head, so at position 0.
        rows, start = self.positions, 0
        if not rows:
            rows, start = x.shape[-2], shard.start(0, x.ndim - 2)
        size = rows * half
        wide = shard.work[: 16 * size].view(xp.float64).reshape(2, rows, half)
        count = min(_together(size), x.size // (2 * size))
        narrow = shard.work[16 * size :][: (2 + count) * size * x.itemsize].view(x.dtype)
        narrow = narrow.reshape(2 + count, rows, half)
        cosine, sine, scratch = narrow[0], narrow[1], narrow[2:]
        self._tables(xp, wide[0], wide[1], start)
        xp.copyto(cosine, wide[0], casting="same_kind")
        xp.copyto(sine, wide[1], casting="same_kind")
        ins, outs = (a.reshape(-1, rows, 2, half) for a in (x, out))
        for first in range(0, len(ins), count):
            a, b = ins[first : first + count], outs[first : first + count]
            self._turn(xp, a, b, cosine, sine, scratch[: len(a)])

    @staticmethod
    def _turn(xp: Any, x: Any, y: Any, cosine: Any, sine: Any, scratch: Any) -> None:
        (x0, x1), (y0, y1) = ((a[:, :, 0], a[:, :, 1]) for a in (x, y))
        xp.multiply(x1, sine, out=scratch)
        xp.multiply(x0, cosine, out=y0)
        xp.subtract(y0, scratch, out=y0)
        xp.multiply(x0, sine, out=scratch)
        xp.multiply(x1, cosine, out=y1)
        xp.add(y1, scratch, out=y1)

    def _tables(self, xp: Any, cosine: Any, sine: Any, start: int) -> None:
        """Cosine and sine of every angle, in float64, so that far positions stay exact."""
        half = sine.shape[1]
        sine.fill(1)
        sine[:1] = start
        xp.add.accumulate(sine, axis=0, out=sine)  # the position of each row
        xp.multiply(sine, self.base ** (xp.arange(half) * (-1.0 / half)), out=sine)
        xp.cos(sine, out=cosine)
        xp.sin(sine, out=sine)
        if self.inverse:
            xp.negative(sine, out=sine)


def _together(size: int) -> int:
    """How many matrices of this many elements are turned together."""
    return max(1, BLOCK // max(size, 1))


def split_heads(x: Tensor, groups: int, parts: tuple[int, ...] = (1,)) -> tuple[Tensor, ...]:
    """x (n, t, k r d) -> heads (n, k, p t, d) for each p of `parts`; k = groups, r = sum(parts)."""
    if x.ndim != 3 or x.shape[-1] % (groups * sum(parts)):
        raise refusal(f"split_heads: {x} is not (n, t, {groups} groups of {sum(parts)} heads)")
    return x.graph.add(SplitHeads(groups, tuple(parts)), x)


def merge_heads(heads: Tensor, groups: int, part: int = 1) -> Tensor:
    """Heads (n, k, p t, d) -> (n, t, k p d), which `split_heads` parts again."""
    return apply(MergeHeads(groups, (part,)), heads)


def rotary(x: Tensor, *, positions: int | None = None, base: float = 10000.0) -> Tensor:
    """Rotary positions on heads (..., t, d); give `positions` = t where heads stand in a row."""
    grouped = positions is not None and x.ndim > 1 and positions != x.shape[-2]
    return apply(Rotary(positions or 0 if grouped else 0, float(base)), x)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    group: int = 1,
    rate: float = 0.0,
) -> Tensor:
    """softmax(q keys^T / sqrt(d)) values, for heads (..., t, d); see `masked_softmax`.

    A share `rate` of the attention weights is dropped in training. With `group` heads that share
    their keys, q and the result are (..., group x t, d).
    """
    scores = apply(MatMul(transpose_b=True), scale(q, 1 / sqrt(q.shape[-1])), keys)
    weights = masked_softmax(scores, mask, causal=causal, group=group)
    return matmul(dropout(weights, rate), values)
