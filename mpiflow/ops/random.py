"""Ops without inputs: constants and counter-based random numbers.

A random element depends on (key, its logical index) only, so initial weights are the same numbers
under any layout. Philox4x32-10 (Salmon et al. 2011) gives four words for each logical index.
"""

from __future__ import annotations

import hashlib
from typing import Any

from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.philox import philox4x32
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor, arithmetic
from mpiflow.ops.base import apply

_BLOCK = 1 << 16


class Source(Op):
    """Base of ops without inputs; subclasses have `shape` and `dtype`."""

    shape: tuple[int, ...]
    dtype: str

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        return Rule((), (tuple((f"d{i}",) for i in range(len(self.shape))),))

    def sizes(self) -> dict[str, int]:
        return {f"d{i}": n for i, n in enumerate(self.shape)}

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return (self.dtype,)


@op
class Fill(Source):
    """Every element is `value`."""

    shape: tuple[int, ...]
    value: float = 0.0
    dtype: str = "float32"

    def kernel(self, shard: ShardView, out: Any) -> None:
        out.fill(self.value)


class Random(Source):
    """Base of random initialisers: subclasses turn two 32-bit words an element into a value."""

    key: tuple[int, int]

    def kernel(self, shard: ShardView, out: Any) -> None:
        flat = out.reshape(-1)
        for first in range(0, flat.size, _BLOCK):
            last = min(first + _BLOCK, flat.size)
            index = self._logical(shard, out.shape, first, last)
            flat[first:last] = self._values(shard.xp, index)

    def _logical(self, shard: ShardView, local: tuple[int, ...], first: int, last: int) -> Any:
        """The logical flat indices of local elements first..last-1."""
        xp = shard.xp
        rest = xp.arange(first, last, dtype=xp.int64)
        index = xp.zeros(last - first, dtype=xp.int64)
        stride = 1
        for dim in reversed(range(len(local))):
            rest, position = xp.divmod(rest, local[dim])
            index += (position + shard.start(OUT, dim)) * stride
            stride *= self.shape[dim]
        return index

    def _words(self, xp: Any, index: Any) -> tuple[Any, Any]:
        counter = xp.zeros((len(index), 4), dtype=xp.uint32)
        counter[:, 0] = index & 0xFFFFFFFF
        counter[:, 1] = index >> 32
        words = philox4x32(counter, self.key, xp)
        # (word + 0.5) / 2**32 lies strictly between 0 and 1.
        return (words[:, 0] + 0.5) * 2.0**-32, (words[:, 1] + 0.5) * 2.0**-32

    def _values(self, xp: Any, index: Any) -> Any:
        raise NotImplementedError


@op
class Uniform(Random):
    """Uniform between `low` and `high`."""

    shape: tuple[int, ...]
    key: tuple[int, int]
    low: float = 0.0
    high: float = 1.0
    dtype: str = "float32"

    def _values(self, xp: Any, index: Any) -> Any:
        return self.low + (self.high - self.low) * self._words(xp, index)[0]


@op
class Normal(Random):
    """Normal with `mean` and `deviation`, by Box and Muller (1958)."""

    shape: tuple[int, ...]
    key: tuple[int, int]
    deviation: float = 1.0
    mean: float = 0.0
    dtype: str = "float32"

    def _values(self, xp: Any, index: Any) -> Any:
        u, v = self._words(xp, index)
        return self.mean + self.deviation * xp.sqrt(-2.0 * xp.log(u)) * xp.cos(2.0 * xp.pi * v)


def random_key(seed: int, name: str) -> tuple[int, int]:
    """The Philox key of a named stream of random numbers."""
    words = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(words[:4], "little"), int.from_bytes(words[4:8], "little")


def fill(shape: Shape, value: float, dtype: str = "float32") -> Tensor:
    """A constant tensor."""
    return apply(Fill(tuple(shape), value, dtype))


arithmetic.update(fill=fill)
