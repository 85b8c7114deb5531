"""Writing sets of rows as sharded HDF5: all files appear together, complete, or none does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from math import prod
from pathlib import Path
from typing import Any

from mpiflow.errors import DataError, UsageError
from mpiflow.graph.sbp import span
from mpiflow.io import hdf5
from mpiflow.io.pack.rows import Arrays, length, no_room, row_bytes
from mpiflow.io.shards import list_files

# What is counted ("rows written to train-*.h5"), how many so far, and all of them where known.
Progress = Callable[[str, int, int | None], None]

# Further files, by path, that belong to the packed ones: what their numbers mean.
Beside = Callable[[], Mapping[Path, str]]

_SHARD_BYTES = 256 << 20
_CHUNK_BYTES, _SMALL_CHUNK_BYTES, _CHUNKS_A_SHARD = 1 << 20, 4 << 10, 16
_COMPRESSIONS: dict[str | None, dict[str, Any]] = {
    None: {},
    "gzip": {"compression": "gzip", "compression_opts": 4, "shuffle": True},
    "lzf": {"compression": "lzf", "shuffle": True},
}


@dataclass(frozen=True, slots=True)
class Storage:
    """How rows are cut into files and stored there.

    `shards` is a number of files or the rows of each; otherwise files have `shard_rows` rows, or
    about 256 MiB.
    """

    shards: int | tuple[int, ...] | None = None
    shard_rows: int | None = None
    chunk_rows: int | None = None
    compression: str | None = None

    def __post_init__(self) -> None:
        if self.shards is not None and self.shard_rows is not None:
            raise UsageError("give the number of shards or the rows of each, not both")
        counts = (self.shards,) if isinstance(self.shards, int) else self.shards or ()
        if self.shards is not None and not counts:
            raise UsageError("the list of rows per shard is empty")
        for value in (*counts, self.shard_rows, self.chunk_rows):
            if value is not None and value < 1:
                raise UsageError(
                    f"shards, rows per shard and rows per chunk start at 1, not {value}"
                )
        if self.compression not in _COMPRESSIONS:
            known = ", ".join(str(name) for name in _COMPRESSIONS if name)
            raise UsageError(f"compression {self.compression!r} is not known; use {known} or none")

    def sizes(self, total: int | None, bytes_a_row: int) -> list[int] | Iterable[int]:
        """The rows of each shard; endless where the total is not known."""
        if isinstance(self.shards, tuple):
            if total is not None and sum(self.shards) != total:
                raise UsageError(
                    f"the shards take {sum(self.shards)} rows, the source gives {total}"
                )
            return list(self.shards)
        if total is None:
            assert self.shards is None
            return repeat(self.shard_rows or max(1, _SHARD_BYTES // bytes_a_row))
        if self.shard_rows:
            starts = range(0, total, self.shard_rows)
            return [min(self.shard_rows, total - start) for start in starts]
        count = self.shards or -(-total * bytes_a_row // _SHARD_BYTES)
        if count > total:
            raise UsageError(f"{total} rows do not fill {count} shards")
        return [stop - start for start, stop in (span(total, count, i) for i in range(count))]


@dataclass(frozen=True, slots=True)
class RowSet:
    """One set to write: files by `pattern`, whose `*` becomes 000, 001, ...; rows in pieces."""

    pattern: Path
    pieces: Iterator[Arrays]
    total: int | None
    storage: Storage


def write_sets(
    sets: Iterable[RowSet],
    old: dict[Path, list[Path]],
    beside: Beside | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the sets; gives their files, which replace those of `old` by pattern.

    All appear together at the end, after those of text that `beside` gives when all rows are
    written; after an error, or an interrupt, nothing has changed.
    """
    parts: dict[Path, list[Path]] = {}
    try:
        for one in sets:
            _write_set(one, parts.setdefault(one.pattern, []), progress)
        for file, text in beside().items() if beside else ():
            _write_text(file, text)
        return [
            file
            for pattern, written in parts.items()
            for file in _publish(written, pattern, old[pattern])
        ]
    finally:
        for part in chain.from_iterable(parts.values()):
            part.unlink(missing_ok=True)


