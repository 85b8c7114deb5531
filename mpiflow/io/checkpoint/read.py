"""Reading checkpoints: which one to go on from, whether it fits the plan, and its bytes.

    newest ── require_program ── require_variables ── CheckpointReader.restore, per variable
    rank 0    every rank, or rank 0 for all           every rank, for its own shard

A rank reads only the slices that its box meets, in blocks, whatever ranks and layout wrote them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box, box_shape
from mpiflow.io.checkpoint.manifest import load
from mpiflow.io.checkpoint.rawfile import ShardFiles, byte_view
from mpiflow.io.checkpoint.records import REMOVED, Checkpoint, SavedVariable, Slice, scan
from mpiflow.plan.records import Register

_BLOCK = 8 << 20


def newest(folder: Path, *, deep: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint in `folder`, and what was skipped before it and why.

    Complete means by manifest and file sizes; `deep=True` also reads and hashes every byte.
    """
    skipped: list[str] = []
    for _, suffix, path in scan(folder):
        if suffix == REMOVED:
            continue
        try:
            checkpoint = load(path)
            faults = verify(checkpoint) if deep else []
        except CheckpointError as problem:
            faults = [str(problem)]
        if not faults:
            return checkpoint, skipped
        skipped += faults
    return None, skipped


def verify(checkpoint: Checkpoint) -> list[str]:
    """Everything wrong with the bytes of a checkpoint; each byte of each file is looked at."""
    faults = []
    slices = defaultdict(list)
    for piece in checkpoint.slices:
        slices[piece.file].append(piece)
    for file in checkpoint.files:
        with CheckpointReader(checkpoint) as reader:
            try:
                for piece in slices[file.name]:
                    reader.check(piece)
                reader.check_frame(file.name, file.frame, slices[file.name])
            except CheckpointError as problem:
                faults.append(str(problem))
    return faults


def require_program(
    checkpoint: Checkpoint,
    identity: tuple[tuple[str, str], ...],
    program: str,
    accept_changes: bool,
) -> list[str]:
    """The differences between the program that saved and the plan's; raises unless accepted."""
    if checkpoint.program == program:
        return []
    old, new = dict(checkpoint.identity), dict(identity)
    differences = [
        _difference(section, old.get(section), new.get(section))
        for section in [*new, *(section for section in old if section not in new)]
        if old.get(section) != new.get(section)
    ]
    if not accept_changes:
        lines = differences or ["the sections are equal; one of the digests is not theirs"]
        raise CheckpointError(
            f"{checkpoint.path}: saved by another program\n"
            f"  program digest: {checkpoint.program} in the checkpoint, {program} in the plan\n"
            + "".join(f"  {line}\n" for line in lines)
            + "  go on with the plan's values by --accept-changes, or start anew with --fresh"
        )
    return differences


def _difference(section: str, old: str | None, new: str | None) -> str:
    """One line on a section that differs: both values, or where long ones begin to differ."""
    if old is None or new is None:
        return f"{section}: only in the {'plan' if old is None else 'checkpoint'}"
    pairs = list(zip(old.splitlines(), new.splitlines(), strict=False))
    line = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    at = f"{section}, line {line + 1}" if "\n" in old + new else section
    a, b = _window(_line(old, line), _line(new, line))
    return f"{at}: {a} in the checkpoint, {b} in the plan"


def _line(text: str, index: int) -> str:
    lines = text.splitlines()
    return lines[index] if index < len(lines) else ""


