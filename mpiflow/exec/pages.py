"""Pages: memory of this process that others can map, as files of Linux without a name (memfd).

A file takes the place of pages of an array, whose address stays; another process opens it by what
it was told of it, and proves by a token that it is that one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PAGE = mmap.PAGESIZE
NAME = "mpiflow-shared"
"""What Linux lists the files by."""
TOKEN_BYTES = 16
_MAP_FIXED = 0x10


@dataclass(frozen=True, slots=True)
class Segment:
    """Pages of this rank, and where they lie in the file."""

    start: int
    stop: int
    offset: int


class File:
    """A file without a name that has taken the place of pages of an array. OSError if it cannot."""

    def __init__(self, memory: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no files in memory (memfd)")
        first = memory.ctypes.data
        runs = _whole_pages([(first + start, first + stop) for start, stop in ranges])
        self.segments: list[Segment] = []
        nbytes = PAGE  # that of the token
        for start, stop in runs:
            self.segments.append(Segment(start, stop, nbytes))
            nbytes += stop - start
        token = secrets.token_hex(TOKEN_BYTES // 2)
        self._number = os.memfd_create(NAME)
        try:
            os.ftruncate(self._number, nbytes)
            os.pwrite(self._number, token.encode(), 0)
            for run in self.segments:
                _map(run.start, run.stop - run.start, _MAP_FIXED, self._number, run.offset)
        except OSError:
            self.close()
            raise
        self.inode = os.fstat(self._number).st_ino
        self.told = os.getpid(), self._number, nbytes, token
        """What others open it by."""

    def close(self) -> None:
        """Its pages stay; nobody can open it any more."""
        os.close(self._number)


def _whole_pages(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages that these bytes touch, those that meet as one."""
    runs: list[tuple[int, int]] = []
    for start, stop in sorted((a // PAGE * PAGE, -(-b // PAGE) * PAGE) for a, b in ranges if b > a):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(stop, runs[-1][1])
        else:
            runs.append((start, stop))
    return runs


def _map(address: int, nbytes: int, flags: int, file: int, offset: int) -> int:
    """The address at which pages of this process are those of a file; OSError if not.

    Python's mmap can take no address, and keeps a descriptor for each.
    """
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = call(address, nbytes, access, mmap.MAP_SHARED | flags, file, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return int(found)


def _unmap(address: int, nbytes: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def opened(pid: int, number: int, nbytes: int, token: str) -> np.ndarray:
    """The bytes of a neighbour's file. OSError or ValueError if they cannot be seen from here."""
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        address = _map(0, nbytes, 0, file, 0)
    finally:
        os.close(file)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, address, nbytes).atexit = False
    if bytes(memory[:TOKEN_BYTES]) != token.encode():
        raise ValueError(f"its process {pid} is another one here")
    return np.ctypeslib.as_array(memory)
