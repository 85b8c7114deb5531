"""Arena: one block of memory in which every buffer of the plan has its place."""

from __future__ import annotations

from math import prod

import numpy as np

from mpiflow.plan.slice import itemsize

_ALIGNMENT = 64


class Arena:
    """`nbytes` zeroed bytes; `peak`, its high-water mark, is how far views reach into it."""

    def __init__(self, nbytes: int) -> None:
        memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        self._bytes = memory[first : first + nbytes]
        self.nbytes = nbytes
        self.peak = 0

    def scratch(self, offset: int, nbytes: int) -> np.ndarray:
        """Bytes `offset` to `offset + nbytes`, flat."""
        self.peak = max(self.peak, offset + nbytes)
        return self._bytes[offset : offset + nbytes]

    def view(self, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """An array over the arena's memory."""
        flat = self.scratch(offset, prod(shape) * itemsize(dtype))
        return flat.view(dtype).reshape(shape)
