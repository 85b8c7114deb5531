"""Reading the rows of a batch: chunks through a bounded cache, each decoded about once an epoch."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError
from mpiflow.graph.sbp import span
from mpiflow.io import hdf5
from mpiflow.io.cache import ChunkCache
from mpiflow.io.chunks import FieldFile, index_file
from mpiflow.io.sampler import (
    Rows,
    Sampler,
    batch_rows,
    block_rows,
    lanes_of,
    steps_per_epoch,
)
from mpiflow.io.shards import row_bytes
from mpiflow.plan.records import DataSet, Field

# Open at a time; the usual limit of a process is 1024, that of a careful site 64.
_OPEN_FILES = 24
# A chunk's number: its shard above, its position in the file below.
_CHUNK_BITS = 40
_POSITION = (1 << _CHUNK_BITS) - 1


def cache_bytes(dataset: DataSet, rows: tuple[int, int]) -> int:
    """The most that a reader of rows [start, stop) of each batch holds at a time.

    Decoded chunks, the orders of rows in use, and the chunk that is being decoded, twice.
    """
    if not dataset.shards:
        return 0
    chunk_rows = max(shard.chunk_rows for shard in dataset.shards)
    scratch = 2 * chunk_rows * row_bytes(dataset.fields)
    orders = 0
    if dataset.shuffle:
        orders = 8 * sum(
            min(block_rows(dataset), steps_per_epoch(dataset) * share)
            for share in _lane_shares(dataset, rows)
        )
    return _cached_rows(dataset, rows) * row_bytes(dataset.fields) + orders + scratch


def _cached_rows(dataset: DataSet, rows: tuple[int, int]) -> int:
    """Decoded rows that are needed at a time, never more than the whole data set.

    Of a lane: the chunks of one block, cut at both ends, and the one that it shares with the next.
    """
    chunk_rows = max(shard.chunk_rows for shard in dataset.shards)
    if dataset.shuffle:
        need = sum(
            min(max(block_rows(dataset), share), steps_per_epoch(dataset) * share) + 3 * chunk_rows
            for share in _lane_shares(dataset, rows)
        )
    else:
        need = rows[1] - rows[0] + 2 * chunk_rows
    return min(need, _padded_rows(dataset))


def _padded_rows(dataset: DataSet) -> int:
    """All rows, each file's last chunk counted in full, as it is decoded."""
    return sum(-(-s.rows // s.chunk_rows) * s.chunk_rows for s in dataset.shards)


def _lane_shares(dataset: DataSet, rows: tuple[int, int]) -> list[int]:
    """The rows of a batch that each lane which touches `rows` gives."""
    spans = [span(dataset.batch, dataset.lanes, lane) for lane in lanes_of(dataset, *rows)]
    return [stop - start for start, stop in spans]


def open_reader(
    dataset: DataSet,
    folder: Path,
    *,
    rows: tuple[int, int] | None = None,
    tail: bool = False,
) -> DatasetReader:
    """A reader of the files in `folder`; with `tail` an epoch ends with the incomplete batch.

    `rows` is the span of each batch that will be asked for (default: all), by which the cache is
    bounded. Any span can be read; a larger one decodes chunks more than once.
    """
    if tail and dataset.shuffle:
        raise DataError(f"data set {dataset.name!r} is shuffled: its epochs have no tail")
    if not dataset.shards:
        raise DataError(
            f"data set {dataset.name!r} was declared without files; make the plan where they are"
        )
    return DatasetReader(dataset, Path(folder), rows or (0, dataset.batch), tail)


class DatasetReader:
    """Implements `plan.protocols.Reader`. Used by one thread at a time."""

    def __init__(self, dataset: DataSet, folder: Path, rows: tuple[int, int], tail: bool):
        self.dataset, self._folder = dataset, folder
        self._batches = -(-dataset.rows // dataset.batch) if tail else steps_per_epoch(dataset)
        self._sampler = Sampler(dataset)
        self._first = np.cumsum([0, *(shard.rows for shard in dataset.shards)])
        self._index: dict[int, tuple[FieldFile, ...]] = {}
        self._chunk_rows = np.zeros((len(dataset.fields), len(dataset.shards)), np.int64)
        self._files = _OpenFiles()
        self._epoch = 0
        held = _cached_rows(dataset, rows)
        self._keeps_all = held == _padded_rows(dataset)
        self._caches = [
            ChunkCache(held, field.shape, field.dtype, keep=self._keeps_all)
            for field in dataset.fields
        ]
        self.decoded_chunks = 0
        self.decoded_bytes = 0

    @property
    def cached_bytes(self) -> int:
        """The decoded chunks that are held now."""
        return sum(
            cache.held_rows * row_bytes((field,))
            for cache, field in zip(self._caches, self.dataset.fields, strict=True)
        )

    @property
    def cache_limit(self) -> int:
        """The most that `cached_bytes` can be."""
        return sum(cache.array.nbytes for cache in self._caches)

    def read(self, step: int, rows: tuple[int, int], out: Mapping[str, Any]) -> None:
        """Write rows [start, stop) of batch `step` into `out[field]`, shape (stop - start, ...).

        `step` counts batches from the start of epoch 0.
        """
        epoch, batch = self._position(step, *rows)
        if epoch != self._epoch:
            self._begin(epoch)
        numbers = self._sampler.rows(epoch, batch, *rows)
        shard_of = np.searchsorted(self._first, numbers, side="right") - 1
        local = numbers - self._first[shard_of]
        for number, field in enumerate(self.dataset.fields):
            if field.name in out:
                self._check_array(field, len(numbers), out[field.name])
                self._gather(number, shard_of, local, out[field.name])

    def describe(self, step: int, row: int) -> str:
        """Where row `row` of batch `step` is stored: file and row."""
        epoch, batch = self._position(step, row, row + 1)
        number = int(batch_rows(self.dataset, epoch, batch, row, row + 1)[0])
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        return f"{self.dataset.shards[shard].name} row {number - int(self._first[shard])}"

    def close(self) -> None:
        """Close all files and give back the memory; nothing can be read after."""
        self._files.close()
        self._caches.clear()

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

    def _begin(self, epoch: int) -> None:
        """What is left of the last epoch stands in the way of this one, unless all of it fits."""
        self._epoch = epoch
        if not self._keeps_all:
            for cache in self._caches:
                cache.clear()

    def _check_array(self, field: Field, rows: int, array: Any) -> None:
        shape = (rows, *field.shape)
        if array.shape != shape or array.dtype.name != field.dtype:
            raise DataError(
                f"data set {self.dataset.name!r}: field {field.name!r} is {field.dtype} {shape}, "
                f"the array for it {array.dtype} {array.shape}"
            )

    def _gather(self, field: int, shard_of: Rows, local: Rows, out: Any) -> None:
        """Copy rows of one field from their chunks, each chunk looked up once."""
        chunk_rows = self._chunk_rows[field][shard_of]
        if not chunk_rows.all():
            for shard in np.unique(shard_of):
                self._chunk_rows[field, shard] = self.field_file(int(shard), field).chunk_rows
            chunk_rows = self._chunk_rows[field][shard_of]
        chunks, offsets = np.divmod(local, chunk_rows)
        source = _Chunks(self, field)
        self._caches[field].gather((shard_of << _CHUNK_BITS) | chunks, offsets, out, source)

    def decode(self, field: int, shard: int, number: int) -> NDArray[Any]:
        """The rows of a chunk of a shard, read from the file."""
        file = self.field_file(shard, field)
        if file.table is None:
            dataset = self._files.library(file.path)[file.stored.name]
            rows = file.from_library(dataset, number)
        else:
            rows = file.decode(self._files.descriptor(file.path), number)
        self.decoded_chunks += 1
        self.decoded_bytes += rows.nbytes
        return rows

    def field_file(self, shard: int, field: int) -> FieldFile:
        """The index of a field of a shard, made when the shard is first needed."""
        if shard not in self._index:
            record = self.dataset.shards[shard]
            path = self._folder / record.name
            files = index_file(path, self.dataset.fields, record.chunk_rows)
            for file in files:
                if file.stored.rows != record.rows:
                    raise DataError(
                        f"{path}: field {file.stored.name!r} has {file.stored.rows} rows; "
                        f"the plan says {record.rows}"
                    )
            self._index[shard] = files
        return self._index[shard][field]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of one field, numbered by shard and position, as the cache asks for them."""

    reader: DatasetReader
    field: int

    def length(self, chunk: int) -> int:
        """The rows of a chunk."""
        file = self.reader.field_file(chunk >> _CHUNK_BITS, self.field)
        start, stop = file.chunk_span(chunk & _POSITION)
        return stop - start

    def decode(self, chunk: int) -> NDArray[Any]:
        """The rows themselves."""
        return self.reader.decode(self.field, chunk >> _CHUNK_BITS, chunk & _POSITION)


class _OpenFiles:
    """The files used last: descriptors for reading by offset, HDF5 files for the rest."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[Path, bool], Any] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """A descriptor of the file for os.pread."""
        key = (path, False)
        if key not in self._open:
            self._make_room()
            try:
                self._open[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as problem:
                raise DataError(f"{path}: cannot be opened: {problem.strerror}") from problem
        self._open.move_to_end(key)
        return int(self._open[key])

    def library(self, path: Path) -> Any:
        """The file, opened through HDF5."""
        key = (path, True)
        if key not in self._open:
            self._make_room()
            self._open[key] = hdf5.open_file(path)
        self._open.move_to_end(key)
        return self._open[key]

    def _make_room(self) -> None:
        while len(self._open) >= _OPEN_FILES:
            self._close(*self._open.popitem(last=False))

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._close(*self._open.popitem())

    @staticmethod
    def _close(key: tuple[Path, bool], handle: Any) -> None:
        if key[1]:
            handle.close()
        else:
            os.close(handle)
