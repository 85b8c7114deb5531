"""A new HDF5 file of arrays whose writing can fail, on a full disk say, and leaves nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mpiflow.io import hdf5
from mpiflow.io.disk import Disk


class ArrayFile:
    """A new file of unchunked arrays that can be given up at any moment, on a full disk too.

    HDF5 writes through a `Disk`, which keeps a failure for us and tells HDF5 of none. Until
    `finish` the file is named `.NAME.part`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(f".{path.name}.part")
        self._disk = Disk(os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666))
        self._file = hdf5.load().File(self._disk, "w", libver=("v110", "latest"))

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
