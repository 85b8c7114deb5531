"""Files in the safetensors format, read by slices and written one tensor at a time.

    8 bytes    the length n of the header, little-endian
    n bytes    JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest   the values, row by row, little-endian; offsets count from here

The format is https://huggingface.co/docs/safetensors. Its own library writes a file from a whole
model in memory, and gives no bfloat16 to NumPy; so we have a reader and a writer of ours. What a
header says is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box
from mpiflow.io.checkpoint.fields import are_sizes, short
from mpiflow.io.weights.tensors import Bytes, TensorInfo, Tensors, read_box, widened
from mpiflow.plan.slice import itemsize

INDEX = ".index.json"
_CODES = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64",
}  # fmt: skip
_NAMES = {dtype: code for code, dtype in _CODES.items()}
_LONGEST_HEADER = 100_000_000
_SAMPLE = 4096


class Safetensors(Tensors):
    """One file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = Bytes(path)
        try:
            self._header, places = _read_header(self._file)
        except CheckpointError:
            self._file.close()
            raise
        self._first = 8 + len(self._header)
        self._places = {info.name: start for info, start in places}
        self.tensors = {info.name: info for info, _ in places}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A new array: the part `box` of a tensor. bfloat16 comes as float32."""
        info = self.tensors[name]
        start = self._first + self._places[name]
        narrow = info.dtype == "bfloat16"
        dtype = np.dtype("<u2" if narrow else info.dtype).newbyteorder("<")
        array = read_box(
            lambda at, out: self._file.read_into(start + at, out), info.shape, dtype, box
        )
        return widened(array) if narrow else array

    def digest(self) -> str:
        """A hash of the header and of the first bytes of every tensor."""
        found = hashlib.sha256(self._header)
        for name, start in self._places.items():
            info = self.tensors[name]
            nbytes = prod(info.shape) * itemsize(info.dtype)
            found.update(self._file.read(self._first + start, min(nbytes, _SAMPLE)))
        return found.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _read_header(file: Bytes) -> tuple[bytes, list[tuple[TensorInfo, int]]]:
    """The header's bytes, and of each tensor where its values begin; in that order."""
    where = str(file.path)
    length = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else 0
    if not 2 <= length <= min(_LONGEST_HEADER, file.size - 8):
        raise CheckpointError(f"{where}: not a safetensors file ({file.size} bytes)")
    header = bytes(file.read(8, length))
    try:
        content = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{where}: its header is damaged: {problem}") from problem
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: its header is no mapping of tensors")
    rows = [(name, row) for name, row in content.items() if name != "__metadata__"]
    places = sorted((_place(name, row, where) for name, row in rows), key=lambda place: place[1])
    reached = 0
    for info, start, stop in places:
        if start != reached or stop - start != prod(info.shape) * itemsize(info.dtype):
            raise CheckpointError(
                f"{where}: {info.name!r}, {info}, lies at bytes {start} to {stop}; it must begin at"
                f" {reached}, where the one before it ends, and be as long as its shape"
            )
        reached = stop
    if 8 + length + reached != file.size:
        raise CheckpointError(
            f"{where}: has {file.size} bytes, its header tells of {8 + length + reached}"
        )
    return header, [(info, start) for info, start, _ in places]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name stands there twice")
    return content


def _place(name: str, row: Any, where: str) -> tuple[TensorInfo, int, int]:
    match row:
        case {"dtype": str(code), "shape": shape, "data_offsets": [int(start), int(stop)]} if (
            code in _CODES and are_sizes(shape) and are_sizes([start, stop])
        ):
            return TensorInfo(name, tuple(shape), _CODES[code]), start, stop
    raise CheckpointError(
        f"{where}: {short(name)} is {short(row)}; a tensor has a dtype of {', '.join(_CODES)}, a"
        " shape and data_offsets"
    )


class Sharded(Tensors):
    """Several files, and the index that says which tensor is in which: NAME.index.json."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        weights = _read_index(path)
        self._files: dict[str, Safetensors] = {}
        try:
            for name in dict.fromkeys(weights.values()):
                self._files[name] = Safetensors(path.parent / name)
            for tensor, name in weights.items():
                if tensor not in self._files[name].tensors:
                    raise CheckpointError(f"{path}: {tensor!r} is not in {name}")
                self.tensors[tensor] = self._files[name].tensors[tensor]
        except CheckpointError:
            self.close()
            raise
        self._of = weights

    def read(self, name: str, box: Box) -> np.ndarray:
        """A new array: the part `box` of a tensor. bfloat16 comes as float32."""
        return self._files[self._of[name]].read(name, box)

    def digest(self) -> str:
        """A hash of those of the files."""
        digests = (file.digest() for file in self._files.values())
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem}") from problem
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{path}: has no weight_map, which says in which file a tensor is")
    for name in weights.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path}: {short(name)} is no file beside it")
    return weights


def write(
    path: Path,
    infos: Iterable[TensorInfo],
    arrays: Iterator[np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write a file of these tensors; `arrays` gives their values in the same order, one at a time.

    The file appears under its name once it is complete; after an error there is none.
    """
    header = _header(infos, metadata)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for array in arrays:
                data = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
                file.write(data.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _header(infos: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    rows: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for info in infos:
        stop = start + prod(info.shape) * itemsize(info.dtype)
        rows[info.name] = {
            "dtype": _NAMES[info.dtype],
            "shape": info.shape,
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(rows, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # so that values are aligned
