"""The file of predictions: HDF5 with a dataset for each output, whose rows many ranks write.

    rank 0     create ── barrier ─┐                  ┌─ barrier ── publish ── clear
    each rank                     └─ write* ─ close ─┘

Datasets lie in one piece, so that a rank writes its rows by their offset in the file, without HDF5
and beside the others. Until `publish` the file is named `.NAME.part`, and beside it is a folder
`.NAME.ranks` for what ranks tell one another.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpiflow.errors import DataError
from mpiflow.io import hdf5
from mpiflow.plan.slice import itemsize


@dataclass(frozen=True, slots=True)
class Rows:
    """A dataset of the file: its name, shape and dtype, and the byte where it begins."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * itemsize(self.dtype)


def part_of(path: Path) -> Path:
    """The file's name while it is written."""
    return path.with_name(f".{path.name}.part")


def folder_of(path: Path) -> Path:
    """The folder that there is while the file is written; after a failure it says why."""
    return path.with_name(f".{path.name}.ranks")


def create(path: Path, datasets: Sequence[Rows], attributes: Mapping[str, Any]) -> list[int]:
    """Make the file with room for all rows; gives where each dataset begins. Rank 0 only."""
    h5py = hdf5.load()
    part = part_of(path)
    try:
        shutil.rmtree(folder_of(path), ignore_errors=True)  # that of a run that failed
        folder_of(path).mkdir(parents=True, exist_ok=True)
        with h5py.File(part, "w", libver=("v110", "v110")) as file:
            file.attrs.update(attributes)
            return [_reserve(h5py, file, rows) for rows in datasets]
    except OSError as problem:
        shutil.rmtree(folder_of(path), ignore_errors=True)
        raise DataError(f"{path}: cannot be written: {problem.strerror or problem}") from problem


def _reserve(h5py: Any, file: Any, rows: Rows) -> int:
    """The byte where a new dataset begins, whose values are written later, past the library."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(np.dtype(rows.dtype).newbyteorder("<"), logical=True)
    space = h5py.h5s.create_simple(rows.shape)
    return int(
        h5py.h5d.create(file.id, rows.name.encode(), kind, space, dcpl=settings).get_offset()
    )


class RowsFile:
    """One rank's hold on the file. Used on the write stream's thread."""

    def __init__(self, path: Path, datasets: Sequence[Rows], who: str) -> None:
        self._path, self._who = path, who
        self._datasets = {rows.name: rows for rows in datasets}
        with self._failing():
            self._handle = os.open(part_of(path), os.O_WRONLY | os.O_CLOEXEC)

    def batch(self, first: int) -> BatchWriter:
        """The writer of a batch that begins at row `first`."""
        return BatchWriter(self, first)

    def write(self, output: str, row: int, array: np.ndarray) -> None:
        """Store whole rows of an output, the first of which is row `row` of the data set."""
        dataset = self._datasets[output]
        data = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if row + len(data) > dataset.shape[0] or data.shape[1:] != dataset.shape[1:]:
            raise DataError(
                f"{self._who}{self._path}: {output} has shape {dataset.shape}; rows {row} to"
                f" {row + len(data)} of shape {data.shape[1:]} do not lie in it"
            )
        view, done = data.reshape(-1).view(np.uint8).data, 0
        start = dataset.offset + row * dataset.row_bytes
        with self._failing():
            while done < len(view):
                done += os.pwrite(self._handle, view[done:], start + done)

    def close(self) -> None:
        """Put everything on the disk."""
        with self._failing():
            os.fsync(self._handle)
            os.close(self._handle)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise DataError(
                f"{self._who}{self._path}: cannot be written: {problem.strerror}"
            ) from problem


class BatchWriter:
    """A `Writer` (plan.protocols) of the rows of one batch."""

    def __init__(self, file: RowsFile, first: int) -> None:
        self._file, self._first = file, first

    def write(self, variable: str, start: tuple[int, ...], array: Any) -> None:
        """Store rows of an output, which begin at row `start[0]` of the batch."""
        self._file.write(variable, self._first + start[0], array)

    def finish(self) -> None:
        """Nothing is held back; `RowsFile.close` puts all batches on the disk."""


def publish(path: Path) -> None:
    """Give the file its name, once every rank has closed it. Rank 0 only."""
    os.replace(part_of(path), path)
    hdf5.sync(path.parent)


def clear(path: Path) -> None:
    """Remove the folder, once no rank tells others anything any more. Rank 0 only."""
    shutil.rmtree(folder_of(path), ignore_errors=True)
