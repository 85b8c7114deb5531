"""Rows that can be taken in any order: shuffled, divided into sets, kept on the disk."""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError, UsageError

Arrays = dict[str, NDArray[Any]]
Selection = slice | NDArray[np.int64]

# Rows are handed on in pieces of about this size: it bounds the memory, and progress shows.
PIECE_BYTES = 32 << 20


class Rows(ABC):
    """Rows, each field an array of equal length, of which any can be taken."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, which: Selection) -> Arrays:
        """The rows of a slice with step 1, or of the given numbers, in that order."""


@dataclass(frozen=True, slots=True)
class ArrayRows(Rows):
    """The rows of arrays, in memory or mapped from files."""

    arrays: Arrays

    def __len__(self) -> int:
        return length(self.arrays)

    def take(self, which: Selection) -> Arrays:
        """The rows of a slice, or of the given numbers."""
        return {name: array[which] for name, array in self.arrays.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows in an order of their own; all of them as they are where `order` is None."""

    rows: Rows
    order: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.rows) if self.order is None else len(self.order)

    def pieces(self) -> Iterator[Arrays]:
        """The rows in pieces of bounded size; nothing for no rows."""
        count = len(self)
        if not count:
            return
        step = max(1, PIECE_BYTES // max(1, row_bytes(self.rows.take(slice(0, 1)))))
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield self.rows.take(
                slice(start, stop) if self.order is None else self.order[start:stop]
            )


def length(arrays: Mapping[str, Any]) -> int:
    """The rows of arrays that have equally many."""
    return len(next(iter(arrays.values())))


def row_bytes(arrays: Arrays) -> int:
    """The bytes of one row over all fields."""
    return sum(array.dtype.itemsize * prod(array.shape[1:]) for array in arrays.values())


def shuffled(rows: Rows, seed: int) -> Part:
    """The rows in an order that follows from their number and the seed."""
    # RandomState, whose numbers NumPy keeps the same in every version.
    return Part(rows, np.random.RandomState(seed).permutation(len(rows)))


def divided(rows: Rows, test: float, *, shuffle: bool, seed: int) -> dict[str, Part]:
    """The sets `train` and `test`, the latter of `test` rows at random, or of that share of them.

    Which rows those are does not depend on `shuffle`; without it both sets keep their order.
    """
    count = test_rows(len(rows), test)
    order = np.random.RandomState(seed).permutation(len(rows))
    sets = {"train": order[count:], "test": order[:count]}
    return {name: Part(rows, o if shuffle else np.sort(o)) for name, o in sets.items()}


def test_rows(rows: int, test: float) -> int:
    """How many rows are to test; UsageError where that leaves none to train."""
    count = max(1, round(rows * test)) if test < 1 else int(test)
    if test <= 0 or (test > 1 and test != count):
        raise UsageError(f"the rows to test are a share below 1 or a number of rows, not {test}")
    if count >= rows:
        raise UsageError(f"{count} of {rows} rows to test leave none to train")
    return count


def spooled(pieces: Iterable[Arrays], folder: Path) -> ArrayRows:
    """The rows of a stream, on the disk in `folder` in files without a name, which end with us."""
    stream = iter(pieces)
    first = next(stream, None)
    if first is None:
        raise DataError("the source gives no rows")
    folder.mkdir(parents=True, exist_ok=True)
    rows = 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            for name in first
        }
        for piece in chain([first], stream):
            for name, array in piece.items():
                _append(files[name], array, folder)
            rows += length(piece)
        # What is mapped stays there when the files are closed.
        return ArrayRows(
            {
                name: np.memmap(files[name], array.dtype, "r", shape=(rows, *array.shape[1:]))
                for name, array in first.items()
            }
        )


def _append(file: IO[bytes], array: NDArray[Any], folder: Path) -> None:
    view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as problem:
        raise DataError(no_room(folder, problem)) from problem


def no_room(path: Path, problem: OSError) -> str:
    """Why nothing more can be written at `path`."""
    folder = path if path.is_dir() else path.parent
    free = shutil.disk_usage(folder).free / 2**20
    return f"{path}: cannot be written: {problem} ({free:.0f} MiB are free there)"
