"""What files of named tensors have in common: their list, and reading a part of one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box, box_shape

ReadInto = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes of a tensor from the given one on."""

_RUN_BYTES = 16 << 10
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file; `dtype` in our words."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Tensors(ABC):
    """Named tensors at `path`. Holds files open; use it in a `with` statement."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def read(self, name: str, box: Box) -> np.ndarray:
        """A new array: the part `box` of a tensor. bfloat16 comes as float32."""

    @abstractmethod
    def digest(self) -> str:
        """A hash by which other content is told apart, found without reading all of it."""

    @abstractmethod
    def close(self) -> None:
        """Close every file."""


class Bytes:
    """A file whose bytes are read by offset."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be opened: {problem.strerror}") from problem
        self.size = os.fstat(self._handle).st_size

    def read(self, offset: int, count: int) -> bytearray:
        """`count` bytes from `offset` on."""
        data = bytearray(count)
        self.read_into(offset, memoryview(data))
        return data

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`, plain bytes, from byte `offset`."""
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._handle, [out[done:]], offset + done)
            except OSError as problem:
                raise CheckpointError(
                    f"{self.path}: cannot be read: {problem.strerror}"
                ) from problem
            if not count:
                raise CheckpointError(f"{self.path}: ends at byte {offset + done}, inside a tensor")
            done += count

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def read_box(read_into: ReadInto, shape: tuple[int, ...], dtype: Any, box: Box) -> np.ndarray:
    """The part `box` of an array of this shape that is stored row by row.

    Reads the runs of bytes that belong to it; where those are short, whole rows, some at a time.
    """
    out = np.empty(box_shape(box), dtype)
    if not out.size:
        return out
    split = max((d for d, n in enumerate(shape) if box[d] != (0, n)), default=0)
    size = out.dtype.itemsize
    strides = [prod(shape[d + 1 :]) * size for d in range(len(shape))]
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    if split == 0:
        read_into(first, _bytes(out))
    elif _bytes(out[(0,) * split]).nbytes >= _RUN_BYTES:
        for index in np.ndindex(out.shape[:split]):
            at = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
            read_into(at, _bytes(out[index]))
    else:
        _read_rows(read_into, shape, box, strides[0], out)
    return out


def _read_rows(
    read_into: ReadInto, shape: tuple[int, ...], box: Box, row_bytes: int, out: np.ndarray
) -> None:
    rows = max(1, _BLOCK_BYTES // row_bytes)
    inner = tuple(slice(*span) for span in box[1:])
    for start in range(*box[0], rows):
        stop = min(start + rows, box[0][1])
        block = np.empty((stop - start, *shape[1:]), out.dtype)
        read_into(start * row_bytes, _bytes(block))
        out[start - box[0][0] : stop - box[0][0]] = block[(slice(None), *inner)]


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def widened(raw: np.ndarray) -> np.ndarray:
    """Numbers in bfloat16, given as their 16 bits, in float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)
