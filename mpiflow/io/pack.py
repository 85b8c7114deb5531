"""Making sharded HDF5 files: arrays in, a set of complete files out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, repeat
from math import prod
from pathlib import Path
from typing import Any

from mpiflow.errors import DataError, UsageError
from mpiflow.graph.sbp import span
from mpiflow.io import hdf5
from mpiflow.io.info import DataInfo, info, info_text
from mpiflow.io.shards import list_files
from mpiflow.io.source import Arrays, Source, cut, open_source, row_bytes

__all__ = ["DataInfo", "Progress", "info", "info_text", "pack"]

# Rows written so far, and all of them where that is known.
Progress = Callable[[int, int | None], None]

_SHARD_BYTES = 256 << 20
_CHUNK_BYTES, _SMALL_CHUNK_BYTES, _CHUNKS_A_SHARD = 1 << 20, 4 << 10, 16
_COMPRESSIONS: dict[str | None, dict[str, Any]] = {
    None: {},
    "gzip": {"compression": "gzip", "compression_opts": 4, "shuffle": True},
    "lzf": {"compression": "lzf", "shuffle": True},
}


def pack(
    source: Source,
    out: str | Path,
    *,
    shards: int | Sequence[int] | None = None,
    shard_rows: int | None = None,
    chunk_rows: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the rows of `source` to files named by `out`, whose `*` becomes 000, 001, ...

    `source` is a mapping of arrays, an iterable of such mappings (streamed in bounded memory), a
    function that gives either, or the text FILE.npz or MODULE.py:FUNCTION. `shards` is a number of
    files or the rows of each; otherwise files have `shard_rows` rows, or about 256 MiB.
    All files appear together at the end; after an error there are none.
    """
    _check_options(shards, shard_rows, chunk_rows, compression)
    pattern = Path(out)
    old = _existing(pattern, overwrite)
    pieces, total = open_source(source)
    first = next(pieces, None)
    if first is None:
        raise DataError(f"{out}: the source gives no rows")
    sizes = _shard_sizes(total, row_bytes(first), shards, shard_rows)
    if isinstance(sizes, list) and len(sizes) > 1:
        _check_star(pattern)
    chunk = chunk_rows or _chunk_rows(first, sizes)
    parts: list[Path] = []
    try:
        written = _write_parts(
            cut(_counted(chain([first], pieces), total, progress), sizes),
            pattern, parts, chunk, _COMPRESSIONS[compression],
        )  # fmt: skip
        if isinstance(sizes, list) and written < sum(sizes):
            raise DataError(f"{out}: the source gave {written} rows, the shards take {sum(sizes)}")
        return _publish(parts, pattern, old)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def _check_options(
    shards: int | Sequence[int] | None,
    shard_rows: int | None,
    chunk_rows: int | None,
    compression: str | None,
) -> None:
    """UsageError for options that cannot be meant."""
    if shards is not None and shard_rows is not None:
        raise UsageError("give the number of shards or the rows of each, not both")
    counts = [shards] if isinstance(shards, int) else list(shards or [])
    if shards is not None and not counts:
        raise UsageError("the list of rows per shard is empty")
    for value in (*counts, shard_rows, chunk_rows):
        if value is not None and value < 1:
            raise UsageError(f"shards, rows per shard and rows per chunk start at 1, not {value}")
    if compression not in _COMPRESSIONS:
        known = ", ".join(str(name) for name in _COMPRESSIONS if name)
        raise UsageError(f"compression {compression!r} is not known; use {known} or none")


def _check_star(pattern: Path) -> None:
    if pattern.name.count("*") != 1:
        raise UsageError(f"{pattern}: several files need one * in their name, as in train-*.h5")


def _existing(pattern: Path, overwrite: bool) -> list[Path]:
    """Files of an earlier pack that are to be replaced; DataError where there may be none."""
    if "*" not in pattern.name:
        found = [pattern] if pattern.exists() else []
        numbered = found
    else:
        found = [pattern.parent / n for n in list_files(pattern.name, pattern.parent)]
        before, _, after = pattern.name.partition("*")
        numbered = [p for p in found if p.name[len(before) : len(p.name) - len(after)].isdecimal()]
    foreign = [path for path in found if path not in numbered]
    if foreign:
        raise DataError(
            f"{pattern} also matches {_some(foreign)}, which would be read as part of this set; "
            "choose another pattern or move the files"
        )
    if numbered and not overwrite:
        raise DataError(
            f"{pattern}: {_some(numbered)} would be overwritten; choose another name, remove the "
            "files or allow it (--overwrite)"
        )
    return numbered


