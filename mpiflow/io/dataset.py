"""Data sets: from files to the record in the plan, and whether the files still are what it says."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mpiflow.errors import DataError
from mpiflow.io import shards
from mpiflow.io.reader import DatasetReader, cache_bytes, open_reader
from mpiflow.io.shards import Declared, ShardInfo
from mpiflow.plan.records import DataSet, Shard

__all__ = ["DatasetReader", "cache_bytes", "check_files", "inspect", "open_reader"]


def inspect(
    name: str,
    pattern: str,
    folder: Path,
    *,
    batch: int,
    shuffle: bool,
    seed: int,
    lanes: int,
    window: int,
    fields: Declared | None = None,
    rows: int | None = None,
    drop: bool = True,
) -> DataSet:
    """The record of the files that `pattern` names in `folder`, every one opened and compared.

    `fields` (name to row shape and dtype) and `rows` declare what is there, for planning where no
    file is; files must agree with them. With `drop` a batch must fit into the rows.
    """
    folder = Path(folder)
    names = shards.list_files(pattern, folder)
    infos: list[ShardInfo] = []
    if names:
        infos = _examined(name, names, folder, fields)
        record_fields = tuple(shards.fields_of(infos[0]).values())
        total = sum(info.rows for info in infos)
        if rows is not None and rows != total:
            raise DataError(f"data set {name!r}: {rows} rows are declared, the files hold {total}")
    elif fields is None or rows is None:
        raise DataError(_no_match(name, pattern, folder, fields, rows))
    else:
        record_fields = tuple(shards.declared_fields(fields).values())
        total = rows
    record = DataSet(
        name, pattern, record_fields, tuple(map(_shard, infos)), total, batch, shuffle, seed,
        lanes, window, _fingerprint(infos),
    )  # fmt: skip
    _check_numbers(record, drop)
    return record


def _examined(
    name: str, names: list[str], folder: Path, fields: Declared | None
) -> list[ShardInfo]:
    """What the files hold; DataError with every problem of every file."""
    infos, problems = shards.examine_all(names, folder, fields)
    if problems:
        raise DataError(
            f"data set {name!r}: {len(problems)} problem(s) in {len(names)} file(s) "
            f"in {folder.absolute()}\n" + "\n".join(f"  {line}" for line in problems)
        )
    return infos


def _no_match(
    name: str, pattern: str, folder: Path, fields: Declared | None, rows: int | None
) -> str:
    text = f"data set {name!r}: no file matches {pattern!r} in {folder.absolute()}"
    if not folder.is_dir():
        text += "; there is no such folder"
    if fields is not None and rows is None:
        return text + "\n  fields are declared; declare rows as well to plan without the files"
    return text + "\n  patterns are relative to --data FOLDER (default: the current folder)"


def _shard(info: ShardInfo) -> Shard:
    return Shard(info.name, info.rows, info.chunk_rows, info.digest)


def _fingerprint(infos: list[ShardInfo]) -> str:
    """One hash over those of all shards; empty for none."""
    return hashlib.sha256("\n".join(i.digest for i in infos).encode()).hexdigest() if infos else ""


def _check_numbers(record: DataSet, drop: bool) -> None:
    """DataError where the batch, the lanes or the seed cannot be meant."""
    where = f"data set {record.name!r}"
    if record.batch < 1 or record.window < 1:
        raise DataError(
            f"{where}: batch {record.batch} and window {record.window} must be at least 1"
        )
    if record.rows < 1:
        raise DataError(f"{where}: the files that match {record.pattern!r} hold no rows at all")
    if drop and record.batch > record.rows:
        raise DataError(
            f"{where}: a batch of {record.batch} rows is larger than the {record.rows} rows there "
            f"are; use batch={record.rows} or less"
        )
    if not 1 <= record.lanes <= record.batch:
        raise DataError(
            f"{where}: {record.lanes} lanes cannot share a batch of {record.batch} rows; "
            f"use 1 to {record.batch} lanes"
        )
    if not 0 <= record.seed < 1 << 63:
        raise DataError(f"{where}: seed {record.seed} is outside 0 to 2**63 - 1")


def check_files(dataset: DataSet, folder: Path) -> None:
    """DataError, saying which shard differs and how, unless the files are those of the record."""
    folder = Path(folder)
    if not dataset.fingerprint:
        raise DataError(
            f"data set {dataset.name!r}: the plan was made from declared fields, without files; "
            "make the plan again where the files are"
        )
    names = shards.list_files(dataset.pattern, folder)
    problems = _list_differences([shard.name for shard in dataset.shards], names)
    infos: list[ShardInfo] = []
    if not problems:
        fields = {field.name: (field.shape, field.dtype) for field in dataset.fields}
        infos, problems = shards.examine_all(names, folder, fields)
    if not problems:
        pairs = zip(dataset.shards, infos, strict=True)
        problems = [_difference(shard, info) for shard, info in pairs if shard != _shard(info)]
    if problems:
        raise DataError(
            f"data set {dataset.name!r}: the plan was made for other data than "
            f"{folder.absolute()} holds; restore the files or make the plan again\n"
            + "\n".join(f"  {line}" for line in problems)
        )


def _list_differences(planned: list[str], found: list[str]) -> list[str]:
    missing = [f"{name}: no such file; the plan reads it" for name in planned if name not in found]
    extra = [f"{name}: not in the plan" for name in found if name not in planned]
    return missing + extra


def _difference(shard: Shard, info: ShardInfo) -> str:
    """How a file differs from its record, the names being equal."""
    if shard.rows != info.rows:
        return f"{info.name}: {info.rows} rows; the plan says {shard.rows}"
    if shard.chunk_rows != info.chunk_rows:
        return f"{info.name}: chunks of {info.chunk_rows} rows; the plan says {shard.chunk_rows}"
    return f"{info.name}: as many rows, but its content, chunk shapes or compression are others"
