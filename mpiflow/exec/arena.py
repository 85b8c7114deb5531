"""Arena: one block of memory in which every buffer of the plan has its place."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mpiflow.exec.device import Device
from mpiflow.exec.transport import Transport
from mpiflow.plan.slice import itemsize


class Arena:
    """`nbytes` bytes of a space; `peak`, its high-water mark, is how far views reach into it."""

    def __init__(self, device: Device, nbytes: int, space: str = "") -> None:
        self._bytes = device.allocate(nbytes, space)
        self.device, self.nbytes = device, nbytes
        self.peak = 0

    def share(self, transport: Transport, ranges: Sequence[tuple[int, int]]) -> None:
        """Collective. Let neighbours see these bytes of it, before anything is put there."""
        transport.share(self._bytes, ranges)

    def unshare(self, transport: Transport) -> None:
        """Let it go, once nothing works in it."""
        transport.unshare(self._bytes)

    def scratch(self, offset: int, nbytes: int) -> Any:
        """Bytes `offset` to `offset + nbytes`, flat."""
        self.peak = max(self.peak, offset + nbytes)
        return self._bytes[offset : offset + nbytes]

    def view(self, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
        """An array over the arena's memory."""
        flat = self.scratch(offset, prod(shape) * itemsize(dtype))
        return flat.view(self.device.dtype(dtype)).reshape(shape)
