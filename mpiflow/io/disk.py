"""What HDF5 writes new files through, so that a full disk is an error and not a crash.

HDF5 cannot close a file after a failed write: it keeps the file's space and complains until the
process ends, or ends it.
"""

from __future__ import annotations

import os


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
