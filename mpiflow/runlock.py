"""One run at a time in a folder: rank 0 holds a lock on a file there until the run ends.

The system gives the lock back when the process ends, whatever ended it, so none is ever left over.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import time
from pathlib import Path
from types import TracebackType

from mpiflow.errors import CheckpointError

LOCK = ".lock"

# A run that was just killed may need as long for its last process to be gone.
_PATIENCE_SECONDS = 10.0
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
# Some parallel file systems are mounted without locks; a run there is not guarded.
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class RunLock:
    """Holds the locks of folders until it is closed. Others wait a little, then are refused."""

    def __init__(self, patience: float = _PATIENCE_SECONDS) -> None:
        self._patience = patience
        self._held: list[int] = []

    def take(self, folder: Path) -> None:
        """Lock a folder that exists; CheckpointError where another run has it."""
        deadline = time.monotonic() + self._patience
        while not self._try(folder / LOCK):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{folder}: another run is at work here: {_holder(folder / LOCK)}\n"
                    "  wait until it has ended, end it, or name another folder with --out"
                )
            time.sleep(0.1)

    def _try(self, path: Path) -> bool:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._held.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in _WITHOUT_LOCKS:
                return True
            os.close(self._held.pop())
            if problem.errno in _HELD:
                return False
            raise
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        return True

    def close(self) -> None:
        """Give all locks back."""
        while self._held:
            os.close(self._held.pop())

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _holder(path: Path) -> str:
    return path.read_text(errors="replace").strip() or "a process that did not say its name"
