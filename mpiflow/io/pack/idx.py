"""IDX files, the format of MNIST and of sets like it, plain or compressed by gzip.

Two zero bytes, one for the type, one for the number of dims; the dims as four bytes each, and the
values, all of them big-endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError
from mpiflow.io.pack.files import open_bytes, read_bytes
from mpiflow.io.pack.names import label_dtype
from mpiflow.io.pack.rows import PIECE_BYTES, Arrays

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PARTS = {"train": ("train",), "test": ("t10k", "test")}
_KINDS = {"image": "images?idx3-ubyte", "label": "labels?idx1-ubyte"}


def find_idx(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of a folder by set (train, test) and field (image, label), as MNIST names them."""
    sets: dict[str, dict[str, Path]] = {}
    for name, parts in _PARTS.items():
        found = {field: _find(folder, parts, kind) for field, kind in _KINDS.items()}
        if any(found.values()):
            missing = [_KINDS[field].replace("?", "-") for field, path in found.items() if not path]
            if missing:
                raise DataError(f"{folder}: no file {parts[0]}-{missing[0]}, plain or with .gz")
            sets[name] = {field: path for field, path in found.items() if path}
    if not sets:
        raise DataError(
            f"{folder}: no file is named as MNIST's are (train-images-idx3-ubyte, with or without "
            ".gz, ...); name the files: image=FILE label=FILE"
        )
    return sets


def _find(folder: Path, parts: tuple[str, ...], kind: str) -> Path | None:
    """The one file of this kind, unpacked rather than compressed."""
    found = [path for part in parts for path in sorted(folder.glob(f"*{part}-{kind}*"))]
    plain = {path.name.removesuffix(".gz"): path for path in reversed(found)}
    if len(plain) > 1:
        raise DataError(
            f"{folder}: there are {', '.join(sorted(plain))}; name the files: image=FILE label=FILE"
        )
    return next(iter(plain.values()), None)


def read_idx(files: Mapping[str, Path]) -> Iterator[Arrays]:
    """The rows of the files, one a field, in pieces.

    Images (h, w) get the dim of channels that convolutions take, (1, h, w), and labels the dtype
    that those of `ImageFolder` have.
    """
    with ExitStack() as stack:
        opened = {name: stack.enter_context(open_bytes(path)) for name, path in files.items()}
        heads = {name: _head(file, files[name]) for name, file in opened.items()}
        counts = {name: head.rows for name, head in heads.items()}
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{files[name]} has {rows}" for name, rows in counts.items())
            raise DataError(f"the fields have unequal numbers of rows: {text}")
        rows = next(iter(counts.values()))
        step = max(1, PIECE_BYTES // max(1, sum(head.row_bytes for head in heads.values())))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            yield {name: _rows(opened[name], heads[name], start, count) for name in files}
        for name, file in opened.items():
            if read_bytes(file, 1, files[name]):
                raise DataError(f"{files[name]}: goes on after the {rows} rows that it begins with")


@dataclass(frozen=True, slots=True)
class _Head:
    path: Path
    dtype: np.dtype
    rows: int
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in the file."""
        return prod(self.shape) * self.dtype.itemsize


def _head(file: IO[bytes], path: Path) -> _Head:
    begin = read_bytes(file, 4, path)
    if len(begin) < 4 or begin[:2] != b"\0\0" or begin[2] not in _TYPES or not begin[3]:
        raise DataError(f"{path}: no IDX file, it begins with the bytes {begin.hex(' ')}")
    sizes = read_bytes(file, 4 * begin[3], path)
    if len(sizes) < 4 * begin[3]:
        raise DataError(f"{path}: truncated among the {begin[3]} dims that it begins with")
    rows, *shape = np.frombuffer(sizes, ">u4").tolist()
    return _Head(path, np.dtype(_TYPES[begin[2]]), rows, tuple(shape))


def _rows(file: IO[bytes], head: _Head, start: int, count: int) -> NDArray[Any]:
    """The next `count` rows, of which `start` have been read."""
    content = read_bytes(file, count * head.row_bytes, head.path)
    if len(content) < count * head.row_bytes:
        rows = start + len(content) // max(1, head.row_bytes)
        raise DataError(f"{head.path}: truncated, it holds {rows} of the {head.rows} rows")
    array = np.frombuffer(content, head.dtype).reshape(count, *head.shape)
    if array.ndim == 3:
        return array[:, None]
    return array.astype(label_dtype(256)) if head.dtype == np.uint8 and array.ndim == 1 else array
