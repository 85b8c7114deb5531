"""NumPy's .npz files: a zip archive of .npy members, read by slices, written one at a time."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box
from mpiflow.io.weights.tensors import Bytes, TensorInfo, Tensors, read_box

_SUFFIX = ".npy"
_LOCAL_HEADER = 30


@dataclass(frozen=True, slots=True)
class _Member:
    info: zipfile.ZipInfo
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_columns: bool
    first: int
    """The byte of the member where the values begin."""


class Npz(Tensors):
    """One file. A tensor that is not compressed is read by offset; others are unpacked up to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as problem:
            raise CheckpointError(f"{path}: cannot be read as .npz: {problem}") from problem
        self._file = Bytes(path)
        self._members: dict[str, _Member] = {}
        try:
            for info in self._zip.infolist():
                self._add(info)
        except (ValueError, OSError, RuntimeError, zipfile.BadZipFile) as problem:
            self.close()
            raise CheckpointError(f"{path}: {info.filename}: {problem}") from problem

    def _add(self, info: zipfile.ZipInfo) -> None:
        with self._zip.open(info) as file:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, by_columns, dtype = read(file)
            first = file.tell()
        if dtype.kind not in "biuf":
            raise ValueError(f"holds {dtype}, not plain numbers")
        name = info.filename.removesuffix(_SUFFIX)
        self._members[name] = _Member(info, dtype, shape, by_columns, first)
        self.tensors[name] = TensorInfo(name, shape, dtype.name)

    def read(self, name: str, box: Box) -> np.ndarray:
        """A new array: the part `box` of a tensor."""
        member = self._members[name]
        if member.by_columns:
            return self._read(member, member.shape[::-1], box[::-1]).T
        return self._read(member, member.shape, box)

    def _read(self, member: _Member, shape: tuple[int, ...], box: Box) -> np.ndarray:
        if member.info.compress_type == zipfile.ZIP_STORED:
            start = self._start(member.info) + member.first
            return read_box(
                lambda at, out: self._file.read_into(start + at, out), shape, member.dtype, box
            )
        with self._zip.open(member.info) as file:

            def read_into(at: int, out: memoryview) -> None:
                file.seek(member.first + at)
                done = 0
                while done < len(out):
                    data = file.read(len(out) - done)
                    if not data:
                        raise CheckpointError(f"{self.path}: {member.info.filename} is cut short")
                    out[done : done + len(data)] = data
                    done += len(data)

            return read_box(read_into, shape, member.dtype, box)

    def _start(self, info: zipfile.ZipInfo) -> int:
        """The byte of the file where a member begins, behind its local header."""
        header = self._file.read(info.header_offset, _LOCAL_HEADER)
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        return info.header_offset + _LOCAL_HEADER + sum(lengths)

    def digest(self) -> str:
        """A hash of names, sizes and the checksums that the archive has of its members."""
        rows = [f"{i.filename} {i.file_size} {i.CRC}" for i in self._zip.infolist()]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._zip.close()
        self._file.close()


def write(path: Path, infos: Iterable[TensorInfo], arrays: Iterator[np.ndarray]) -> None:
    """Write a file of these tensors; `arrays` gives their values in the same order, one at a time.

    The file appears under its name once it is complete; after an error there is none.
    """
    narrow = [info.name for info in infos if info.dtype == "bfloat16"]
    if narrow:
        raise CheckpointError(
            f"{path}: {narrow[0]!r} is bfloat16, which .npz cannot hold; write .safetensors"
        )
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for info, array in zip(infos, arrays, strict=True):
                    with archive.open(info.name + _SUFFIX, "w", force_zip64=True) as member:
                        npy.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
