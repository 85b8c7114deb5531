"""Which file, or which checkpoint, a path names."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box, box_shape
from mpiflow.io.checkpoint.manifest import load
from mpiflow.io.checkpoint.read import CheckpointReader, newest
from mpiflow.io.checkpoint.records import MANIFEST, Checkpoint, folder_place
from mpiflow.io.weights.npz import Npz
from mpiflow.io.weights.safetensors import INDEX, Safetensors, Sharded
from mpiflow.io.weights.tensors import TensorInfo, Tensors

_FILE = "model.safetensors"


class Saved(Tensors):
    """The variables of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path)
        self.checkpoint = checkpoint
        self._reader = CheckpointReader(checkpoint)
        self.tensors = {v.name: TensorInfo(v.name, v.shape, v.dtype) for v in checkpoint.variables}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A new array: the part `box` of a variable, whose checksums are right."""
        dtype = self.tensors[name].dtype
        if dtype == "bfloat16":
            raise CheckpointError(f"{self.path}: {name} is bfloat16, which cannot be read here")
        out = np.empty(box_shape(box), dtype)
        self._reader.restore(name, box, out)
        return out

    def digest(self) -> str:
        """A hash of the manifest, which has a checksum of every slice."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()

    def close(self) -> None:
        """Close every file."""
        self._reader.__exit__(None, None, None)


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest complete one of the run there."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run or one of its checkpoints")
    if folder_place(path) or (path / MANIFEST).exists():
        return load(path)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found, skipped = newest(folder)
    if found is None:
        raise CheckpointError(
            f"{path}: holds no complete checkpoint" + "".join(f"\n  {line}" for line in skipped)
        )
    return found


def open_tensors(path: Path) -> Tensors:
    """The tensors of a .safetensors or .npz file, of a folder of them, or of a run."""
    if path.is_dir():
        if (path / (_FILE + INDEX)).exists():
            return Sharded(path / (_FILE + INDEX))
        if (path / _FILE).exists():
            return Safetensors(path / _FILE)
        return Saved(find_checkpoint(path))
    if not path.exists():
        raise CheckpointError(f"{path}: no such file (in {Path.cwd()})")
    if path.name.endswith(INDEX):
        return Sharded(path)
    kinds = {".safetensors": Safetensors, ".npz": Npz}
    if path.suffix not in kinds:
        raise CheckpointError(
            f"{path}: weights are read from .safetensors, .npz, a folder of {_FILE}, a run or a"
            " checkpoint"
        )
    return kinds[path.suffix](path)
