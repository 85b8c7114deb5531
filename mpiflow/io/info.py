"""What a set of data files holds, and what makes reading it slow or impossible, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mpiflow.io import shards
from mpiflow.io.hdf5 import Stored
from mpiflow.io.shards import ShardInfo
from mpiflow.plan.records import Field

_LARGEST_CHUNK, _SMALLEST_CHUNK, _GOOD_CHUNK = 8 << 20, 4 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The files that a pattern names. `problems` are sentences that say what to do."""

    pattern: str
    folder: str
    fields: tuple[Field, ...]
    shards: tuple[ShardInfo, ...]
    rows: int
    nbytes: int
    problems: tuple[str, ...]


def info(pattern: str, folder: Path) -> DataInfo:
    """What the files hold. Bad files are listed as problems; nothing is raised for them."""
    folder = Path(folder)
    names = shards.list_files(pattern, folder)
    found, problems = shards.examine_all(names, folder)
    if not names:
        problems = [f"no file matches {pattern!r} in {folder.absolute()}; check both"]
    problems += _merged([(one.name, text) for one in found for text in _remarks(one)])
    fields = tuple(shards.fields_of(found[0]).values()) if found else ()
    return DataInfo(
        pattern, str(folder.absolute()), fields, tuple(found), sum(one.rows for one in found),
        sum(one.nbytes for one in found), tuple(problems),
    )  # fmt: skip


def _merged(remarks: list[tuple[str, str]]) -> list[str]:
    """One sentence for all files to which it applies."""
    files: dict[str, list[str]] = {}
    for name, text in remarks:
        files.setdefault(text, []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}"
        for text, names in files.items()
    ]


def _remarks(shard: ShardInfo) -> Iterator[str]:
    """What could be better about a file that can be read."""
    if shard.rows == 0:
        yield "holds no rows; remove it"
        return
    for field in shard.fields:
        yield from _field_remarks(field, shard)
    largest = max(_chunk_bytes(field) for field in shard.fields)
    if 0 < largest < _SMALLEST_CHUNK and shard.chunk_rows < shard.rows:
        good = max(1, _GOOD_CHUNK // max(1, shards.row_bytes(shard.fields)))
        yield (
            f"chunks of {_size(largest)} at most, each a read of its own; "
            f"pack it with up to {good} rows a chunk"
        )


def _chunk_bytes(field: Stored) -> int:
    """The bytes of a decoded chunk; 0 where there are none."""
    return prod(field.chunk) * np.dtype(field.dtype).itemsize if field.chunk else 0


def _field_remarks(field: Stored, shard: ShardInfo) -> Iterator[str]:
    what = f"field {field.name!r}"
    row = shards.row_bytes((field,))
    good = max(1, _GOOD_CHUNK // max(1, row))
    if field.nbytes == 0:
        yield f"{what} was never written and reads as its fill value; write the file again"
    elif not field.filters and field.layout == "chunked" and field.nbytes < field.rows * row:
        yield f"{what} was written in part, the rest reads as its fill value; write the file again"
    if not field.by_offset and field.nbytes:
        yield f"{what} is read through the HDF5 library, slowly, {_why(field)}; pack it again"
    if not field.chunk:
        return
    size = _chunk_bytes(field)
    if size > _LARGEST_CHUNK:
        yield (
            f"{what} has chunks of {_size(size)}, read and held whole for any row of them; "
            f"pack it with about {good} rows a chunk"
        )
    if field.chunk[0] > field.rows and 2 * field.rows < field.chunk[0]:
        yield (
            f"{what} has {field.rows} rows in one chunk for {field.chunk[0]}, mostly padding; "
            f"pack it with {field.rows} rows a chunk or fewer, larger files"
        )
    if shard.chunk_rows % field.chunk[0]:
        yield (
            f"{what} has {field.chunk[0]} rows a chunk, which does not divide the "
            f"{shard.chunk_rows} of another field, so that chunks are read twice; "
            "pack all fields with the same rows a chunk"
        )


def _why(field: Stored) -> str:
    """Why a field cannot be read by offset, with what would help."""
    others = [name for name in field.filters if name not in ("gzip", "shuffle")]
    if others:
        return f"because of its filter {', '.join(others)} (use gzip or none)"
    if field.layout not in ("chunked", "contiguous"):
        return f"because its layout is {field.layout}"
    if field.chunk and field.chunk[1:] != field.shape:
        return f"because its chunks of {field.chunk} cut rows of {field.shape}"
    return "because of its number format or a user block in the file"


def info_text(data: DataInfo) -> str:
    """The information as aligned tables."""
    files = f"{len(data.shards)} file{'' if len(data.shards) == 1 else 's'}"
    parts = [f"{data.pattern} in {data.folder}: {files}, {data.rows} rows, {_size(data.nbytes)}"]
    if data.fields:
        parts.append(_table(["field", "dtype", "row shape"], [_field_row(f) for f in data.fields]))
        rows = [[s.name, str(s.rows), _size(s.nbytes), _storage(s)] for s in data.shards]
        parts.append(_table(["file", "rows", "size", "stored as"], rows))
    others = sorted({name for shard in data.shards for name in shard.others})
    if others:
        parts.append(f"not numbers with a row dim, so no fields: {', '.join(others)}")
    parts.append("\n".join(["problems:", *(f"  {p}" for p in data.problems)])
                 if data.problems else "problems: none")  # fmt: skip
    return "\n\n".join(parts)


def _field_row(field: Field) -> list[str]:
    return [field.name, field.dtype, " x ".join(map(str, field.shape)) or "one number"]


def _storage(shard: ShardInfo) -> str:
    """Chunks and filters of the fields: once where all have the same."""
    texts = {}
    for field in shard.fields:
        chunk = f"{-(-field.rows // field.chunk[0])} x {field.chunk[0]} rows" if field.chunk else ""
        filters = "+".join(field.filters)
        texts[field.name] = " ".join(filter(None, [chunk or field.layout, filters]))
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name}: {text}" for name, text in texts.items())


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest entry; numbers and sizes to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    right = [title in ("rows", "size") for title in head]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _size(nbytes: int) -> str:
    """Bytes with a binary unit."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
