"""A new HDF5 file of arrays whose writing can fail, on a full disk say, and leaves nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mpiflow.io import hdf5


class Disk:
    """A file below HDF5, as h5py asks for it, that lets a failed write be reported by us alone.

    The first failure is kept, later writes are dropped.
    """

    def __init__(self, handle: int) -> None:
        self.handle, self._at = handle, 0
        self._problem: OSError | None = None
        self._dropped = self._closed = False

    def check(self) -> None:
        """Raise the failure that was kept."""
        if self._problem:
            raise self._problem

    def drop(self) -> None:
        """Write nothing from now on."""
        self._dropped = True

    def close(self) -> None:
        """Release the file."""
        if not self._closed:
            self._closed = True
            os.close(self.handle)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte, counted from the start or the end of the file."""
        end = os.fstat(self.handle).st_size if whence == os.SEEK_END else 0
        self._at = end + offset
        return self._at

    def tell(self) -> int:
        """The byte where the next access begins."""
        return self._at

    def read(self, count: int) -> bytes:
        """At most `count` bytes."""
        return os.pread(self.handle, count, self._at)

    def readinto(self, out: memoryview) -> int:
        """Fill the beginning of `out`; gives how many bytes."""
        data = self.read(len(out))
        out[: len(data)] = data
        return len(data)

    def write(self, data: memoryview) -> int:
        """Write all of `data`."""
        at = 0
        try:
            while at < len(data) and self._works():
                at += os.pwrite(self.handle, data[at:], self._at + at)
        except OSError as problem:
            self._problem = problem
        return len(data)

    def truncate(self, size: int) -> int:
        """Give the file its length."""
        try:
            if self._works():
                os.ftruncate(self.handle, size)
        except OSError as problem:
            self._problem = problem
        return size

    def flush(self) -> None:
        """Nothing is held back here."""

    def _works(self) -> bool:
        return not self._dropped and self._problem is None


class ArrayFile:
    """A new file of unchunked arrays that can be given up at any moment, on a full disk too.

    HDF5 cannot close a file after a failed write: it keeps the file's space and complains until
    the process ends. So it writes through a `Disk`, which keeps a failure for us and tells HDF5
    of none. Until `finish` the file is named `.NAME.part`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(f".{path.name}.part")
        self._disk = Disk(os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666))
        self._file = hdf5.library().File(self._disk, "w", libver=("v110", "latest"))

    def store(self, name: str, array: np.ndarray, attributes: dict[str, Any]) -> int:
        """Write a dataset; gives the byte of the file where its values begin."""
        dataset = self._file.create_dataset(name, data=array)
        for key, value in attributes.items():
            dataset.attrs.create(key, value)
        self._disk.check()
        return int(dataset.id.get_offset())

    def finish(self) -> None:
        """Close the file, with all of it on the disk and under its name."""
        self._file.close()
        self._disk.check()
        os.fsync(self._disk.handle)
        self._disk.close()
        os.replace(self._part, self._path)
        hdf5.sync(self._path.parent)

    def discard(self) -> None:
        """Close the file and leave nothing of it."""
        self._disk.drop()
        with suppress(OSError, RuntimeError):
            # It may miss what was dropped; nobody will read the file.
            self._file.close()
        self._disk.close()
        self._part.unlink(missing_ok=True)
