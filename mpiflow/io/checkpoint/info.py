"""What `mpiflow checkpoint info PATH` tells: of a run, a folder of checkpoints, or one of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from mpiflow.errors import CheckpointError
from mpiflow.io.checkpoint.manifest import load
from mpiflow.io.checkpoint.read import verify
from mpiflow.io.checkpoint.records import MANIFEST, Checkpoint, folder_place, scan


def info(path: Path, *, deep: bool = False) -> dict[str, Any]:
    """Everything about the checkpoints at `path`, as JSON; `deep=True` also hashes every byte.

    {"folder": ..., "checkpoints": [...]}, newest first; each has path, complete and faults, and
    where the manifest can be read also its content in short.
    """
    folder, paths = _find(path)
    return {"folder": str(folder), "checkpoints": [_one(found, deep) for found in paths]}


def describe(path: Path, *, deep: bool = False) -> str:
    """`info` as text to read."""
    found = info(path, deep=deep)
    if not found["checkpoints"]:
        return f"{found['folder']}: no checkpoints\n"
    return "\n".join(_text(checkpoint) for checkpoint in found["checkpoints"])


def _find(path: Path) -> tuple[Path, list[Path]]:
    """The folder that is meant, and its checkpoints, newest first."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such folder; give a run, its checkpoints folder, or one checkpoint"
        )
    if folder_place(path) or (path / MANIFEST).exists():
        return path, [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return folder, [found for _, _, found in scan(folder)]


def _one(path: Path, deep: bool) -> dict[str, Any]:
    try:
        checkpoint = load(path)
    except CheckpointError as problem:
        return {"path": str(path), "complete": False, "faults": [str(problem)]}
    faults = verify(checkpoint) if deep else []
    return {"path": str(path), "complete": not faults, "faults": faults, **_content(checkpoint)}


def _content(checkpoint: Checkpoint) -> dict[str, Any]:
    slices = Counter(piece.variable for piece in checkpoint.slices)
    return {
        "job": checkpoint.job,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "ranks": checkpoint.ranks,
        "digest": checkpoint.digest,
        "program": checkpoint.program,
        "identity": dict(checkpoint.identity),
        "state": checkpoint.state,
        "bytes": checkpoint.nbytes,
        "files": {file.name: file.nbytes for file in checkpoint.files},
        "variables": [
            {
                "name": variable.name,
                "shape": list(variable.shape),
                "dtype": variable.dtype,
                "slices": slices[variable.name],
                "bytes": variable.nbytes,
            }
            for variable in checkpoint.variables
        ],
    }


def _text(one: dict[str, Any]) -> str:
    lines = [f"{one['path']}: {'complete' if one['complete'] else 'not complete'}"]
    lines += [f"  fault: {fault}" for fault in one["faults"]]
    if "step" not in one:
        return "\n".join(lines) + "\n"
    lines += [
        f"  job {one['job']}, step {one['step']}, epoch {one['epoch']}, "
        f"written by {one['ranks']} ranks",
        f"  {one['bytes']} bytes in {len(one['files'])} files",
        f"  plan    {one['digest']}",
        f"  program {one['program']}",
        *_table(one["variables"]),
    ]
    return "\n".join(lines) + "\n"


def _table(variables: list[dict[str, Any]]) -> list[str]:
    rows = [("variable", "dtype", "shape", "slices", "bytes")] + [
        (v["name"], v["dtype"], str(tuple(v["shape"])), str(v["slices"]), str(v["bytes"]))
        for v in variables
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