def existing(pattern: Path, overwrite: bool) -> list[Path]:
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


def _write_set(one: RowSet, parts: list[Path], progress: Progress | None) -> None:
    """Write a set under temporary names, each added to `parts` before its file is there."""
    first = next(one.pieces, None)
    if first is None:
        raise DataError(f"{one.pattern}: the source gives no rows")
    sizes = one.storage.sizes(one.total, row_bytes(first))
    if isinstance(sizes, list) and len(sizes) > 1:
        _check_star(one.pattern)
    chunk = one.storage.chunk_rows or _chunk_rows(first, sizes)
    counted = _counted(chain([first], one.pieces), one, progress)
    options = _COMPRESSIONS[one.storage.compression]
    written = _write_parts(_cut(counted, sizes), one.pattern, parts, chunk, options)
    if isinstance(sizes, list) and written < sum(sizes):
        raise DataError(
            f"{one.pattern}: the source gave {written} rows, the shards take {sum(sizes)}"
        )


def _check_star(pattern: Path) -> None:
    if pattern.name.count("*") != 1:
        raise UsageError(f"{pattern}: several files need one * in their name, as in train-*.h5")


def _chunk_rows(first: Arrays, sizes: list[int] | Iterable[int]) -> int:
    """Chunks of about 1 MiB in the widest field; smaller ones where a shard is, to shuffle by."""
    widest = _widest(first)
    rows = max(sizes) if isinstance(sizes, list) else next(iter(sizes))
    small = max(_SMALL_CHUNK_BYTES // widest, -(-rows // _CHUNKS_A_SHARD))
    return max(1, min(rows, small, _CHUNK_BYTES // widest))


def _widest(arrays: Arrays) -> int:
    """The bytes of a row in the widest field."""
    return max(1, *(array.dtype.itemsize * prod(array.shape[1:]) for array in arrays.values()))


def _counted(pieces: Iterable[Arrays], one: RowSet, progress: Progress | None) -> Iterator[Arrays]:
    """The pieces, each reported when it has been written."""
    done = 0
    for piece in pieces:
        yield piece
        done += length(piece)
        if progress:
            progress(f"rows written to {one.pattern.name}", done, one.total)


def _cut(pieces: Iterable[Arrays], sizes: Iterable[int]) -> Iterator[tuple[int, int, Arrays]]:
    """The pieces as (shard, its size, rows), none across shards of the given sizes.

    DataError where rows are left when the sizes end.
    """
    plan = enumerate(sizes)
    shard, size, room = -1, 0, 0
    for piece in pieces:
        start, rows = 0, length(piece)
        while start < rows:
            if room == 0:
                shard, size = next(plan, (-1, 0))
                if size == 0:
                    raise DataError("the source gives more rows than the shards take together")
                room = size
            take = min(room, rows - start)
            yield shard, size, {name: a[start : start + take] for name, a in piece.items()}
            start, room = start + take, room - take


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
            raise DataError(no_room(parts[-1], problem)) from problem
    return written


def _write_part(
    path: Path, group: Iterable[tuple[int, int, Arrays]], chunk: int, options: dict[str, Any]
) -> int:
    """One shard of the rows in `group`, which may be fewer than its size; gives their number."""
    entries = iter(group)
    head = next(entries)
    size, arrays = head[1], head[2]
    chunk = min(chunk, size)
    with hdf5.new_file(path, cache=max(1 << 20, 2 * chunk * _widest(arrays))) as (file, disk):
        for name, array in arrays.items():
            shape = array.shape[1:]
            file.create_dataset(
                name, (size, *shape), array.dtype, maxshape=(size, *shape), chunks=(chunk, *shape),
                **options,
            )  # fmt: skip
        done = 0
        for _, _, piece in chain([head], entries):
            count = length(piece)
            for name, array in piece.items():
                file[name][done : done + count] = array
            disk.check()
            done += count
        if done < size:
            for name in arrays:
                file[name].resize(done, axis=0)
    return done


def _write_text(file: Path, text: str) -> None:
    """The file of this text, which appears only when it is complete."""
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


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
