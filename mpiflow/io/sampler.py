"""Which rows make up a batch: a pure function of (data set, epoch, step), whatever the ranks.

    chunks of all shards   | c0 | c1 | c2 | c3 | c4 |c5|      shards in listed order
    permuted by epoch      | c3 | c0 |c5| c4 | c2 | c1 |      one sequence of rows
    cut into lanes         |  lane 0  |  lane 1  | | rest     the rest sits out this epoch
    blocks of a lane       | b0 | b1 | b2 | ...               rows are permuted within a block

Lane l gives rows span(batch, lanes, l) of every batch, and a block is the same whole number of
steps in all lanes. So a rank that covers whole lanes reads each chunk once an epoch, and what it
needs at a time is one block: about `window` chunks of each lane. Two-level shuffling after
CorgiPile (Xu et al., SIGMOD 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpiflow.graph.philox import philox4x32
from mpiflow.graph.sbp import span
from mpiflow.plan.records import DataSet

Rows = NDArray[np.int64]

# Keeps the words used here apart from those that the same seed gives to weights and dropout.
_DOMAIN = 0x64617461
_FOR_ROWS, _FOR_CHUNKS = 0, 1


def steps_per_epoch(dataset: DataSet) -> int:
    """Complete batches in one epoch; the rows of an incomplete one are not counted."""
    return dataset.rows // dataset.batch


def steps_per_block(dataset: DataSet) -> int:
    """The steps over which a lane is shuffled: as many as `window` chunks of it last, or one."""
    if not dataset.shuffle:
        return 1
    rows = dataset.window * max(shard.chunk_rows for shard in dataset.shards)
    share = -(-dataset.batch // dataset.lanes)
    return max(1, min(rows // share, steps_per_epoch(dataset)))


def lanes_of(dataset: DataSet, start: int, stop: int) -> list[tuple[int, int]]:
    """The rows of a batch that each lane gives which gives any of [start, stop)."""
    spans = (span(dataset.batch, dataset.lanes, lane) for lane in range(dataset.lanes))
    return [(first, last) for first, last in spans if first < stop and start < last]


def batch_rows(dataset: DataSet, epoch: int, step: int, start: int, stop: int) -> Rows:
    """The rows that stand at [start, stop) of batch `step` of an epoch.

    A row's number is its position in the concatenation of the shards in listed order.
    """
    if start == stop:
        return np.empty(0, np.int64)
    block = Sampler(dataset).block(epoch, step, start, stop)
    return block.numbers()[block.at(step, start, stop)]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [low, high) of the batches of `steps`: parts of chunks, and the order of their rows.

    Part i is rows [start[i], stop[i]) of the data set, within chunk `chunk[i]`. With the parts laid
    end to end, row j of the batch of steps[i] lies at place order[i, j - low].
    """

    steps: range
    low: int
    high: int
    order: Rows
    chunk: Rows
    start: Rows
    stop: Rows

    def at(self, step: int, start: int, stop: int) -> tuple[int, slice]:
        """Where `order` has rows [start, stop) of a batch."""
        return step - self.steps.start, slice(start - self.low, stop - self.low)

    def places(self) -> Rows:
        """The place where each part begins."""
        lengths = self.stop - self.start
        return np.cumsum(lengths) - lengths

    def numbers(self) -> Rows:
        """The numbers of the rows, in the shape of `order`."""
        shift = np.repeat(self.start - self.places(), self.stop - self.start)
        return self.order + shift[self.order]


class Sampler:
    """Gives the blocks of a data set. It keeps the order of the chunks of one epoch."""

    def __init__(self, dataset: DataSet):
        self._dataset = dataset
        self._steps = steps_per_epoch(dataset)
        self._block = steps_per_block(dataset)
        self.first, self.last, self.shard = _chunks(dataset)
        self._epoch = -1
        self._order = np.arange(len(self.first))
        self._ends = self.last

    def block(self, epoch: int, step: int, start: int, stop: int) -> Block:
        """The block around rows [start, stop), at least one, of batch `step` of an epoch."""
        data = self._dataset
        if not data.shuffle:
            begin = np.array([step * data.batch + start])
            order = np.arange(stop - start)[None]
            return self._parts(range(step, step + 1), start, stop, order, begin, begin + order.size)
        begin_step = step - step % self._block
        steps = range(begin_step, min(begin_step + self._block, self._steps))
        lanes = np.array(lanes_of(data, start, stop))
        share = lanes[:, 1] - lanes[:, 0]
        low, high = int(lanes[0, 0]), int(lanes[-1, 1])
        # One sort for all lanes: the lane in the upper half of the key, random words in the lower.
        keys = np.repeat(np.arange(len(lanes), dtype=np.uint64) << np.uint64(32), share)
        keys = keys[:, None] | self._words(epoch, _FOR_ROWS, steps, low, high).T
        order = np.argsort(keys, axis=None, kind="stable").reshape(keys.shape)
        begin = self._steps * lanes[:, 0] + steps.start * share
        self._permute_chunks(epoch)
        return self._parts(
            steps, low, high, np.ascontiguousarray(order.T), begin, begin + share * len(steps)
        )

    def _words(self, epoch: int, purpose: int, steps: range, low: int, high: int) -> NDArray:
        """Random words of elements [low, high) at each of `steps`: (len(steps), high - low)."""
        first, last = low // 4, -(-high // 4)
        counter = np.empty((len(steps), last - first, 4), np.uint32)
        counter[..., 0] = np.arange(first, last)
        counter[..., 1] = np.array(steps)[:, None]
        counter[..., 2:] = epoch, purpose
        seed = self._dataset.seed
        words = philox4x32(counter.reshape(-1, 4), (seed, (seed >> 32) ^ _DOMAIN))
        return words.reshape(len(steps), -1)[:, low % 4 :][:, : high - low]

    def _permute_chunks(self, epoch: int) -> None:
        """Make the sequence that of an epoch."""
        if epoch != self._epoch:
            keys = self._words(epoch, _FOR_CHUNKS, range(1), 0, len(self.first))[0]
            self._order = np.argsort(keys, kind="stable")
            self._ends = np.cumsum((self.last - self.first)[self._order])
            self._epoch = epoch

    def _parts(
        self, steps: range, low: int, high: int, order: Rows, begin: Rows, end: Rows
    ) -> Block:
        """The block of the runs [begin, end) of the sequence."""
        first = np.searchsorted(self._ends, begin, side="right")
        last = np.searchsorted(self._ends, end) + 1
        index = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        chunk = self._order[index]
        # From positions in the sequence to rows of the data set.
        shift = self.last[chunk] - self._ends[index]
        start = np.maximum(self.first[chunk], np.repeat(begin, last - first) + shift)
        stop = np.minimum(self.last[chunk], np.repeat(end, last - first) + shift)
        return Block(steps, low, high, order, chunk, start, stop)


def _chunks(dataset: DataSet) -> tuple[Rows, Rows, Rows]:
    """First and last+1 row and the shard of each chunk, none empty, in order of the shards."""
    first, last, shard_of = [], [], []
    base = 0
    for number, shard in enumerate(dataset.shards):
        starts = np.arange(0, shard.rows, shard.chunk_rows, dtype=np.int64)
        first.append(base + starts)
        last.append(base + np.minimum(starts + shard.chunk_rows, shard.rows))
        shard_of.append(np.full(len(starts), number))
        base += shard.rows
    return np.concatenate(first), np.concatenate(last), np.concatenate(shard_of)
