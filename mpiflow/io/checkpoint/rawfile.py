"""The files of a checkpoint as bytes: read by offset, without HDF5, and hashed."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.io.checkpoint.records import ShardFile

_OPEN_FILES = 16
_BLOCK = 1 << 20


def byte_view(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array as plain bytes."""
    return array.reshape(-1).view(np.uint8).data


class ShardFiles:
    """Shard files of one folder, opened on first use; at most 16 at a time.

    A file that is not as long as the manifest says, or no plain file of this folder, is refused.
    """

    def __init__(self, folder: Path, files: Iterable[ShardFile]) -> None:
        self._folder = folder
        self._sizes = {file.name: file.nbytes for file in files}
        self._handles: OrderedDict[str, int] = OrderedDict()

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out`, plain bytes, from byte `offset` of a file."""
        path = self._folder / name
        handle, done = self._handle(name, path), 0
        while done < len(out):
            try:
                count = os.preadv(handle, [out[done:]], offset + done)
            except OSError as problem:
                raise CheckpointError(f"{path}: cannot be read: {problem.strerror}") from problem
            if count == 0:
                raise CheckpointError(f"{path}: ends at byte {offset + done}, inside of a slice")
            done += count

    def frame(self, name: str, spans: Iterable[tuple[int, int]]) -> str:
        """The hash of all bytes of a file outside of `spans`, pairs of first byte and count."""
        digest, reached = hashlib.sha256(), 0
        for start, count in [*sorted(spans), (self._sizes[name], 0)]:
            for at in range(reached, start, _BLOCK):
                gap = bytearray(min(_BLOCK, start - at))
                self.read_into(name, at, memoryview(gap))
                digest.update(gap)
            reached = start + count
        return digest.hexdigest()

    def _handle(self, name: str, path: Path) -> int:
        if name not in self._handles:
            if len(self._handles) == _OPEN_FILES:
                os.close(self._handles.popitem(last=False)[1])
            self._handles[name] = self._open(path)
        self._handles.move_to_end(name)
        return self._handles[name]

    def _open(self, path: Path) -> int:
        expected = self._sizes[path.name]
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be opened: {problem.strerror}") from problem
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_size == expected:
            return handle
        os.close(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        raise CheckpointError(f"{path}: has {status.st_size} bytes, {expected} expected")
