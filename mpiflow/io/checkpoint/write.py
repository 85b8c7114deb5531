"""Writing checkpoints: each rank its shard, rank 0 the manifest, the final name last.

    rank 0     prepare ── barrier ─┐                   ┌─ barrier ── commit ── prune
    each rank                      └─ write* ─ finish ─┘

Until `commit` renames the folder nothing in it is ever loaded; afterwards it is complete.
No function here talks to another rank: the caller keeps the order of the picture.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.io import hdf5
from mpiflow.io.checkpoint.arrayfile import ArrayFile
from mpiflow.io.checkpoint.fields import Fields
from mpiflow.io.checkpoint.manifest import (
    check,
    check_files,
    file_of,
    load,
    parse,
    slice_of,
    slice_row,
    to_text,
)
from mpiflow.io.checkpoint.rawfile import ShardFiles, byte_view
from mpiflow.io.checkpoint.records import (
    MANIFEST,
    PARTIAL,
    REMOVED,
    REPLACED,
    Checkpoint,
    Header,
    SavedVariable,
    ShardFile,
    Slice,
    scan,
    step_name,
)
from mpiflow.io.checkpoint.space import disk_errors, make_folder, write_text
from mpiflow.plan.records import Plan

_log = logging.getLogger(__name__)


def header(
    plan: Plan, *, digest: str, program: str, step: int, epoch: int, state: dict[str, Any]
) -> Header:
    """What the checkpoint of a run of `plan` says about it; both digests are those of the plan."""
    variables = tuple(SavedVariable(v.name, v.shape, v.dtype) for v in plan.distinct_variables())
    return Header(plan.job, step, epoch, digest, program, plan.identity, variables, state)


# -- every rank ---------------------------------------------------------------------------------


class CheckpointWriter:
    """The `Writer` of one rank for one save. Used on the write stream's thread; needs no MPI.

    A rank that writes nothing leaves no file. After an error nothing of this shard is left.
    """

    def __init__(self, folder: Path, step: int, rank: int, host: str) -> None:
        self._path = folder / (step_name(step) + PARTIAL) / f"shard-{rank:05d}.h5"
        self._who = f"rank {rank} on {host}, checkpoint of step {step}: "
        self._origin = {"rank": rank, "host": host, "step": step}
        self._file: ArrayFile | None = None
        self._slices: list[Slice] = []
        self.nbytes = 0

    def write(self, variable: str, start: tuple[int, ...], array: Any) -> None:
        """Store `array` as the part of `variable` that begins at `start`; empty ones are left out.

        The array may change as soon as this returns.
        """
        if not array.size:
            return
        data = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        checksum = hashlib.sha256(byte_view(data)).hexdigest()
        dataset = f"slice-{len(self._slices)}"
        origin = {"variable": variable, "start": np.array(start, "<i8"), "checksum": checksum}
        with self._failing(data.nbytes):
            offset = self._opened().store(dataset, data, origin)
        piece = Slice(
            variable=variable,
            file=self._path.name,
            dataset=dataset,
            offset=offset,
            start=tuple(map(int, start)),
            shape=data.shape,
            dtype=data.dtype.name,
            checksum=checksum,
        )
        self._slices.append(piece)
        self.nbytes += data.nbytes

    def finish(self) -> None:
        """Put this rank's shard on the disk under its name, then the index that `commit` reads."""
        if self._file is None:
            return
        with self._failing(0):
            self._file.finish()
            file = self._measured()
            index = {
                **self._origin,
                "file": [file.name, file.nbytes, file.frame],
                "slices": [[p.variable, p.dtype, *slice_row(p)] for p in self._slices],
            }
            write_text(self._path.with_suffix(".json"), json.dumps(index))

    def abandon(self) -> None:
        """Remove what this rank has written, for a save that some rank could not finish."""
        if self._file:
            self._file.discard()
        self._path.unlink(missing_ok=True)

    def _opened(self) -> ArrayFile:
        if self._file is None:
            make_folder(self._path.parent)
            self._file = ArrayFile(self._path)
        return self._file

    @contextmanager
    def _failing(self, more: int) -> Iterator[None]:
        try:
            with disk_errors(self._path, self.nbytes + more, self._who):
                yield
        except CheckpointError:
            self.abandon()
            raise

    def _measured(self) -> ShardFile:
        size = self._path.stat().st_size
        spans = [(piece.offset, piece.nbytes) for piece in self._slices]
        with ShardFiles(self._path.parent, [ShardFile(self._path.name, size, "")]) as files:
            frame = files.frame(self._path.name, spans)
        return ShardFile(self._path.name, size, frame)


# -- rank 0 -------------------------------------------------------------------------------------


