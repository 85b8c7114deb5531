"""Rows of the shards of a data set, read by offset past the HDF5 library where that is safe.

The library allows one call at a time in a process and decodes under that lock; `os.preadv` and
`zlib` release Python's, so that reading runs beside computing.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError
from mpiflow.io import hdf5
from mpiflow.io.hdf5 import ChunkTable, Stored
from mpiflow.plan.records import DataSet, Field

# Open at a time; the usual limit of a process is 1024, that of a careful site 64.
_OPEN_FILES = 24


class Shards:
    """The files of a data set in `folder`, each opened and indexed when it is first needed."""

    def __init__(self, dataset: DataSet, folder: Path) -> None:
        self._dataset, self._folder = dataset, folder
        self._index: dict[int, tuple[FieldFile, ...]] = {}
        self._open: OrderedDict[int, Any] = OrderedDict()

    def field(self, shard: int, field: int) -> FieldFile:
        """How a field lies in a shard, which must be as the record says."""
        if shard not in self._index:
            record = self._dataset.shards[shard]
            self._index[shard] = _index_file(
                self._folder / record.name, self._dataset.fields, record.rows
            )
        return self._index[shard][field]

    def read(self, shard: int, field: int, first: int, last: int, out: NDArray[Any]) -> None:
        """Fill `out` with rows [first, last) of a field of a shard."""
        file = self.field(shard, field)
        if file.table is None:
            library = self._handle(~shard, file.path)
            file.read_through_library(library[file.stored.name], first, last, out)
        else:
            file.read(self._handle(shard, file.path), first, last, out)

    def close(self) -> None:
        """Close all files."""
        while self._open:
            _close(self._open.popitem()[1])

    def _handle(self, key: int, path: Path) -> Any:
        """A descriptor of shard `key` for reading by offset; of ~`key` the file opened by HDF5."""
        if key not in self._open:
            while len(self._open) >= _OPEN_FILES:
                _close(self._open.popitem(last=False)[1])
            try:
                self._open[key] = (
                    os.open(path, os.O_RDONLY | os.O_CLOEXEC) if key >= 0 else hdf5.open_file(path)
                )
            except OSError as problem:
                raise DataError(f"{path}: cannot be opened: {problem.strerror}") from problem
        self._open.move_to_end(key)
        return self._open[key]


def _close(handle: Any) -> None:
    if isinstance(handle, int):
        os.close(handle)
    else:
        handle.close()


@dataclass(frozen=True, slots=True)
class FieldFile:
    """A field of a file: how it lies there and where each group of `chunk_rows` rows begins.

    `table` is None where rows are read through the library; a contiguous dataset is one chunk.
    `fill` stands for what was never written.
    """

    path: Path
    stored: Stored
    chunk_rows: int
    table: ChunkTable | None
    fill: Any

    @property
    def plain(self) -> bool:
        """Whether any rows can be read as fast as whole chunks."""
        return self.table is not None and not self.stored.filters

    def read(self, descriptor: int, first: int, last: int, out: NDArray[Any]) -> None:
        """Fill `out` with rows [first, last) of the open file; only where `table` is there."""
        assert self.table is not None
        size = self.chunk_rows
        for chunk in range(first // size, -(-last // size)):
            begin, end = max(first, chunk * size), min(last, (chunk + 1) * size)
            part, inside = out[begin - first : end - first], begin - chunk * size
            offset = int(self.table.offsets[chunk])
            if offset < 0:
                part[...] = self.fill
            elif self.plain:
                self._read(descriptor, offset + inside * (part.nbytes // len(part)), chunk, part)
                if not np.dtype(self.stored.dtype).isnative:
                    part.byteswap(inplace=True)
            else:
                part[...] = self._decode(descriptor, chunk)[inside : inside + len(part)]

    def read_through_library(self, dataset: Any, first: int, last: int, out: NDArray[Any]) -> None:
        """Fill `out` with rows [first, last) of the field, which is `dataset`."""
        try:
            out[...] = dataset[first:last]
        except OSError as problem:
            raise DataError(
                f"{self._where(first // self.chunk_rows)}: HDF5 cannot read it: {problem}"
            ) from problem

    def _read(self, descriptor: int, offset: int, chunk: int, out: NDArray[Any]) -> None:
        """Fill `out` from `offset` on; DataError where the file ends before."""
        memory, have = out.reshape(-1).view(np.uint8).data, 0
        while have < len(memory):
            count = os.preadv(descriptor, [memory[have:]], offset + have)
            if not count:
                raise DataError(
                    f"{self._where(chunk)}: {have} of {len(memory)} bytes could be read at byte "
                    f"{offset}; the file was cut, write it again"
                )
            have += count

    def _decode(self, descriptor: int, chunk: int) -> NDArray[Any]:
        """All rows of a chunk, as they were before its filters."""
        assert self.table is not None
        stored = np.empty(int(self.table.sizes[chunk]), np.uint8)
        self._read(descriptor, int(self.table.offsets[chunk]), chunk, stored)
        # Bit i of the mask says that filter i did not pay and was skipped.
        mask = int(self.table.masks[chunk])
        filters = [name for i, name in enumerate(self.stored.filters) if not mask >> i & 1]
        raw: Any = stored
        itemsize = np.dtype(self.stored.dtype).itemsize
        size = self.chunk_rows * prod(self.stored.shape) * itemsize
        if "gzip" in filters:
            try:
                raw = zlib.decompress(stored.data, bufsize=size)
            except zlib.error as problem:
                raise DataError(
                    f"{self._where(chunk)}: {len(stored)} bytes cannot be decompressed ({problem});"
                    " the file is damaged, write it again"
                ) from problem
        if len(raw) != size:
            raise DataError(
                f"{self._where(chunk)}: {len(raw)} bytes after its filters, {size} expected; "
                "the file is damaged, write it again"
            )
        raw = np.frombuffer(raw, np.uint8)
        if "shuffle" in filters:
            raw = _unshuffle(raw, itemsize)
        return raw.view(self.stored.dtype).reshape(self.chunk_rows, *self.stored.shape)

    def _where(self, chunk: int) -> str:
        first = chunk * self.chunk_rows
        last = min(first + self.chunk_rows, self.stored.rows) - 1
        return f"{self.path}: field {self.stored.name!r}, chunk {chunk} (rows {first} to {last})"


def _unshuffle(raw: NDArray[np.uint8], itemsize: int) -> NDArray[np.uint8]:
    """Bytes that were grouped by their place in the element, back in elements."""
    elements = np.empty((raw.size // itemsize, itemsize), np.uint8)
    # Several times as fast as one transposed copy.
    for place, column in enumerate(raw.reshape(itemsize, -1)):
        elements[:, place] = column
    return elements.reshape(-1)


def _index_file(path: Path, fields: tuple[Field, ...], rows: int) -> tuple[FieldFile, ...]:
    """Where each field of a file lies; DataError where the plan says otherwise."""
    with hdf5.open_file(path) as file:
        return tuple(_index(path, field, rows, file) for field in fields)


def _index(path: Path, field: Field, rows: int, file: Any) -> FieldFile:
    if field.name not in file or not hdf5.numeric(file[field.name]):
        raise DataError(f"{path}: field {field.name!r}, which the plan reads, is missing")
    dataset = file[field.name]
    stored = hdf5.stored(field.name, dataset)
    found = (stored.shape, np.dtype(stored.dtype).name)
    if found != (field.shape, field.dtype):
        raise DataError(
            f"{path}: field {field.name!r} has row shape and dtype {found}; "
            f"the plan says {(field.shape, field.dtype)}"
        )
    if stored.rows != rows:
        raise DataError(
            f"{path}: field {field.name!r} has {stored.rows} rows; the plan says {rows}"
        )
    table = hdf5.chunk_table(dataset) if stored.by_offset else None
    size = stored.chunk[0] if stored.chunk else max(1, rows)
    return FieldFile(path, stored, size, table, dataset.fillvalue)
