"""The files of a data set: which there are, what each holds, and where they disagree."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import numpy as np

from mpiflow.errors import DataError
from mpiflow.io import hdf5
from mpiflow.io.hdf5 import Stored
from mpiflow.plan.records import Field

# Rows that lie in no chunks are read in pieces of about this size.
PIECE_BYTES = 1 << 20
# Above this, a long chunk of a narrow field no longer decides how many wide rows are held.
_MOST_BYTES = 16 << 20
_SAMPLE_BYTES = 4096

Declared = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One file: its fields in order of name, what else it holds, and a hash of all this."""

    name: str
    nbytes: int
    fields: tuple[Stored, ...]
    others: tuple[str, ...]
    digest: str

    @property
    def rows(self) -> int:
        """The rows of the file, whose fields are of one length."""
        return self.fields[0].rows

    @property
    def chunk_rows(self) -> int:
        """Rows that are shuffled and read together: the most that a chunk of any field has.

        Where that would be too much memory, those of the widest field; without chunks about 1 MiB.
        """
        chunked = [field for field in self.fields if field.chunk]
        if chunked:
            most = max(field.chunk[0] for field in chunked)
            if most * row_bytes(self.fields) <= _MOST_BYTES:
                return most
            return max(chunked, key=lambda field: prod(field.shape)).chunk[0]
        return max(1, min(self.rows, PIECE_BYTES // max(1, row_bytes(self.fields))))


def list_files(pattern: str, folder: Path) -> list[str]:
    """The files that `pattern` names in `folder`, s2 before s10; none hidden, no folders."""
    names = glob.glob(pattern, root_dir=folder, recursive=True)
    return sorted(
        (
            Path(name).as_posix()
            for name in names
            if not os.path.basename(name).startswith(".") and not (folder / name).is_dir()
        ),
        key=natural,
    )


def natural(name: str) -> tuple[tuple[str | int, ...], str]:
    """A sorting key that takes digits as numbers."""
    parts = re.split(r"(\d+)", name)
    return tuple(int(p) if i % 2 else p for i, p in enumerate(parts)), name


def examine(name: str, folder: Path, wanted: Declared | None = None) -> ShardInfo:
    """What a file holds: the fields `wanted`, or all. DataError where it is no shard."""
    path = folder / name
    with hdf5.open_file(path) as file:
        datasets = hdf5.array_datasets(file)
        fields, sample = [], hashlib.sha256()
        for field, dataset in datasets.items():
            if hdf5.numeric(dataset) and (wanted is None or field in wanted):
                fields.append(hdf5.stored(field, dataset))
                sample.update(hdf5.stored_sample(dataset, fields[-1], _SAMPLE_BYTES))
        others = tuple(datasets.keys() - {field.name for field in fields})
    if not fields:
        names = ", ".join(sorted(others)) or "nothing"
        raise DataError(f"{path}: no dataset of numbers with a row dim; it holds {names}")
    lengths = {field.name: field.rows for field in fields}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{field!r} {rows}" for field, rows in lengths.items())
        raise DataError(f"{path}: the fields have unequal numbers of rows: {text}")
    digest = _digest(name, fields, sample.digest())
    return ShardInfo(name, path.stat().st_size, tuple(fields), tuple(sorted(others)), digest)


def _digest(name: str, fields: list[Stored], sample: bytes) -> str:
    """A hash of what a shard is, wherever and whenever its file was written."""
    facts = [
        {key: value for key, value in asdict(field).items() if key not in ("by_offset", "nbytes")}
        for field in fields
    ]
    text = json.dumps([name, facts], sort_keys=True)
    return hashlib.sha256(text.encode() + sample).hexdigest()


def fields_of(info: ShardInfo) -> dict[str, Field]:
    """The fields as the plan records them: native byte order, dtypes by name."""
    return {f.name: Field(f.name, f.shape, np.dtype(f.dtype).name) for f in info.fields}


def declared_fields(declared: Declared) -> dict[str, Field]:
    """Declared fields in order of name, as those of a file are; DataError where none can be so."""
    fields = {}
    for name, (shape, dtype) in sorted(declared.items()):
        if any(size < 1 for size in shape):
            raise DataError(f"field {name!r} is declared with row shape {tuple(shape)}")
        try:
            fields[name] = Field(name, tuple(shape), np.dtype(dtype).name)
        except TypeError as problem:
            raise DataError(f"field {name!r} is declared as {dtype!r}, no dtype") from problem
    return fields


def row_bytes(fields: tuple[Stored, ...] | tuple[Field, ...]) -> int:
    """The bytes of one row over all fields."""
    return sum(prod(field.shape) * np.dtype(field.dtype).itemsize for field in fields)


def differences(expected: Mapping[str, Field], source: str, info: ShardInfo) -> list[str]:
    """How a shard's fields differ from those that `source` (a file, the declaration) gives."""
    found = fields_of(info)
    lines = []
    for name, field in expected.items():
        if name not in found:
            lines.append(f"{info.name}: field {name!r} is missing; {source} has it")
            continue
        for what in ("dtype", "shape"):
            ours, theirs = getattr(found[name], what), getattr(field, what)
            if ours != theirs:
                word = "row shape" if what == "shape" else what
                lines.append(f"{info.name}: field {name!r} has {word} {ours}; {source}: {theirs}")
    lines += [
        f"{info.name}: has field {name!r}, which {source} has not"
        for name in found
        if name not in expected
    ]
    return lines


def examine_all(
    names: list[str], folder: Path, wanted: Declared | None = None
) -> tuple[list[ShardInfo], list[str]]:
    """What the files hold, and a line for each that is unfit or unlike the first fit one."""
    infos: list[ShardInfo] = []
    problems: list[str] = []
    expected = None
    source = "the declaration"
    if wanted is not None:
        expected = declared_fields(wanted)
    for name in names:
        try:
            info = examine(name, folder, wanted)
        except DataError as problem:
            problems.append(str(problem))
            continue
        if expected is None:
            expected, source = fields_of(info), info.name
        problems += differences(expected, source, info)
        infos.append(info)
    return infos, problems
