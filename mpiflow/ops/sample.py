"""A sample of classes for a loss over very many: Partial FC (An et al. 2021, arXiv 2010.05222).

Classes lie in equal blocks. Of each block the classes of the batch's labels are taken, and random
others up to a fixed number, by a counter of (step, block, class): so the sample is the same under
any layout, and a layer that is split by whole blocks reads its own rows only.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.graph import current
from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.philox import philox4x32
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import apply, refusal
from mpiflow.ops.index import require_index
from mpiflow.ops.random import random_key
from mpiflow.ops.rows import TakeRows
from mpiflow.ops.step import graph_step
from mpiflow.ops.work import Piece, carve, carved

_WORDS = 4
"""Random words of a counter, one a class."""
_COUNTERS = 1 << 10
"""Counters of a piece."""
_OTHER = 1 << 63
"""Set in the sort key of a class that is no label."""
MOST_BLOCKS = 64


@op
class SampleClasses(Op):
    """labels (n,), step () -> `count` classes of each block of `size`, (blocks, count).

    Classes ascend; those of the labels are among them, if a block has no more than `count`.
    """

    blocks: int
    size: int
    count: int
    key: tuple[int, int]
    rule = "n,  -> b k"
    whole = "n k"

    def sizes(self) -> dict[str, int]:
        return {"b": self.blocks, "k": self.count}

    def limits(self, shapes: tuple[Shape, ...]) -> tuple[tuple[int, int], ...]:
        return ((0, self.blocks * self.size),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_index(self, dtypes[0])
        if dtypes[1] != "int64":
            raise GraphError(f"{self.name}: the step is int64, not {dtypes[1]}")
        return ("int64",)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return outputs[0][0] * (40 * self.size + prod(inputs[0]))

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved(*self._pieces(prod(inputs[0]))) if outputs[0][0] else 0

    def _pieces(self, labels: int) -> tuple[Piece, ...]:
        return ((self.size + 1,), "uint64"), ((labels,), "int64"), ((labels,), "uint64")

    def kernel(self, shard: ShardView, out: Any, label: Any, step: Any) -> None:
        if not out.size:
            return
        xp, first = shard.xp, shard.start(OUT, 0)
        keys, own, marked = carve(shard.work, *self._pieces(label.size))
        for block, classes in enumerate(out, first):
            self._draw(xp, keys[:-1], block, step)
            # A label of another block marks the entry behind the last.
            xp.copyto(own, label, casting="unsafe")
            xp.subtract(own, block * self.size, out=own)
            xp.minimum(own.view(xp.uint64), self.size, out=own.view(xp.uint64))
            xp.take(keys, own, out=marked, mode="clip")
            xp.bitwise_and(marked, _OTHER - 1, out=marked)
            xp.put(keys, own, marked)
            keys[:-1].sort()
            xp.bitwise_and(keys[: self.count], 0xFFFFFFFF, out=classes.view(xp.uint64))
            classes.sort()
            xp.add(classes, block * self.size, out=classes)

    def _draw(self, xp: Any, keys: Any, block: int, step: Any) -> None:
        """Keys of 31 random bits over the number of a class in its block; the sign bit is set."""
        for first in range(0, self.size, _COUNTERS * _WORDS):
            last = min(first + _COUNTERS * _WORDS, self.size)
            group = xp.arange(first // _WORDS, (last - 1) // _WORDS + 1, dtype=xp.uint32)
            counter = xp.empty((len(group), 4), xp.uint32)
            counter[:, 0], counter[:, 1] = group, block
            counter[:, 2], counter[:, 3] = step & 0xFFFFFFFF, step >> 32
            words = philox4x32(counter, self.key, xp).reshape(-1)[: last - first]
            part = keys[first:last]
            xp.copyto(part, words)
            xp.left_shift(part, 32, out=part)
            xp.bitwise_or(part, _OTHER, out=part)
            xp.bitwise_or(part, xp.arange(first, last, dtype=xp.uint64), out=part)


@op
class SampledColumn(Op):
    """classes (blocks, k) in order, labels (n,) -> where in all the classes each label is."""

    rule = "b k, n -> n"
    whole = "k"

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        for dtype in dtypes:
            require_index(self, dtype)
        return ("int64",)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return outputs[0][0] * (1 + prod(inputs[0]).bit_length())

    def kernel(self, shard: ShardView, out: Any, classes: Any, label: Any) -> None:
        xp, flat, columns = shard.xp, classes.reshape(-1), classes.shape[-1]
        out.fill(0)
        if not flat.size:
            return
        start = shard.start(0, 0) * columns
        for first in range(0, label.size, _COUNTERS):
            wanted = label[first : first + _COUNTERS].astype(flat.dtype)
            place = xp.searchsorted(flat, wanted)
            found = xp.take(flat, place, mode="clip") == wanted
            xp.add(place, start, out=out[first : first + _COUNTERS], where=found)


def sample_rows(
    weight: Tensor, label: Tensor, share: float, *, blocks: int
) -> tuple[Tensor, Tensor]:
    """Rows of a table (classes, d) for a share of the classes, and where among them a label is.

    The rows are (blocks, count, d): of each block of classes the labels (n,) of the batch and
    random others. There are at least as many as a block may have labels; see `block_count`. The
    table is updated by these rows alone.
    """
    classes = weight.shape[0]
    size, count = block_sample(classes, label.shape[0], share, blocks)
    graph = current()
    key = random_key(graph.seed, graph.unique("sampled_classes"))
    with graph.scope("sample"):
        chosen = apply(SampleClasses(blocks, size, count, key), label, graph_step())
        rows = apply(TakeRows(size, True), weight, chosen)
        return rows, apply(SampledColumn(), chosen, label)


def block_sample(classes: int, labels: int, share: float, blocks: int) -> tuple[int, int]:
    """(classes of a block, how many are sampled); refuses blocks of which none would be left out.

    All labels may lie in one block, so that many are sampled of each.
    """
    if not 0 < share < 1:
        raise refusal(f"a sample is a share of the classes between 0 and 1, not {share!r}")
    if blocks < 1 or classes % blocks:
        raise refusal(f"{classes} classes are not {blocks} equal blocks")
    size = classes // blocks
    count = max(ceil(share * size), min(labels, size))
    if count >= size:
        raise refusal(
            f"a share {share} of {classes} classes leaves none out: in each of {blocks} blocks"
            f" there are {size} classes and there may be {labels} labels; use a smaller batch,"
            " more classes, or all of them"
        )
    return size, count


def block_count(classes: int, labels: int, share: float) -> int:
    """The most equal blocks, up to 64, in which the share of each holds all labels of a batch."""
    fitting = (
        blocks
        for blocks in range(min(MOST_BLOCKS, classes), 1, -1)
        if not classes % blocks and share * (classes // blocks) >= labels
    )
    return next(fitting, 1)
