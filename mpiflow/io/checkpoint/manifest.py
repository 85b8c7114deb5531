"""The manifest of a checkpoint: its text, and the checks on reading one.

A manifest is untrusted: whatever is wrong with it is a CheckpointError that names file and key,
and a Checkpoint that was loaded has slices that lie within their files, apart from each other,
and hold each element of each variable exactly once.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box
from mpiflow.io.checkpoint.fields import Fields, short
from mpiflow.io.checkpoint.records import (
    MANIFEST,
    PARTIAL,
    REMOVED,
    Checkpoint,
    SavedVariable,
    ShardFile,
    Slice,
    folder_place,
)
from mpiflow.plan.slice import itemsize

FORMAT = 1

_UNFINISHED = {
    PARTIAL: "partial; saving ended before every rank had written its part",
    REMOVED: "half deleted; a newer checkpoint had replaced it",
}
_SHARD = re.compile(r"shard-\d{5,9}\.h5")
_DATASET = re.compile(r"slice-\d{1,9}")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


def load(path: Path, *, look: bool = True) -> Checkpoint:
    """The checkpoint in the folder `path`, checked by all that its manifest and file sizes tell.

    `look=False` skips the look at every file: for ranks after one has done it.
    """
    step, suffix = folder_place(path) or (None, "")
    if suffix in (PARTIAL, REMOVED):
        raise CheckpointError(f"{path}: {_UNFINISHED[suffix]}")
    manifest = path / MANIFEST
    try:
        text = manifest.read_text("utf-8")
        checkpoint = from_data(json.loads(text), path, str(manifest))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {MANIFEST} is missing") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"{manifest}: cannot be read: {problem}") from problem
    if step not in (None, checkpoint.step):
        raise CheckpointError(f"{manifest}: holds step {checkpoint.step}, its folder step {step}")
    if look:
        check_files(checkpoint)
    return checkpoint


def check_files(checkpoint: Checkpoint) -> None:
    """Raise unless every file is there and as long as the manifest says."""
    for file in checkpoint.files:
        path = checkpoint.path / file.name
        try:
            status = path.lstat()
        except OSError as problem:
            raise CheckpointError(
                f"{path}: {problem.strerror}; {file.nbytes} bytes expected"
            ) from problem
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        if status.st_size != file.nbytes:
            raise CheckpointError(f"{path}: has {status.st_size} bytes, {file.nbytes} expected")


# -- text ---------------------------------------------------------------------------------------


def to_text(checkpoint: Checkpoint) -> str:
    """The manifest: JSON, one line an item, with a checksum over all of it."""
    body = _body(checkpoint)
    body["checksum"] = _digest(body)
    lines = (f"{json.dumps(key)}: {_value_text(value)}" for key, value in body.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _body(checkpoint: Checkpoint) -> dict[str, Any]:
    def fields(record: Any) -> dict[str, Any]:
        return {name: getattr(record, name) for name in record.__slots__}

    body = {
        "format": FORMAT,
        "job": checkpoint.job,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "ranks": checkpoint.ranks,
        "digest": checkpoint.digest,
        "program": checkpoint.program,
        "identity": checkpoint.identity,
        "state": checkpoint.state,
        "variables": [fields(variable) for variable in checkpoint.variables],
        "files": [fields(file) for file in checkpoint.files],
        "slices": [fields(piece) for piece in checkpoint.slices],
    }
    try:
        return json.loads(json.dumps(body))
    except (TypeError, ValueError) as problem:
        raise CheckpointError(f"the state to save is not plain JSON: {problem}") from problem


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in body.items() if k != "checksum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _value_text(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n " + ",\n ".join(json.dumps(item) for item in value) + "\n]"


# -- reading what is not trusted ----------------------------------------------------------------


def from_data(data: Any, path: Path, where: str) -> Checkpoint:
    """The checkpoint that a manifest describes; every name, size and offset in it is checked."""
    fields = Fields(data, where)
    version = fields.integer("format")
    if version != FORMAT:
        raise CheckpointError(f"{where}: format {version}, this mpiflow reads format {FORMAT}")
    if fields.text("checksum") != _digest(data):
        raise CheckpointError(f"{where}: damaged, its content does not match its checksum")
    checkpoint = Checkpoint(
        path=path,
        job=fields.text("job"),
        step=fields.integer("step"),
        epoch=fields.integer("epoch"),
        ranks=fields.integer("ranks"),
        digest=fields.text("digest"),
        program=fields.text("program"),
        identity=tuple(_pair(item, where) for item in fields.items("identity")),
        state=fields.mapping("state"),
        variables=tuple(_variable(item) for item in fields.records("variables")),
        files=tuple(file_of(item) for item in fields.records("files")),
        slices=tuple(slice_of(item) for item in fields.records("slices")),
    )
    check(checkpoint, where)
    return checkpoint


def _pair(item: Any, where: str) -> tuple[str, str]:
    if not (isinstance(item, list) and len(item) == 2 and all(type(v) is str for v in item)):
        raise CheckpointError(f"{where}: 'identity' holds {short(item)}, not two strings")
    return item[0], item[1]


def _variable(fields: Fields) -> SavedVariable:
    return SavedVariable(fields.text("name"), fields.integers("shape"), _dtype(fields))


def _dtype(fields: Fields) -> str:
    dtype = fields.text("dtype")
    try:
        itemsize(dtype)
    except KeyError:
        raise CheckpointError(f"{fields.where}: unknown dtype {short(dtype)}") from None
    return dtype


def file_of(fields: Fields) -> ShardFile:
    """A file whose fields have the right types and forms."""
    return ShardFile(
        name=fields.text("name", _SHARD),
        nbytes=fields.integer("nbytes"),
        frame=fields.text("frame", _CHECKSUM),
    )


def slice_of(fields: Fields) -> Slice:
    """A slice whose fields have the right types and forms; `check` judges its place."""
    piece = Slice(
        variable=fields.text("variable"),
        file=fields.text("file", _SHARD),
        dataset=fields.text("dataset", _DATASET),
        offset=fields.integer("offset"),
        start=fields.integers("start"),
        shape=fields.integers("shape"),
        dtype=_dtype(fields),
        checksum=fields.text("checksum", _CHECKSUM),
    )
    if len(piece.start) != len(piece.shape):
        raise CheckpointError(f"{fields.where}: start {piece.start} and shape {piece.shape} differ")
    return piece


# -- do the slices make up the variables? -------------------------------------------------------


def check(checkpoint: Checkpoint, where: str) -> None:
    """Raise unless slices lie within files, apart from each other, and cover the variables."""
    _check_places(checkpoint, where)
    boxes: dict[str, list[Box]] = defaultdict(list)
    for piece in checkpoint.slices:
        boxes[piece.variable].append(piece.box)
    for variable in checkpoint.variables:
        _check_cover(variable, boxes.pop(variable.name, []), where)
    if boxes:
        raise CheckpointError(f"{where}: slices of {min(boxes)!r}, which is none of its variables")


def _check_places(checkpoint: Checkpoint, where: str) -> None:
    ends = _unique(where, "file", [(f.name, f.nbytes) for f in checkpoint.files])
    dtypes = _unique(where, "variable", [(v.name, v.dtype) for v in checkpoint.variables])
    reached: dict[str, int] = {}
    for piece in sorted(checkpoint.slices, key=lambda piece: (piece.file, piece.offset)):
        name = f"{where}: {piece.file}:{piece.dataset} of {piece.variable!r}"
        if piece.variable not in dtypes or piece.file not in ends:
            raise CheckpointError(f"{name}: no such variable or file in the checkpoint")
        if piece.dtype != dtypes[piece.variable]:
            raise CheckpointError(
                f"{name}: dtype {piece.dtype}, the variable has {dtypes[piece.variable]}"
            )
        stop = piece.offset + piece.nbytes
        if not reached.get(piece.file, 0) <= piece.offset < stop <= ends[piece.file]:
            raise CheckpointError(
                f"{name}: lies at bytes {piece.offset} to {stop}; it must lie between "
                f"{reached.get(piece.file, 0)}, where the one before it ends, and "
                f"{ends[piece.file]}, where the file ends"
            )
        reached[piece.file] = stop


def _unique(where: str, what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise CheckpointError(f"{where}: a {what} is listed twice")
    return table


def _check_cover(variable: SavedVariable, boxes: list[Box], where: str) -> None:
    """Raise unless `boxes`, a grid as every layout gives one, hold each element exactly once."""
    problem = _uncovered(boxes, variable.shape, 0) if prod(variable.shape) or boxes else ""
    if problem:
        raise CheckpointError(f"{where}: {variable.name!r} of shape {variable.shape}: {problem}")


def _uncovered(boxes: Sequence[Box], shape: tuple[int, ...], dim: int) -> str:
    if any(len(box) != len(shape) for box in boxes):
        return "a slice has another number of dims"
    if dim == len(shape):
        return "" if len(boxes) == 1 else f"{len(boxes)} slices hold the same part"
    reached = 0
    for (start, stop), group in groupby(sorted(boxes, key=_at(dim)), key=_at(dim)):
        if start != reached:
            kind = "gap" if start > reached else "overlap"
            low, high = sorted((start, reached))
            return f"{kind} from {low} to {high} of dim {dim}"
        problem = _uncovered(list(group), shape, dim + 1)
        if problem:
            return f"{problem}, within {start} to {stop} of dim {dim}"
        reached = stop
    if reached != shape[dim]:
        kind = "gap" if reached < shape[dim] else "beyond the end"
        low, high = sorted((reached, shape[dim]))
        return f"{kind}: {low} to {high} of dim {dim}"
    return ""


def _at(dim: int) -> Callable[[Box], tuple[int, int]]:
    return lambda box: box[dim]
