"""Which rows make up a batch: a pure function of (data set, epoch, step), whatever the ranks.

    chunks of all shards   | c0 | c1 | c2 | c3 | c4 |c5|      shards in listed order
    permuted by epoch      | c3 | c0 |c5| c4 | c2 | c1 |      one sequence of rows
    cut into lanes         |  lane 0  |  lane 1  | | rest     the rest sits out this epoch
    blocks of a lane       | b0 | b1 | b2 | ...               rows are permuted within a block

Lane l gives rows span(batch, lanes, l) of every batch, so a rank that covers whole lanes reads
each chunk once an epoch while it holds no more than `window` chunks of each lane. Two-level
shuffling after CorgiPile (Xu et al., SIGMOD 2022).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpiflow.graph.philox import counters, philox4x32
from mpiflow.graph.sbp import span
from mpiflow.plan.records import DataSet

Rows = NDArray[np.int64]

# Keeps the words used here apart from those that the same seed gives to weights and dropout.
_DOMAIN = 0x64617461


def steps_per_epoch(dataset: DataSet) -> int:
    """Complete batches in one epoch; the rows of an incomplete one are not counted."""
    return dataset.rows // dataset.batch


def permutation(size: int, seed: int, epoch: int, lane: int, block: int) -> Rows:
    """A permutation of 0..size-1. Lane 0 is for the chunks; lanes of rows count from 1."""
    first = block << 32
    words = philox4x32(
        counters(first, first + (size + 1) // 2, (epoch, lane)), (seed, (seed >> 32) ^ _DOMAIN)
    ).astype(np.uint64)
    keys = (words[:, ::2] << np.uint64(32)) | words[:, 1::2]
    return np.argsort(keys.reshape(-1)[:size], kind="stable")


def block_rows(dataset: DataSet) -> int:
    """The rows within which a lane is shuffled."""
    return dataset.window * max(shard.chunk_rows for shard in dataset.shards)


def lanes_of(dataset: DataSet, start: int, stop: int) -> range:
    """The lanes that give rows [start, stop) of each batch."""
    lanes = range(dataset.lanes)
    touched = [
        lane
        for lane, (first, last) in ((lane, span(dataset.batch, len(lanes), lane)) for lane in lanes)
        if first < stop and start < last
    ]
    return range(touched[0], touched[-1] + 1) if touched else range(0)


def batch_rows(dataset: DataSet, epoch: int, step: int, start: int, stop: int) -> Rows:
    """The rows that stand at [start, stop) of batch `step` of an epoch.

    A row's number is its position in the concatenation of the shards in listed order.
    """
    return Sampler(dataset).rows(epoch, step, start, stop)


class Sampler:
    """`batch_rows`, keeping the permutations in use: one of chunks, one block of each lane."""

    def __init__(self, dataset: DataSet):
        self._dataset = dataset
        self._steps = steps_per_epoch(dataset)
        self._block = block_rows(dataset)
        self._first, self._length = _chunks(dataset)
        self._epoch = -1
        self._order = self._offset = np.empty(0, np.int64)
        self._blocks: dict[int, tuple[int, int, Rows]] = {}

    def rows(self, epoch: int, step: int, start: int, stop: int) -> Rows:
        """The rows that stand at [start, stop) of batch `step` of an epoch."""
        if not self._dataset.shuffle:
            first = step * self._dataset.batch
            return np.arange(first + start, first + stop, dtype=np.int64)
        parts = [
            self._lane(epoch, step, lane, start, stop)
            for lane in lanes_of(self._dataset, start, stop)
        ]
        if not parts:
            return np.empty(0, np.int64)
        return self._row_numbers(epoch, np.concatenate(parts))

    def _lane(self, epoch: int, step: int, lane: int, start: int, stop: int) -> Rows:
        """The positions in the epoch's sequence that a lane gives to [start, stop) of a batch."""
        first, last = span(self._dataset.batch, self._dataset.lanes, lane)
        share = last - first
        begin = step * share + max(start - first, 0)
        end = step * share + min(stop - first, share)
        positions = [
            self._block_order(epoch, lane, block, self._steps * share)[
                max(begin - block * self._block, 0) : end - block * self._block
            ]
            + block * self._block
            for block in range(begin // self._block, (end - 1) // self._block + 1)
        ]
        return np.concatenate(positions) + self._steps * first

    def _block_order(self, epoch: int, lane: int, block: int, lane_rows: int) -> Rows:
        """The order of the rows within one block of a lane."""
        held = self._blocks.get(lane)
        if held and held[:2] == (epoch, block):
            return held[2]
        size = min(self._block, lane_rows - block * self._block)
        order = permutation(size, self._dataset.seed, epoch, lane + 1, block)
        self._blocks[lane] = epoch, block, order
        return order

    def _row_numbers(self, epoch: int, positions: Rows) -> Rows:
        """The rows at positions of the epoch's sequence of permuted chunks."""
        if epoch != self._epoch:
            self._order = permutation(len(self._first), self._dataset.seed, epoch, 0, 0)
            lengths = self._length[self._order]
            self._offset = np.cumsum(lengths) - lengths
            self._epoch = epoch
        index = np.searchsorted(self._offset, positions, side="right") - 1
        return self._first[self._order[index]] + positions - self._offset[index]


def _chunks(dataset: DataSet) -> tuple[Rows, Rows]:
    """First row and length of each chunk, in order of the shards; every length is positive."""
    first, length = [], []
    base = 0
    for shard in dataset.shards:
        starts = np.arange(0, shard.rows, shard.chunk_rows, dtype=np.int64)
        first.append(starts + base)
        length.append(np.minimum(shard.chunk_rows, shard.rows - starts))
        base += shard.rows
    return np.concatenate(first), np.concatenate(length)
