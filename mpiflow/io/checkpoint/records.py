"""What a checkpoint holds, as records, and the names of the folders that saving leaves.

RUN/checkpoints/step-00000040/            complete; renamed to this name last
                step-00000050.partial/    being written, or left by a killed run
                step-00000040.replaced/   older one of the same step, while the new one arrives
                step-00000020.removed/    being deleted
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box
from mpiflow.plan.slice import itemsize

MANIFEST = "manifest.json"
PARTIAL, REPLACED, REMOVED = ".partial", ".replaced", ".removed"

_FOLDER = re.compile(r"step-(\d{8,18})(\.partial|\.replaced|\.removed)?")


@dataclass(frozen=True, slots=True)
class SavedVariable:
    """A logical variable in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of `variable`: `dataset` of `file`, whose bytes begin at `offset`, little-endian."""

    variable: str
    file: str
    dataset: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * itemsize(self.dtype)

    @property
    def box(self) -> Box:
        """(start, stop) of each dim of the variable."""
        return tuple((first, first + n) for first, n in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of a checkpoint; `frame` is the hash of its bytes outside of the slices."""

    name: str
    nbytes: int
    frame: str


@dataclass(frozen=True, slots=True)
class Header:
    """What a run says about the moment that it saves.

    `digest` is the plan's, `program` the program's, `identity` the sections behind the latter.
    `state` is the caller's, JSON values only: sampler position, best metric, patience.
    """

    job: str
    step: int
    epoch: int
    digest: str
    program: str
    identity: tuple[tuple[str, str], ...]
    variables: tuple[SavedVariable, ...]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint(Header):
    """A complete checkpoint in the folder `path`, written by a job of `ranks` ranks."""

    path: Path
    ranks: int
    files: tuple[ShardFile, ...]
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the shard files."""
        return sum(file.nbytes for file in self.files)

    def variable(self, name: str) -> SavedVariable | None:
        """The variable of that name, if it was saved."""
        return next((v for v in self.variables if v.name == name), None)


def step_name(step: int) -> str:
    """The name of the folder of a step."""
    return f"step-{step:08d}"


def folder_place(path: Path) -> tuple[int, str] | None:
    """(step, suffix) that a folder's name tells, if it is one that saving gives."""
    match = _FOLDER.fullmatch(path.name)
    return (int(match[1]), match[2] or "") if match else None


def scan(folder: Path) -> list[tuple[int, str, Path]]:
    """(step, suffix, path) of everything that saving left in `folder`, newest step first.

    The suffix is empty for the final name, which comes before the others of its step.
    """
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise CheckpointError(f"{folder}: cannot be listed: {problem.strerror}") from problem
    found = [(*place, path) for path in entries if (place := folder_place(path))]
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))
