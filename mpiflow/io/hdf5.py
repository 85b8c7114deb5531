"""The one file that imports h5py: opening, creating and looking into HDF5 files.

h5py is imported on first use, so that planning needs none. Functions raise `error`, DataError
unless the caller names another.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiflow.errors import DataError, MpiflowError

if TYPE_CHECKING:
    import h5py


def library() -> Any:
    """The h5py module."""
    try:
        import h5py
    except ImportError as problem:
        raise DataError(
            f"reading and writing HDF5 needs h5py, which cannot be imported: {problem}\n"
            "  install it with `python -m pip install h5py`"
        ) from problem
    return h5py


def open_file(path: Path, error: type[MpiflowError] = DataError) -> h5py.File:
    """The file, opened to be read only. Raises `error` with the reason where that cannot be."""
    h5py = library()
    reason = _not_hdf5(path)
    if reason:
        raise error(f"{path}: {reason}")
    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as problem:
        if _is_locked(problem):
            raise error(
                f"{path}: another process has it open for writing (errno {problem.errno}); "
                "wait until that has closed it"
            ) from problem
        if "lock" not in str(problem):
            raise error(f"{path}: {_unreadable(path, problem)}") from problem
    try:
        # NFS and Lustre without flock answer ENOLCK or ENOTSUPP, which best-effort does not accept.
        return h5py.File(path, "r", locking=False)
    except OSError as problem:
        raise error(f"{path}: {_unreadable(path, problem)}") from problem


def _not_hdf5(path: Path) -> str:
    """Why `path` cannot be an HDF5 file, or an empty string; plain words before the library's."""
    if not path.exists():
        return "no such file"
    if not path.is_file():
        return "not a regular file"
    if not os.access(path, os.R_OK):
        return "permission to read it is denied"
    if path.stat().st_size == 0:
        return "empty (0 bytes); its writer did not finish"
    if not library().is_hdf5(path):
        return "not an HDF5 file, or its first bytes are damaged"
    return ""


def _is_locked(problem: OSError) -> bool:
    return problem.errno in (errno.EAGAIN, errno.EACCES) and "lock" in str(problem)


def _unreadable(path: Path, problem: OSError) -> str:
    text = str(problem)
    if "truncated" in text:
        return f"truncated: {path.stat().st_size} bytes are there, HDF5 expects more ({text})"
    return f"cannot be opened as HDF5: {text}"


@contextmanager
def create_file(path: Path) -> Iterator[h5py.File]:
    """A new file that appears under `path` only once it is complete and on the disk.

    It is written beside it, as `.NAME.part`; after an exception nothing is left.
    """
    part = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # No older reader needs these files; the latest format indexes chunks faster.
        with library().File(part, "w", libver=("v110", "latest")) as file:
            yield file
        sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def array_datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    """All datasets of a file by path without the leading slash, in order of name."""
    found: dict[str, h5py.Dataset] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, library().Dataset):
            found[name] = item

    file.visititems(visit)
    return dict(sorted(found.items()))
