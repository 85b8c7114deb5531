"""Packing: from a source to one set of files, or to one to train with and one to test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mpiflow.errors import UsageError
from mpiflow.io.pack.rows import Arrays, Part, Rows, divided, length, shuffled, spooled
from mpiflow.io.pack.source import Source, open_source
from mpiflow.io.pack.write import Beside, Progress, RowSet, Storage, existing, write_sets

# A set before it is written: rows in their order, or a stream that cannot be gone back in.
_Opened = Part | Iterator[Arrays]


def pack(
    source: Source,
    out: str | Path,
    *,
    test: float = 0,
    shuffle: bool = False,
    seed: int = 0,
    shards: int | Sequence[int] | None = None,
    shard_rows: int | None = None,
    chunk_rows: int | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    beside: Beside | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the rows of `source`; gives the files, which appear together at the end or not at all.

    `source` is `Rows`, a mapping of arrays, an iterable of such mappings (streamed in bounded
    memory), a function that gives any of these, or the text FILE.npz or MODULE.py:FUNCTION.
    `out` names the files, its `*` becoming 000, 001, ...; or it is a folder, for train-*.h5 and,
    where `test` rows or that share of them are to be kept for it, test-*.h5. For the storage see
    `Storage`; with two sets, `shards` is the number of files of the first. `beside` gives files of
    text that appear with them.
    """
    storage = Storage(_counts(shards), shard_rows, chunk_rows, compression)
    patterns = _patterns(Path(out), ("train", "test") if test else ("train",))
    old = {pattern: existing(pattern, overwrite) for pattern in patterns.values()}
    opened: Rows | Iterator[Arrays] = open_source(source)
    if not isinstance(opened, Rows) and (test or shuffle or isinstance(storage.shards, int)):
        opened = spooled(_reported(opened, progress), _folder(patterns))
    parts: dict[str, _Opened]
    if test and isinstance(opened, Rows):
        parts = {**divided(opened, test, shuffle=shuffle, seed=seed)}
    else:
        parts = {"train": _ordered(opened, shuffle, seed)}
    return write_sets(_row_sets(parts, patterns, storage), old, beside, progress)


def pack_sets(
    sets: Mapping[str, Source],
    out: str | Path,
    *,
    shuffle: bool = False,
    seed: int = 0,
    storage: Storage | None = None,
    overwrite: bool = False,
    beside: Beside | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write each source of `sets` to `out`/NAME-*.h5, all of them or none; gives the files.

    A single one may go to files by another pattern, as `pack` takes it.
    """
    storage = storage or Storage()
    patterns = _patterns(Path(out), tuple(sets))
    old = {pattern: existing(pattern, overwrite) for pattern in patterns.values()}
    parts: dict[str, _Opened] = {}
    for number, (name, source) in enumerate(sets.items()):
        opened = open_source(source)
        if not isinstance(opened, Rows) and (shuffle or isinstance(storage.shards, int)):
            opened = spooled(_reported(opened, progress), _folder(patterns))
        parts[name] = _ordered(opened, shuffle, seed + number)
    return write_sets(_row_sets(parts, patterns, storage), old, beside, progress)


def is_pattern(out: Path) -> bool:
    """Whether a path names files, not the folder for them."""
    return "*" in out.name or out.suffix in (".h5", ".hdf5")


def _patterns(out: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """The files of each set."""
    if not is_pattern(out):
        return {name: out / f"{name}-*.h5" for name in names}
    if len(names) > 1:
        raise UsageError(f"{out}: the sets {', '.join(names)} need a folder for their files")
    return {names[0]: out}


def _folder(patterns: Mapping[str, Path]) -> Path:
    return next(iter(patterns.values())).parent


def _counts(shards: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    return shards if shards is None or isinstance(shards, int) else tuple(shards)


def _ordered(opened: Rows | Iterator[Arrays], shuffle: bool, seed: int) -> _Opened:
    if not isinstance(opened, Rows):
        return opened
    return shuffled(opened, seed) if shuffle else Part(opened)


def _reported(pieces: Iterator[Arrays], progress: Progress | None) -> Iterator[Arrays]:
    """The pieces, each reported when it has been taken."""
    done = 0
    for piece in pieces:
        yield piece
        done += length(piece)
        if progress:
            progress("rows read", done, None)


def _row_sets(
    parts: Mapping[str, _Opened], patterns: Mapping[str, Path], storage: Storage
) -> Iterator[RowSet]:
    """What to write of each set; those after the first have shards in proportion to theirs."""
    if len(parts) > 1 and isinstance(storage.shards, tuple):
        raise UsageError("the rows of each shard are those of one set; give the number of shards")
    first = 0
    for name, part in parts.items():
        if not isinstance(part, Part):
            yield RowSet(patterns[name], part, None, storage)
            continue
        own = storage
        if first and isinstance(storage.shards, int):
            share = round(storage.shards * len(part) / first)
            own = replace(storage, shards=min(max(1, share), max(1, len(part))))
        first = first or len(part)
        yield RowSet(patterns[name], part.pieces(), len(part), own)
