"""From a checkpoint to a file of weights: one variable in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from mpiflow.errors import CheckpointError, UsageError
from mpiflow.io.checkpoint.records import Checkpoint
from mpiflow.io.weights import npz, safetensors
from mpiflow.io.weights.first import AVERAGE, is_of_model
from mpiflow.io.weights.names import NameMap
from mpiflow.io.weights.pattern import parse_pattern
from mpiflow.io.weights.source import Saved
from mpiflow.io.weights.tensors import TensorInfo
from mpiflow.plan.first import Filled
from mpiflow.plan.slice import itemsize

_SUFFIXES = (".safetensors", ".npz")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: tensors and bytes, and the variables that were left out."""

    tensors: int
    nbytes: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The tensors that a variable is written as; `source` is the variable that is read."""

    source: TensorInfo
    filled: Filled
    tensors: tuple[TensorInfo, ...]


def export(
    checkpoint: Checkpoint,
    out: Path,
    names: NameMap,
    *,
    average: bool = False,
    everything: bool = False,
) -> Exported:
    """Write the variables of the model to a .safetensors or .npz file, by the names of a map.

    `average` writes NAME.average in the place of NAME where there is one; `everything` also what
    the optimizer keeps.
    """
    if out.suffix not in _SUFFIXES:
        raise UsageError(f"-o {out}: weights are written to {' or '.join(_SUFFIXES)}")
    with Saved(checkpoint) as saved:
        chosen = [name for name in saved.tensors if everything or is_of_model(name, saved.tensors)]
        if average and not any(f"{name}.{AVERAGE}" in saved.tensors for name in chosen):
            raise CheckpointError(
                f"{checkpoint.path}: holds no averages; optimizers keep them with ema="
            )
        pieces = [_piece(_read_from(saved, name, average), name, names) for name in chosen]
        if not pieces:
            raise CheckpointError(f"{checkpoint.path}: holds no variable of a model")
        # Large elements first, so that each tensor of the file is aligned.
        pieces.sort(key=lambda piece: -itemsize(piece.source.dtype))
        infos = [info for piece in pieces for info in piece.tensors]
        _check_unique(infos, names)
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".npz":
            npz.write(out, infos, _arrays(saved, pieces))
        else:
            safetensors.write(out, infos, _arrays(saved, pieces), _metadata(checkpoint))
    nbytes = sum(prod(info.shape) * itemsize(info.dtype) for info in infos)
    kept = set(chosen) | {piece.source.name for piece in pieces}
    return Exported(len(infos), nbytes, tuple(n for n in saved.tensors if n not in kept))


def _read_from(saved: Saved, name: str, average: bool) -> TensorInfo:
    other = f"{name}.{AVERAGE}"
    return saved.tensors[other if average and other in saved.tensors else name]


def _piece(source: TensorInfo, name: str, names: NameMap) -> _Piece:
    candidates = names.candidates(name)
    if not candidates:
        raise CheckpointError(f"{names.name} has no name for {name}: {source}")
    filled = candidates[0]
    if not filled.pattern:
        return _Piece(source, filled, (replace(source, name=filled.tensors[0]),))
    pattern = parse_pattern(filled.pattern)
    try:
        each = pattern.reversed_sizes(source.shape, dict(filled.sizes), filled.join, filled.parts)
    except CheckpointError as problem:
        raise CheckpointError(f"{names.name}: {name}, {source}: {problem}") from None
    tensors = tuple(
        TensorInfo(tensor, tuple(prod(sizes[x] for x in dim) for dim in pattern.theirs),
                   source.dtype)
        for tensor, sizes in zip(filled.tensors, each, strict=True)
    )  # fmt: skip
    return _Piece(source, filled, tensors)


def _check_unique(infos: list[TensorInfo], names: NameMap) -> None:
    seen: set[str] = set()
    for info in infos:
        if info.name in seen:
            raise CheckpointError(f"{names.name}: two variables would be written as {info.name}")
        seen.add(info.name)


def _arrays(saved: Saved, pieces: list[_Piece]) -> Iterator[np.ndarray]:
    for piece in pieces:
        source, filled = piece.source, piece.filled
        array = saved.read(source.name, tuple((0, size) for size in source.shape))
        if not filled.pattern:
            yield array
            continue
        pattern = parse_pattern(filled.pattern)
        sizes = dict(filled.sizes)
        each = pattern.reversed_sizes(source.shape, sizes, filled.join, filled.parts)
        yield from pattern.parted(array, each, filled.join)


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """What the file says about itself; Hugging Face's loaders ask for a `format` that they know."""
    return {
        "format": "pt",
        "job": checkpoint.job,
        "step": str(checkpoint.step),
        "program": checkpoint.program,
    }
