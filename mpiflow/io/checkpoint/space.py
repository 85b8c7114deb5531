"""Room on the file system, and files that appear only once they are complete."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path

from mpiflow.errors import CheckpointError
from mpiflow.io import hdf5
from mpiflow.io.checkpoint.records import SavedVariable
from mpiflow.plan.records import Register
from mpiflow.plan.slice import itemsize

# What HDF5 and the manifest add to the bytes of a variable, measured and rounded up.
_SLICE_OVERHEAD = 1536
_SHARD_OVERHEAD = 8192


def required_bytes(variables: Iterable[Register | SavedVariable], ranks: int = 1) -> int:
    """The bytes that one checkpoint takes at most, when each variable is cut for `ranks`."""
    sizes = [prod(variable.shape) * itemsize(variable.dtype) for variable in variables]
    return sum(sizes) + ranks * (_SHARD_OVERHEAD + len(sizes) * _SLICE_OVERHEAD)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise unless `folder`, made here if need be, can be written and has `nbytes` free."""
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"mpiflow")
        free = shutil.disk_usage(folder).free
    except OSError as problem:
        raise CheckpointError(
            f"{folder}: checkpoints cannot be written here: {_reason(problem)}"
        ) from problem
    if free < nbytes:
        raise CheckpointError(
            f"{folder}: a checkpoint needs {nbytes} bytes, {free} are free in this file system\n"
            "  free some, or choose another folder with --out"
        )


def make_folder(path: Path, patience: float = 5.0) -> None:
    """Make a folder that other ranks may be making too.

    Parallel file systems may say that it exists before they show it, so look again for a while.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError):
            if path.is_file() or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


@contextmanager
def disk_errors(path: Path, needed: int, who: str = "") -> Iterator[None]:
    """Turn what the file system (or HDF5 on it) refuses into a CheckpointError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as problem:
        raise CheckpointError(
            f"{who}{path}: cannot be written: {_reason(problem)}; "
            f"{needed} bytes needed, {_free(path)} free in this file system\n"
            "  earlier checkpoints are untouched: free some space, then run again to resume"
        ) from problem


def _reason(problem: Exception) -> str:
    number = getattr(problem, "errno", None)
    return f"{os.strerror(number)} (errno {number})" if number else str(problem)


def _free(path: Path) -> str:
    with suppress(OSError):
        return str(shutil.disk_usage(path.parent).free)
    return "an unknown number"


def write_text(path: Path, text: str) -> None:
    """Write a file that appears under its name only once all of it is on the disk."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    hdf5.sync(path.parent)
