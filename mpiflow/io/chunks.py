"""Whole chunks of one field of one file, read by offset past the HDF5 library where that is safe.

The library allows one call at a time in a process and decodes under that lock; `os.pread` and
`zlib` release Python's, so that reading runs beside computing.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError
from mpiflow.io import hdf5
from mpiflow.io.hdf5 import ChunkTable, Stored
from mpiflow.plan.records import Field


@dataclass(frozen=True, slots=True)
class FieldFile:
    """A field of a file: how it lies there and where each group of `chunk_rows` rows begins.

    `table` is None where rows are read through the library. `fill` stands for what was never
    written. A contiguous dataset has one entry in its table.
    """

    path: Path
    stored: Stored
    chunk_rows: int
    table: ChunkTable | None
    fill: Any

    @property
    def native(self) -> np.dtype:
        """The dtype of rows in memory."""
        return np.dtype(self.stored.dtype).newbyteorder("=")

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """First and last+1 row of a chunk."""
        start = chunk * self.chunk_rows
        return start, min(start + self.chunk_rows, self.stored.rows)

    def decode(self, descriptor: int, chunk: int) -> NDArray[Any]:
        """The rows of a chunk, read from the open file; only where `table` is there."""
        start, stop = self.chunk_span(chunk)
        shape = (stop - start, *self.stored.shape)
        assert self.table is not None
        if self.stored.layout == "contiguous":
            row = prod(self.stored.shape) * self.native.itemsize
            raw = self._read(descriptor, int(self.table.offsets[0]) + start * row,
                             (stop - start) * row, chunk)  # fmt: skip
            return self._array(raw).reshape(shape)
        if self.table.offsets[chunk] < 0:
            return np.full(shape, self.fill, self.native)
        raw = self._read(
            descriptor, int(self.table.offsets[chunk]), int(self.table.sizes[chunk]), chunk
        )
        raw = self._unfilter(raw, int(self.table.masks[chunk]), chunk)
        rows = self._array(raw).reshape(self.chunk_rows, *self.stored.shape)
        # A chunk at the end is stored in full; a view of its rows would keep all of it alive.
        return rows if stop - start == self.chunk_rows else rows[: stop - start].copy()

    def _read(self, descriptor: int, offset: int, size: int, chunk: int) -> bytes:
        """`size` bytes at `offset`; DataError where the file ends before."""
        pieces: list[bytes] = []
        have = 0
        while have < size:
            piece = os.pread(descriptor, size - have, offset + have)
            if not piece:
                raise DataError(
                    f"{self._where(chunk)}: {have} of {size} bytes could be read at byte {offset}; "
                    "the file was cut, write it again"
                )
            pieces.append(piece)
            have += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _unfilter(self, raw: bytes, mask: int, chunk: int) -> bytes:
        """The chunk as it was before its filters; bit i of `mask`: filter i was skipped."""
        size = self.chunk_rows * prod(self.stored.shape) * self.native.itemsize
        for index in reversed(range(len(self.stored.filters))):
            if mask >> index & 1:
                continue
            if self.stored.filters[index] == "shuffle":
                raw = _unshuffle(raw, self.native.itemsize)
                continue
            try:
                raw = zlib.decompress(raw, bufsize=size)
            except zlib.error as problem:
                raise DataError(
                    f"{self._where(chunk)}: {len(raw)} bytes cannot be decompressed ({problem}); "
                    "the file is damaged, write it again"
                ) from problem
        if len(raw) != size:
            raise DataError(
                f"{self._where(chunk)}: {len(raw)} bytes after its filters, {size} expected; "
                "the file is damaged, write it again"
            )
        return raw

    def _array(self, raw: bytes) -> NDArray[Any]:
        """The elements in `raw`, in native byte order."""
        return np.frombuffer(raw, self.stored.dtype).astype(self.native, copy=False)

    def _where(self, chunk: int) -> str:
        start, stop = self.chunk_span(chunk)
        return (
            f"{self.path}: field {self.stored.name!r}, chunk {chunk} (rows {start} to {stop - 1})"
        )

    def from_library(self, dataset: Any, chunk: int) -> NDArray[Any]:
        """The rows of a chunk, read through HDF5."""
        start, stop = self.chunk_span(chunk)
        try:
            return np.asarray(dataset[start:stop]).astype(self.native, copy=False)
        except OSError as problem:
            raise DataError(f"{self._where(chunk)}: HDF5 cannot read it: {problem}") from problem


def _unshuffle(raw: bytes, itemsize: int) -> bytes:
    """Bytes that were grouped by their place in the element, back in elements."""
    return np.frombuffer(raw, np.uint8).reshape(itemsize, -1).T.tobytes()


def index_file(path: Path, fields: tuple[Field, ...], chunk_rows: int) -> tuple[FieldFile, ...]:
    """Where the chunks of each field of a file lie; `chunk_rows` for those without chunks."""
    with hdf5.open_file(path) as file:
        return tuple(_index(path, field, file, chunk_rows) for field in fields)


def _index(path: Path, field: Field, file: Any, chunk_rows: int) -> FieldFile:
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
    table = None
    if stored.by_offset:
        table = hdf5.chunk_table(dataset)
    return FieldFile(
        path, stored, stored.chunk[0] if stored.chunk else chunk_rows, table, dataset.fillvalue
    )