def _window(a: str, b: str, width: int = 80) -> tuple[str, str]:
    """Both texts quoted, cut to `width` characters around the first that differs."""
    differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    start = max(0, differs - width // 2) if max(len(a), len(b)) > width else 0
    return _quoted(a, start, width), _quoted(b, start, width)


def _quoted(text: str, start: int, width: int) -> str:
    before, after = "..." * (start > 0), "..." * (start + width < len(text))
    return before + ascii(text[start : start + width]) + after


def require_variables(
    checkpoint: Checkpoint, variables: Iterable[Register | SavedVariable]
) -> list[str]:
    """Raise unless every variable of the plan was saved with its shape and dtype.

    Gives the names that the checkpoint holds and the plan does not use.
    """
    saved = {variable.name: variable for variable in checkpoint.variables}
    faults = []
    for variable in variables:
        found = saved.pop(variable.name, None)
        if found is None:
            faults.append(f"{variable.name}: not in the checkpoint")
        elif (found.shape, found.dtype) != (variable.shape, variable.dtype):
            faults.append(
                f"{variable.name}: {found.dtype} {found.shape} in the checkpoint, "
                f"{variable.dtype} {variable.shape} in the plan"
            )
    if faults:
        raise CheckpointError(
            f"{checkpoint.path}: does not hold the variables of this plan\n  "
            + "\n  ".join(faults)
            + "\n  plan the job that saved it, or start anew with --fresh"
        )
    return list(saved)


def restore(checkpoint: Checkpoint, variable: str, box: Box, out: np.ndarray) -> None:
    """`CheckpointReader.restore` of a single variable."""
    with CheckpointReader(checkpoint) as reader:
        reader.restore(variable, box, out)


class CheckpointReader:
    """Reads parts of variables. Holds a few files open; use it in a `with` statement."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = ShardFiles(checkpoint.path, checkpoint.files)
        self._variables = {variable.name: variable for variable in checkpoint.variables}
        self._slices: dict[str, list[Slice]] = defaultdict(list)
        for piece in checkpoint.slices:
            self._slices[piece.variable].append(piece)
        self._checked: set[Slice] = set()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._files.close()

    def restore(self, variable: str, box: Box, out: np.ndarray) -> None:
        """Fill `out` with the part `box` of `variable`, from slices whose checksums are right.

        After an error `out` may hold anything.
        """
        self._check_request(variable, box, out)
        target = out if box else out.reshape(1)
        for piece in self._slices[variable]:
            common = _common(_dims(piece.box), _dims(box))
            if common:
                self._copy(piece, common, _dims(box), target)

    def check(self, piece: Slice) -> None:
        """Raise unless the bytes of a slice have its checksum."""
        self._copy(piece, None, (), np.empty(0))

    def check_frame(self, name: str, expected: str, slices: Iterable[Slice]) -> None:
        """Raise unless the bytes of a file around its slices are those that were written."""
        frame = self._files.frame(name, [(piece.offset, piece.nbytes) for piece in slices])
        if frame != expected:
            raise CheckpointError(
                f"{self._checkpoint.path / name}: damaged outside of the slices "
                f"(sha256 {frame}, {expected} expected)"
            )

    def _check_request(self, variable: str, box: Box, out: np.ndarray) -> None:
        where = f"{self._checkpoint.path}: {variable}"
        saved = self._variables.get(variable)
        if saved is None:
            raise CheckpointError(
                f"{where}: no such variable; it holds {', '.join(self._variables) or 'none'}"
            )
        if out.dtype.name != saved.dtype:
            raise CheckpointError(f"{where}: saved as {saved.dtype}, wanted as {out.dtype.name}")
        if len(box) != len(saved.shape) or any(
            not 0 <= start <= stop <= size
            for (start, stop), size in zip(box, saved.shape, strict=True)
        ):
            raise CheckpointError(f"{where}: saved with shape {saved.shape}, {box} lies outside")
        if out.shape != box_shape(box):
            raise CheckpointError(f"{where}: {box} does not fill an array of shape {out.shape}")

    def _copy(self, piece: Slice, common: Box | None, box: Box, out: np.ndarray) -> None:
        """Copy the part `common` of a slice to where it lies in `out`, which is `box`.

        The first time all of the slice is read and hashed; later the rows that are needed.
        """
        base = _dims(piece.box)
        first, last = base[0]
        checked = piece in self._checked
        rows = common[0] if common and checked else (first, last)
        digest = hashlib.sha256()
        for start, block in self._blocks(piece, rows):
            digest.update(byte_view(block))
            here = _common(common, ((start, start + len(block)), *base[1:])) if common else None
            if here:
                out[_within(here, box)] = block[_within(here, ((start, 0), *base[1:]))]
        if not checked and digest.hexdigest() != piece.checksum:
            raise CheckpointError(
                f"{self._checkpoint.path / piece.file}: {piece.dataset}, {piece.variable!r} from "
                f"{piece.start}, is damaged: sha256 {digest.hexdigest()}, {piece.checksum} expected"
            )
        self._checked.add(piece)

    def _blocks(self, piece: Slice, rows: tuple[int, int]) -> Iterator[tuple[int, np.ndarray]]:
        """Rows of dim 0 of a slice, some at a time, each with the logical index of its first."""
        shape = piece.shape or (1,)
        first = _dims(piece.box)[0][0]
        row = piece.nbytes // shape[0]
        count = min(max(1, _BLOCK // row), rows[1] - rows[0])
        buffer = np.empty((count, *shape[1:]), np.dtype(piece.dtype).newbyteorder("<"))
        for start in range(rows[0], rows[1], count):
            block = buffer[: min(count, rows[1] - start)]
            offset = piece.offset + (start - first) * row
            self._files.read_into(piece.file, offset, byte_view(block))
            yield start, block


def _dims(box: Box) -> Box:
    """A box of at least one dim; a scalar is a row of one."""
    return box or ((0, 1),)


def _common(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    box = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _within(box: Box, base: Box) -> tuple[slice, ...]:
    """The index of `box` in an array that begins where `base` does."""
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, base, strict=True)
    )
