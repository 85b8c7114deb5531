"""The one file that imports h5py: opening, creating and looking into HDF5 files.

h5py is imported on first use, so that planning needs none. Functions raise `error`, DataError
unless the caller names another.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError, MpiflowError
from mpiflow.io.disk import Disk

if TYPE_CHECKING:
    import h5py


def load() -> Any:
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
    h5py = load()
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
    if not load().is_hdf5(path):
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
def new_file(path: Path, cache: int = 1 << 20) -> Iterator[tuple[h5py.File, Disk]]:
    """A new file, on the disk when the block ends and gone when it fails.

    A failed write is raised by `check()` of the `Disk` that comes with it, and when the block
    ends. `cache` is the bytes of chunks, of each dataset, that wait for more of their rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    disk = Disk(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666))
    # Not the latest format: sites still run HDF5 1.10, and 1.10's checks what it reads.
    file = load().File(disk, "w", libver=("v110", "v110"), rdcc_nbytes=cache)
    try:
        yield file, disk
        file.close()
        disk.check()
        os.fsync(disk.handle)
    except BaseException:
        disk.drop()
        with suppress(OSError, RuntimeError):
            # It may miss what was dropped; nobody will read the file.
            file.close()
        path.unlink(missing_ok=True)
        raise
    finally:
        disk.close()


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
        if isinstance(item, load().Dataset):
            found[name] = item

    file.visititems(visit)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Stored:
    """How one dataset lies in its file. `shape` is that of a row; `dtype` keeps the byte order.

    `layout` is contiguous, chunked, compact, virtual or external. `by_offset` says that whole
    chunks (or any rows of a contiguous dataset) can be read without the HDF5 library.
    `nbytes` is what is stored; zero where nothing was ever written.
    """

    name: str
    rows: int
    shape: tuple[int, ...]
    dtype: str
    layout: str
    chunk: tuple[int, ...]
    filters: tuple[str, ...]
    by_offset: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Where the chunks of a dataset lie: byte offset (-1: never written), size, skipped filters."""

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    masks: NDArray[np.uint32]


_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset",
            32000: "lzf"}  # fmt: skip
# Those that we undo ourselves, in the order in which they were applied.
_OUR_FILTERS = {(), ("gzip",), ("shuffle",), ("shuffle", "gzip")}


def numeric(dataset: h5py.Dataset) -> bool:
    """Whether a dataset holds rows of plain numbers or truth values."""
    try:
        dtype = dataset.dtype
    except TypeError:
        return False
    return dataset.ndim > 0 and dtype.kind in "biuf" and dtype.itemsize <= 8


def stored(name: str, dataset: h5py.Dataset) -> Stored:
    """How a numeric dataset lies in its file."""
    h5py = load()
    layout = _layout(dataset)
    chunk = dataset.chunks or ()
    filters = _filters(dataset)
    plain = dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True))
    by_offset = plain and dataset.file.userblock_size == 0
    if layout == "chunked":
        by_offset = by_offset and filters in _OUR_FILTERS and chunk[1:] == dataset.shape[1:]
    else:
        by_offset = by_offset and layout == "contiguous" and dataset.id.get_offset() is not None
    return Stored(
        name, int(dataset.shape[0]), tuple(map(int, dataset.shape[1:])), dataset.dtype.str, layout,
        tuple(map(int, chunk)), filters, by_offset, int(dataset.id.get_storage_size()),
    )  # fmt: skip


def _layout(dataset: h5py.Dataset) -> str:
    h5d = load().h5d
    properties = dataset.id.get_create_plist()
    if properties.get_external_count():
        return "external"
    return {h5d.CONTIGUOUS: "contiguous", h5d.CHUNKED: "chunked", h5d.COMPACT: "compact"}.get(
        properties.get_layout(), "virtual"
    )


def _filters(dataset: h5py.Dataset) -> tuple[str, ...]:
    """The filters of a dataset in the order in which they were applied."""
    properties = dataset.id.get_create_plist()
    codes = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    return tuple(_FILTERS.get(code, f"filter {code}") for code in codes)


def chunk_table(dataset: h5py.Dataset) -> ChunkTable:
    """Where each chunk of a dataset lies, whose chunks hold whole rows; one where contiguous."""
    if dataset.chunks is None:
        return ChunkTable(
            np.array([dataset.id.get_offset()], np.int64),
            np.array([dataset.id.get_storage_size()], np.int64),
            np.zeros(1, np.uint32),
        )
    rows = dataset.chunks[0]
    count = -(-dataset.shape[0] // rows)
    table = ChunkTable(
        np.full(count, -1, np.int64), np.zeros(count, np.int64), np.zeros(count, np.uint32)
    )

    def note(info: Any) -> None:
        index = info.chunk_offset[0] // rows
        table.offsets[index], table.sizes[index] = info.byte_offset, info.size
        table.masks[index] = info.filter_mask

    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(note)
    else:  # h5py built with an HDF5 older than 1.12.3
        for index in range(dataset.id.get_num_chunks()):
            note(dataset.id.get_chunk_info(index))
    return table


def stored_sample(dataset: h5py.Dataset, kind: Stored, nbytes: int) -> bytes:
    """Some of the content: up to `nbytes` as stored, of the first, middle and last chunk or row.

    Rows are read through the library where they do not lie by offset.
    """
    if not kind.rows:
        return b""
    places = sorted({0, kind.rows // 2, kind.rows - 1})
    if kind.layout != "chunked" or not kind.by_offset:
        return b"".join(dataset[row].tobytes()[:nbytes] for row in places)
    pieces = []
    with open(dataset.file.filename, "rb") as file:
        for row in places:
            start = row // kind.chunk[0] * kind.chunk[0]
            info = dataset.id.get_chunk_info_by_coord((start, *[0] * len(kind.shape)))
            if info.byte_offset is not None:
                file.seek(info.byte_offset)
                pieces.append(file.read(min(info.size, nbytes)))
    return b"".join(pieces)