def prepare(folder: Path, step: int) -> None:
    """Make the folder that the ranks write into, free of what a killed run left of this step.

    Returns before any rank may write: call it on rank 0, then let all ranks pass a barrier.
    """
    partial = folder / (step_name(step) + PARTIAL)
    final, replaced = folder / step_name(step), folder / (step_name(step) + REPLACED)
    with disk_errors(partial, 0):
        make_folder(folder)
        _remove(partial)
        if replaced.exists() and not final.exists():
            # Killed between the two renames of `_install`: undo the first one.
            os.rename(replaced, final)
        make_folder(partial)
        hdf5.sync(folder)


def commit(folder: Path, header: Header, ranks: int, *, patience: float = 10.0) -> Path:
    """Make the checkpoint that all `ranks` have finished writing complete; gives its folder.

    A complete one of the same step stays until this one has its name. Raises where the slices
    do not cover each variable exactly; a file that another host wrote may take `patience`
    seconds to be seen here.
    """
    partial = folder / (step_name(header.step) + PARTIAL)
    final = folder / step_name(header.step)
    checkpoint = _gather(partial, header, ranks, patience)
    text = to_text(checkpoint)
    parse(text, partial, str(partial / MANIFEST))
    with disk_errors(partial, len(text)):
        write_text(partial / MANIFEST, text)
        for index in _indexes(partial):
            index.unlink()
        hdf5.sync(partial)
        _install(partial, final)
    return final


def _gather(partial: Path, header: Header, ranks: int, patience: float) -> Checkpoint:
    """The checkpoint that the indexes in `partial` make up, once they cover every variable."""
    deadline = time.monotonic() + patience
    while True:
        shards = [_read_index(path) for path in _indexes(partial)]
        checkpoint = Checkpoint(
            **{field.name: getattr(header, field.name) for field in fields(header)},
            path=partial,
            ranks=ranks,
            files=tuple(file for file, _ in shards),
            slices=tuple(piece for _, pieces in shards for piece in pieces),
        )
        try:
            check(checkpoint, str(partial))
            check_files(checkpoint)
            return checkpoint
        except CheckpointError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.1)


def _indexes(partial: Path) -> list[Path]:
    return sorted(partial.glob("shard-*.json"))


def _read_index(path: Path) -> tuple[ShardFile, list[Slice]]:
    """The shard file and the slices that one rank has written."""
    where = str(path)
    try:
        index = Fields(json.loads(path.read_text("utf-8")), where)
        file = file_of(index.items("file"), where)
        pieces = [
            slice_of([0, *row], variable, dtype, [file.name], where)
            for variable, dtype, *row in index.items("slices")
        ]
    except (OSError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be read: {problem}") from problem
    return file, pieces


def _install(partial: Path, final: Path) -> None:
    """Give the folder its final name; at every moment one complete folder of the step exists."""
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        _remove(replaced)
        os.rename(final, replaced)
    os.rename(partial, final)
    hdf5.sync(final.parent)
    _try_remove(replaced)


def prune(folder: Path, keep: int, protect: Iterable[int] = ()) -> list[str]:
    """Delete complete checkpoints but the newest `keep` and the steps of `protect`.

    Goes together with what killed runs left of older steps. `keep=0` keeps all that is complete.
    Gives the names of the folders that it deleted.
    """
    entries = scan(folder)
    complete = [step for step, suffix, path in entries if not suffix and is_complete(path)]
    kept = {*(complete[:keep] if keep else complete), *protect}
    newest = max(complete, default=-1)
    doomed = [
        path
        for step, suffix, path in entries
        if suffix == REMOVED
        or (suffix == PARTIAL and step < newest)
        or (suffix == REPLACED and step in complete)
        or (not suffix and step in complete and step not in kept)
    ]
    return [path.name for path in doomed if _try_remove(path)]


def is_complete(path: Path) -> bool:
    """Whether the folder holds a checkpoint that can be loaded, by its manifest and file sizes."""
    try:
        load(path)
    except CheckpointError:
        return False
    return True


def _remove(path: Path) -> None:
    """Delete a folder; it loses its name first, so that no half of it is taken for a whole."""
    if not path.exists():
        return
    aside = path.with_name(path.name.partition(".")[0] + REMOVED)
    if aside != path:
        _remove(aside)
        os.rename(path, aside)
        hdf5.sync(path.parent)
    shutil.rmtree(aside)


def _try_remove(path: Path) -> bool:
    """Delete a folder that nobody needs; where that fails a warning is enough."""
    try:
        _remove(path)
    except OSError as problem:
        _log.warning("%s: not deleted: %s", path, problem)
        return False
    return True