def _some(paths: list[Path]) -> str:
    names = ", ".join(path.name for path in paths[:3])
    return names if len(paths) <= 3 else f"{names} and {len(paths) - 3} more"


def _shard_sizes(
    total: int | None, bytes_a_row: int, shards: int | Sequence[int] | None, shard_rows: int | None
) -> list[int] | Iterable[int]:
    """The rows of each shard; endless where the total is not known."""
    if shards is not None and not isinstance(shards, int):
        sizes = list(shards)
        if total is not None and sum(sizes) != total:
            raise UsageError(f"the shards take {sum(sizes)} rows, the source gives {total}")
        return sizes
    if total is None:
        if shards is not None:
            raise UsageError(
                "the source yields pieces, so that the number of its rows is not known beforehand; "
                "give the rows of a shard (--shard-rows) instead of the number of shards"
            )
        return repeat(shard_rows or max(1, _SHARD_BYTES // bytes_a_row))
    if shard_rows:
        return [min(shard_rows, total - start) for start in range(0, total, shard_rows)]
    count = shards or -(-total * bytes_a_row // _SHARD_BYTES)
    if count > total:
        raise UsageError(f"{total} rows do not fill {count} shards")
    return [stop - start for start, stop in (span(total, count, i) for i in range(count))]


def _chunk_rows(first: Arrays, sizes: list[int] | Iterable[int]) -> int:
    """Chunks of about 1 MiB in the widest field; smaller ones where a shard is, to shuffle by."""
    widest = max(1, *(array.dtype.itemsize * prod(array.shape[1:]) for array in first.values()))
    rows = max(sizes) if isinstance(sizes, list) else next(iter(sizes))
    small = max(_SMALL_CHUNK_BYTES // widest, -(-rows // _CHUNKS_A_SHARD))
    return max(1, min(rows, small, _CHUNK_BYTES // widest))


def _counted(
    pieces: Iterable[Arrays], total: int | None, progress: Progress | None
) -> Iterator[Arrays]:
    """The pieces, each reported when it has been written."""
    done = 0
    for piece in pieces:
        yield piece
        done += len(next(iter(piece.values())))
        if progress:
            progress(done, total)


def _write_parts(
    rows: Iterator[tuple[int, int, Arrays]],
    pattern: Path,
    parts: list[Path],
    chunk: int,
    options: dict[str, Any],
) -> int:
    """Write each shard under a temporary name, added to `parts` first; gives the rows of all."""
    written = 0
    for shard, group in groupby(rows, key=lambda entry: entry[0]):
        if shard == 1:
            _check_star(pattern)
        parts.append(pattern.with_name(f".{pattern.name.replace('*', str(shard))}.part"))
        try:
            written += _write_part(parts[-1], group, chunk, options)
        except OSError as problem:
            free = shutil.disk_usage(parts[-1].parent).free / 2**20
            raise DataError(
                f"{parts[-1]}: cannot be written: {problem} ({free:.0f} MiB are free there)"
            ) from problem
    return written


def _write_part(
    path: Path, group: Iterable[tuple[int, int, Arrays]], chunk: int, options: dict[str, Any]
) -> int:
    """One shard of the rows in `group`, which may be fewer than its size; gives their number."""
    entries = iter(group)
    head = next(entries)
    size, arrays = head[1], head[2]
    chunk = min(chunk, size)
    widest = max(array.dtype.itemsize * prod(array.shape[1:]) for array in arrays.values())
    with hdf5.new_file(path, cache=max(1 << 20, 2 * chunk * widest)) as file:
        for name, array in arrays.items():
            shape = array.shape[1:]
            file.create_dataset(
                name, (size, *shape), array.dtype, maxshape=(size, *shape), chunks=(chunk, *shape),
                **options,
            )  # fmt: skip
        done = 0
        for _, _, piece in chain([head], entries):
            count = len(next(iter(piece.values())))
            for name, array in piece.items():
                file[name][done : done + count] = array
            done += count
        if done < size:
            for name in arrays:
                file[name].resize(done, axis=0)
    return done


def _publish(parts: list[Path], pattern: Path, old: list[Path]) -> list[Path]:
    """Give the complete files their names, then remove older ones that are not of this set."""
    width = max(3, len(str(len(parts) - 1)))
    files = [
        pattern.with_name(pattern.name.replace("*", f"{index:0{width}}"))
        for index in range(len(parts))
    ]
    for part, file in zip(parts, files, strict=True):
        os.replace(part, file)
    for path in old:
        if path not in files:
            path.unlink()
    hdf5.sync(pattern.absolute().parent)
    return files
