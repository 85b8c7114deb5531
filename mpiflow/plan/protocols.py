"""What execution asks of input and output; `io` implements it, `train` joins the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Reader(Protocol):
    """Gives the rows of a data set, batch by batch. Called on the read stream's thread."""

    reading: str
    """The file and row that is being read; empty where nothing is read from files."""

    def read(self, step: int, rows: tuple[int, int], out: Mapping[str, Any]) -> None:
        """Write rows [start, stop) of batch `step` into `out[field]`, shape (stop - start, ...).

        `step` counts batches from the start of epoch 0 for training, of the pass for evaluation.
        """

    def describe(self, step: int, row: int) -> str:
        """Where row `row` of batch `step` is stored: file and row, for messages."""


class Writer(Protocol):
    """Takes slices of variables, or rows of outputs. Called on the write stream's thread."""

    def write(self, variable: str, start: tuple[int, ...], array: Any) -> None:
        """Store `array` as the part of `variable` that begins at `start`."""

    def finish(self) -> None:
        """All slices of this rank are there: make them last."""
