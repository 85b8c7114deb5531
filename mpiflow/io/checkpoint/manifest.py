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
from mpiflow.io.checkpoint.fields import Fields, are_sizes, is_size, matches, short
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
_DATASET = "slice-"
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
        checkpoint = parse(manifest.read_text("utf-8"), path, str(manifest))
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
    """The manifest: JSON, one line an item, ending with a checksum over all before it.

        "files": [[name, bytes, frame], ...]
        "variables": [[name, dtype, shape, [slice, ...]], ...]

    and a slice is [file, dataset, offset, start, shape, checksum], its file and dataset by number.
    """
    numbers = {file.name: number for number, file in enumerate(checkpoint.files)}
    slices: dict[str, list[Any]] = {variable.name: [] for variable in checkpoint.variables}
    for piece in checkpoint.slices:
        slices[piece.variable].append([numbers[piece.file], *slice_row(piece)])
    body: dict[str, Any] = {key: getattr(checkpoint, key) for key in _HEADER}
    body["files"] = [[file.name, file.nbytes, file.frame] for file in checkpoint.files]
    body["variables"] = [[v.name, v.dtype, v.shape, slices[v.name]] for v in checkpoint.variables]
    try:
        return _sealed({"format": FORMAT, **body})
    except (TypeError, ValueError) as problem:
        raise CheckpointError(f"the state to save is not plain JSON: {problem}") from problem


_HEADER = ("job", "step", "epoch", "ranks", "digest", "program", "identity", "state")


def slice_row(piece: Slice) -> list[Any]:
    """A slice as a list, but for its file, variable and dtype."""
    number = int(piece.dataset.removeprefix(_DATASET))
    return [number, piece.offset, piece.start, piece.shape, piece.checksum]


def _sealed(body: dict[str, Any]) -> str:
    """The text of a manifest of this content."""
    items = (f"{json.dumps(key)}: {_value_text(value)}" for key, value in body.items())
    text = "{\n" + ",\n".join(items)
    return f"{text}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}{_END}"


_SEAL, _END = ',\n"checksum": "', '"\n}\n'


def _value_text(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n " + ",\n ".join(json.dumps(item, separators=(",", ":")) for item in value) + "\n]"


# -- reading what is not trusted ----------------------------------------------------------------


def parse(text: str, path: Path, where: str) -> Checkpoint:
    """The checkpoint that a manifest describes; every name, size and offset in it is checked."""
    fields = Fields(json.loads(text), where)
    version = fields.integer("format")
    if version != FORMAT:
        raise CheckpointError(f"{where}: format {version}, this mpiflow reads format {FORMAT}")
    body, _, checksum = text.rpartition(_SEAL)
    if checksum != hashlib.sha256(body.encode()).hexdigest() + _END:
        raise CheckpointError(f"{where}: damaged, its content does not match its checksum")
    files = tuple(file_of(row, where) for row in fields.items("files"))
    names = [file.name for file in files]
    variables, slices = [], []
    for row in fields.items("variables"):
        variable, rows = _variable(row, where)
        variables.append(variable)
        slices += [slice_of(row, variable.name, variable.dtype, names, where) for row in rows]
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
        variables=tuple(variables),
        files=files,
        slices=tuple(slices),
    )
    check(checkpoint, where)
    return checkpoint


def _pair(item: Any, where: str) -> tuple[str, str]:
    if not (isinstance(item, list) and len(item) == 2 and all(type(v) is str for v in item)):
        raise CheckpointError(f"{where}: 'identity' holds {short(item)}, not two strings")
    return item[0], item[1]


def file_of(row: Any, where: str) -> ShardFile:
    """The file of which a list tells [name, bytes, frame]."""
    match row:
        case [name, size, frame] if (
            matches(name, _SHARD) and is_size(size) and matches(frame, _CHECKSUM)
        ):
            return ShardFile(name, size, frame)
    raise CheckpointError(f"{where}: file {short(row)} is not [name, bytes, frame]")


def _variable(row: Any, where: str) -> tuple[SavedVariable, list[Any]]:
    """The variable of which a list tells [name, dtype, shape, slices], and the slices."""
    match row:
        case [str(name), str(dtype), shape, [*slices]] if name.isprintable() and are_sizes(shape):
            _check_dtype(dtype, where)
            return SavedVariable(name, tuple(shape), dtype), slices
    raise CheckpointError(f"{where}: variable {short(row)} is not [name, dtype, shape, slices]")


def _check_dtype(dtype: str, where: str) -> None:
    try:
        itemsize(dtype)
    except KeyError:
        raise CheckpointError(f"{where}: unknown dtype {short(dtype)}") from None


def slice_of(row: Any, variable: str, dtype: str, files: list[str], where: str) -> Slice:
    """The slice of which a list tells [file, dataset, offset, start, shape, checksum].

    `check` judges its place.
    """
    match row:
        case [file, number, offset, start, shape, checksum] if (
            is_size(file)
            and file < len(files)
            and is_size(number)
            and is_size(offset)
            and are_sizes(start)
            and are_sizes(shape)
            and len(start) == len(shape)
            and matches(checksum, _CHECKSUM)
        ):
            return Slice(
                variable, files[file], f"{_DATASET}{number}", offset, tuple(start), tuple(shape),
                dtype, checksum,
            )  # fmt: skip
    raise CheckpointError(
        f"{where}: slice {short(row)} of {variable!r} is not [file, dataset, offset, start, shape, "
        f"checksum] with a file below {len(files)}"
    )


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
        problem = ""
        start, stop = reached.get(piece.file, 0), piece.offset + piece.nbytes
        if piece.variable not in dtypes or piece.file not in ends:
            problem = "no such variable or file in the checkpoint"
        elif piece.dtype != dtypes[piece.variable]:
            problem = f"dtype {piece.dtype}, the variable has {dtypes[piece.variable]}"
        elif not start <= piece.offset < stop <= ends[piece.file]:
            problem = (
                f"lies at bytes {piece.offset} to {stop}; it must lie between {start}, where the "
                f"one before it ends, and {ends[piece.file]}, where the file ends"
            )
        if problem:
            name = f"{piece.file}:{piece.dataset} of {piece.variable!r}"
            raise CheckpointError(f"{where}: {name}: {problem}")
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
    if len(boxes) == 1 and boxes[0][dim:] == tuple((0, size) for size in shape[dim:]):
        return ""
    if dim == len(shape):
        return f"{len(boxes)} slices hold the same part"
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
