"""Decoded chunks of one field, all in one array, so that a batch is gathered in one call."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpiflow.io.sampler import Rows


class Chunks(Protocol):
    """Where the cache gets chunks from."""

    def length(self, chunk: int) -> int:
        """The rows of a chunk."""

    def decode(self, chunk: int) -> NDArray[Any]:
        """The rows themselves, read from the file."""


@dataclass(slots=True)
class _Held:
    """Where a chunk lies in the array, and how many of its rows were not asked for yet."""

    start: int
    rows: int
    left: int


class ChunkCache:
    """Keeps at most `rows` rows; what was not used for longest goes first.

    With `keep` a chunk stays though all its rows were used, else its room is free at once: within
    an epoch no row comes twice.
    """

    def __init__(self, rows: int, shape: tuple[int, ...], dtype: str, *, keep: bool):
        self.array: NDArray[Any] = np.empty((rows, *shape), dtype)
        self._keep = keep
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._free = [(0, rows)]

    @property
    def held_rows(self) -> int:
        """The rows of all chunks that are held."""
        return sum(chunk.rows for chunk in self._held.values())

    def clear(self) -> None:
        """Forget all chunks."""
        self._held.clear()
        self._free = [(0, len(self.array))]

    def gather(self, chunks: Rows, offsets: Rows, out: Any, source: Chunks) -> None:
        """Write row `offsets[i]` of chunk `chunks[i]` to `out[i]`."""
        wanted, which, uses = np.unique(chunks, return_inverse=True, return_counts=True)
        starts = np.array(self._hold(wanted.tolist(), source), np.int64)
        if (starts >= 0).all():
            np.take(self.array, starts[which] + offsets, axis=0, out=out, mode="clip")
            self._use(wanted, uses)
            return
        # More than there is room for: gather what is here, then the rest.
        here = starts[which] >= 0
        out[here] = self.array[starts[which[here]] + offsets[here]]
        self._use(wanted[starts >= 0], uses[starts >= 0])
        rest = np.empty((np.count_nonzero(~here), *out.shape[1:]), out.dtype)
        self.gather(chunks[~here], offsets[~here], rest, source)
        out[~here] = rest

    def _hold(self, wanted: list[int], source: Chunks) -> list[int]:
        """Where each chunk begins in the array, -1 where there is no room beside the others."""
        self._grow(max((source.length(c) for c in wanted if c not in self._held), default=0))
        for chunk in wanted:
            if chunk in self._held:
                self._held.move_to_end(chunk)
        pinned = set(wanted)
        return [
            self._held[chunk].start if chunk in self._held else self._load(chunk, pinned, source)
            for chunk in wanted
        ]

    def _load(self, chunk: int, pinned: set[int], source: Chunks) -> int:
        """Decode a chunk into the array; gives where it begins, or -1."""
        rows = source.length(chunk)
        start = self._room(rows, pinned)
        if start < 0:
            return start
        self._held[chunk] = _Held(start, rows, rows)
        try:
            self.array[start : start + rows] = source.decode(chunk)
        except BaseException:
            self._drop(chunk)
            raise
        return start

    def _grow(self, rows: int) -> None:
        """Make room for a chunk longer than planned: unequal chunks, which `data info` tells."""
        if rows > len(self.array):
            self.array = np.empty((rows, *self.array.shape[1:]), self.array.dtype)
            self.clear()

    def _room(self, rows: int, pinned: set[int]) -> int:
        """The start of free rows, after dropping the oldest chunks but `pinned`; -1 for none."""
        while True:
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= rows:
                    self._free[index : index + 1] = [(start + rows, stop)] * (start + rows < stop)
                    return start
            oldest = next(iter(self._held), None)
            if oldest is None or oldest in pinned:
                return -1
            self._drop(oldest)

    def _use(self, chunks: Rows, uses: Rows) -> None:
        """Count rows as used; chunks that are used up go."""
        if self._keep:
            return
        for chunk, count in zip(chunks.tolist(), uses.tolist(), strict=True):
            held = self._held[chunk]
            held.left -= count
            if held.left <= 0:
                self._drop(chunk)

    def _drop(self, chunk: int) -> None:
        """Free the rows of a chunk, joined with free ones beside them."""
        held = self._held.pop(chunk)
        free = sorted([*self._free, (held.start, held.start + held.rows)])
        self._free = [free[0]]
        for start, stop in free[1:]:
            if start == self._free[-1][1]:
                self._free[-1] = self._free[-1][0], stop
            else:
                self._free.append((start, stop))
