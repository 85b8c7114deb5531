"""Reading the rows of a batch: blocks of batches in memory, each chunk decoded about once an epoch.

    block in use   | ######## all of its rows ######## |   a batch is one np.take a field
    next block     | ####                              |   read on by a share at each step

A data set that is small, or no larger than two blocks, is kept whole instead and read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError
from mpiflow.io.rows import Shards
from mpiflow.io.sampler import Rows, Sampler, batch_rows, lanes_of, steps_per_block, steps_per_epoch
from mpiflow.io.shards import row_bytes
from mpiflow.plan.records import DataSet

Span = tuple[int, int]
"""Rows [start, stop) of a batch."""


def cache_bytes(dataset: DataSet, *spans: Span) -> int:
    """The most that a reader of these spans of each batch holds at a time.

    Blocks, of each lane the chunk that two of them share, a chunk that is being decoded (stored,
    and before and after its filters), the order of the rows, and where each chunk lies.
    """
    if not dataset.shards:
        return 0
    block = _block_rows(dataset, spans)
    held = dataset.rows if _keeps_all(dataset, spans) else 2 * block
    chunks = sum(-(-shard.rows // shard.chunk_rows) for shard in dataset.shards)
    decoded = (_lanes(dataset, spans) + 3) * max(shard.chunk_rows for shard in dataset.shards)
    orders = _ORDER_BYTES * block if dataset.shuffle else 0
    index = chunks * (_CHUNK_BYTES + _TABLE_BYTES * len(dataset.fields))
    return (held + decoded) * row_bytes(dataset.fields) + orders + index


_SMALL_BYTES = 4 << 20
# A row's place in two blocks and its sorting key; what Philox needs for it on the way.
_ORDER_BYTES = 48
# First and last row, shard, order and end of a chunk, and what ordering them takes; its offset,
# size and mask in each field's table.
_CHUNK_BYTES, _TABLE_BYTES = 72, 20


def _together(dataset: DataSet, spans: Sequence[Span]) -> list[Span]:
    """The rows of each batch that are held in one block: a shuffled set is read by whole lanes."""
    if not dataset.shuffle:
        return list(spans)
    joined: list[Span] = []
    for lanes in sorted(lanes_of(dataset, *span) for span in spans if span[0] < span[1]):
        start, stop = lanes[0][0], lanes[-1][1]
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _lanes(dataset: DataSet, spans: Sequence[Span]) -> int:
    held = _together(dataset, spans)
    return sum(len(lanes_of(dataset, *span)) for span in held) if dataset.shuffle else len(held)


def _block_rows(dataset: DataSet, spans: Sequence[Span]) -> int:
    """The rows of the blocks that hold these spans of each batch."""
    rows = sum(stop - start for start, stop in _together(dataset, spans))
    return steps_per_block(dataset) * rows


def _keeps_all(dataset: DataSet, spans: Sequence[Span]) -> bool:
    """Whether the data set is small, or no larger than what would be held of it at a time."""
    small = dataset.rows * row_bytes(dataset.fields) <= _SMALL_BYTES
    return small or dataset.rows <= 2 * _block_rows(dataset, spans)


def open_reader(
    dataset: DataSet,
    folder: Path,
    *,
    rows: Span | None = None,
    spans: Sequence[Span] = (),
    tail: bool = False,
) -> DatasetReader:
    """A reader of the files in `folder`; with `tail` an epoch ends with the incomplete batch.

    `rows` is the span of each batch that will be asked for (default: all), or `spans` are several
    in turn, by which the memory is bounded. Any span can be read; a larger one takes more.
    """
    if tail and dataset.shuffle:
        raise DataError(f"data set {dataset.name!r} is shuffled: its epochs have no tail")
    if not dataset.shards:
        raise DataError(
            f"data set {dataset.name!r} was declared without files; make the plan where they are"
        )
    return DatasetReader(dataset, Path(folder), spans or [rows or (0, dataset.batch)], tail)


# A part of a chunk that is still to be read: chunk, first and last+1 row, place in the arrays.
_Part = tuple[int, int, int, int]


@dataclass(slots=True)
class _Window:
    """A block and the arrays that hold its rows, one a field; `parts` are not read yet."""

    arrays: list[NDArray[Any]]
    places: Rows
    parts: list[_Part]
    epoch: int = -1
    steps: range = range(0)
    low: int = 0
    high: int = 0

    def covers(self, epoch: int, batch: int, start: int, stop: int) -> bool:
        """Whether it is the block of rows [start, stop) of a batch."""
        return (
            epoch == self.epoch and batch in self.steps and self.low <= start and stop <= self.high
        )


@dataclass(slots=True)
class _Blocks:
    """The block in use and the next one of a span; `ahead` is what the next has to read in all."""

    window: _Window
    next: _Window
    ahead: int = 0


class DatasetReader:
    """Implements `plan.protocols.Reader`. Used by one thread at a time."""

    def __init__(self, dataset: DataSet, folder: Path, spans: Sequence[Span], tail: bool):
        self.dataset = dataset
        self._batches = -(-dataset.rows // dataset.batch) if tail else steps_per_epoch(dataset)
        self._sampler = Sampler(dataset)
        self._shards = Shards(dataset, folder)
        self._first = np.cumsum([0, *(shard.rows for shard in dataset.shards)])
        self._dtypes = [np.dtype(field.dtype) for field in dataset.fields]
        self._keeps_all = _keeps_all(dataset, spans)
        self._loaded = np.zeros(len(self._sampler.first), bool)
        kept = self._arrays(dataset.rows if self._keeps_all else 0)
        self._spans = _together(dataset, spans) or [(0, 0)]
        self._blocks = [
            _Blocks(_new_window(kept), _new_window(self._arrays(0))) for _ in self._spans
        ]
        self._tails: dict[tuple[int, int], NDArray[Any]] = {}
        self._most_tails = len(dataset.fields) * _lanes(dataset, spans)
        self.decoded_bytes = 0
        self.reading = ""

    @property
    def held_bytes(self) -> int:
        """The rows that are in memory now, or have room there."""
        windows = [w for blocks in self._blocks for w in (blocks.window, blocks.next)]
        arrays = {id(array): array for window in windows for array in window.arrays}
        return sum(array.nbytes for array in (*arrays.values(), *self._tails.values()))

    def read(self, step: int, rows: tuple[int, int], out: Mapping[str, Any]) -> None:
        """Write rows [start, stop) of batch `step` into `out[field]`, shape (stop - start, ...).

        `step` counts batches from the start of epoch 0.
        """
        start, stop = rows
        epoch, batch = self._position(step, start, stop)
        if start == stop:
            return
        number = self._number(start, stop)
        blocks = self._blocks[number or 0]
        if number is None or not self.dataset.shuffle:
            self._open(blocks, epoch, batch, start, stop)
        else:
            self._open(blocks, epoch, batch, *self._spans[number])
        window = blocks.window
        places = window.places[batch - window.steps.start, start - window.low : stop - window.low]
        for number, field in enumerate(self.dataset.fields):
            if field.name in out:
                array = out[field.name]
                self._check_array(number, len(places), array)
                window.arrays[number].take(places, axis=0, out=array, mode="clip")
        self._read_ahead(blocks, batch)

    def _number(self, start: int, stop: int) -> int | None:
        """The number of the span that rows [start, stop) lie in."""
        within = (i for i, (a, b) in enumerate(self._spans) if a <= start and stop <= b)
        return next(within, None)

    def describe(self, step: int, row: int) -> str:
        """Where row `row` of batch `step` is stored: file and row."""
        epoch, batch = self._position(step, row, row + 1)
        number = int(batch_rows(self.dataset, epoch, batch, row, row + 1)[0])
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        return f"{self.dataset.shards[shard].name} row {number - int(self._first[shard])}"

    def close(self) -> None:
        """Close all files and give back the memory; nothing can be read after."""
        self._shards.close()
        self._blocks = [_Blocks(_new_window([]), _new_window([])) for _ in self._blocks]
        self._tails.clear()

    def _position(self, step: int, start: int, stop: int) -> tuple[int, int]:
        """Epoch and batch of a step; DataError where the batch has no rows [start, stop)."""
        epoch, batch = divmod(step, self._batches)
        size = min(self.dataset.batch, self.dataset.rows - batch * self.dataset.batch)
        if not 0 <= start <= stop <= size:
            raise DataError(
                f"data set {self.dataset.name!r}: rows {start} to {stop} are asked of batch "
                f"{batch} of epoch {epoch}, which has {size}"
            )
        return epoch, batch

    def _check_array(self, field: int, rows: int, array: Any) -> None:
        name, shape = self.dataset.fields[field].name, (rows, *self.dataset.fields[field].shape)
        if array.shape != shape or array.dtype != self._dtypes[field]:
            raise DataError(
                f"data set {self.dataset.name!r}: field {name!r} is {self._dtypes[field]} {shape}, "
                f"the array for it {array.dtype} {array.shape}"
            )

    # -- blocks

    def _open(self, blocks: _Blocks, epoch: int, batch: int, start: int, stop: int) -> None:
        """Have all rows of the block of rows [start, stop) of a batch in the window."""
        if not blocks.window.covers(epoch, batch, start, stop):
            if blocks.next.covers(epoch, batch, start, stop):
                blocks.window, blocks.next = blocks.next, blocks.window
            else:
                self._begin(blocks.window, epoch, batch, start, stop)
        self._fill(blocks.window, 0)

    def _read_ahead(self, blocks: _Blocks, batch: int) -> None:
        """Have as much of the next block as was used of this one, so that no step waits long."""
        now = blocks.window
        used = batch - now.steps.start
        if not used or self._keeps_all:
            return
        ends = now.steps.stop >= self._batches
        epoch, first = (now.epoch + 1, 0) if ends else (now.epoch, now.steps.stop)
        if not blocks.next.covers(epoch, first, now.low, now.high):
            self._begin(blocks.next, epoch, first, now.low, now.high)
            blocks.ahead = len(blocks.next.parts)
        self._fill(blocks.next, blocks.ahead - blocks.ahead * used // len(now.steps))

    def _begin(self, window: _Window, epoch: int, batch: int, start: int, stop: int) -> None:
        """Make `window` that of a block, none of which is read."""
        block = self._sampler.block(epoch, batch, start, stop)
        if self._keeps_all:
            chunk = np.unique(block.chunk[~self._loaded[block.chunk]])
            first = self._sampler.first[chunk]
            parts = chunk, first, self._sampler.last[chunk], first
            window.places = block.numbers()
        else:
            parts = block.chunk, block.start, block.stop, block.places()
            window.places = block.order
            if len(window.arrays[0]) < block.order.size:
                window.arrays = self._arrays(block.order.size)
        window.epoch, window.steps = epoch, block.steps
        window.low, window.high = block.low, block.high
        window.parts = list(zip(*(column[::-1].tolist() for column in parts), strict=True))

    def _arrays(self, rows: int) -> list[NDArray[Any]]:
        return [
            np.empty((rows, *field.shape), dtype)
            for field, dtype in zip(self.dataset.fields, self._dtypes, strict=True)
        ]

    def _fill(self, window: _Window, left: int) -> None:
        """Read parts of a block until `left` of them are missing."""
        while len(window.parts) > left:
            chunk, start, stop, place = window.parts[-1]
            for number, array in enumerate(window.arrays):
                self._read_part(number, chunk, start, stop, array[place : place + stop - start])
            self._loaded[chunk] = True
            window.parts.pop()
        self.reading = ""

    def _read_part(self, field: int, chunk: int, start: int, stop: int, out: NDArray[Any]) -> None:
        """Fill `out` with rows [start, stop) of a chunk.

        A chunk with filters is decoded whole, and kept where the next block begins with its rest.
        """
        first, last = int(self._sampler.first[chunk]), int(self._sampler.last[chunk])
        shard = int(self._sampler.shard[chunk])
        base = int(self._first[shard])
        self.reading = f"{self.dataset.shards[shard].name} row {start - base}"
        if (start, stop) == (first, last) or self._shards.field(shard, field).plain:
            self._shards.read(shard, field, start - base, stop - base, out)
            self.decoded_bytes += out.nbytes
            return
        rows = self._tails.pop((field, chunk), None)
        if rows is None:
            rows = np.empty((last - first, *out.shape[1:]), out.dtype)
            self._shards.read(shard, field, first - base, last - base, rows)
            self.decoded_bytes += rows.nbytes
        out[...] = rows[start - first : stop - first]
        if stop < last:
            if len(self._tails) == self._most_tails:
                del self._tails[next(iter(self._tails))]
            self._tails[field, chunk] = rows


def _new_window(arrays: list[NDArray[Any]]) -> _Window:
    return _Window(arrays, np.empty((0, 0), np.int64), [])
