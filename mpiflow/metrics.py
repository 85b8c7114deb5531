"""metrics.jsonl: one JSON object a training step, one an evaluation, and one at the end."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

_FLUSH_SECONDS = 1.0


class Metrics:
    """Appends to the file of a run. Rows are on the disk at the latest when a save begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._flushed = time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        """Append one row."""
        self._file.write(json.dumps(row) + "\n")
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def sync(self) -> None:
        """Put everything on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Put everything on the disk and close the file."""
        self.sync()
        self._file.close()


def cut(path: Path, step: int, *, evaluations: bool = True) -> int:
    """Drop the rows after `step`, and the last object of a run; gives how many steps that were.

    A line that a killed run left half written is dropped too, and without `evaluations` those
    that were made after `step` itself.
    """
    if not path.exists():
        return 0
    kept, dropped = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        row = _row(line)
        at = row.get("step", step + 1)
        if at < step or (at == step and (evaluations or "evaluation" not in row)):
            kept.append(line + "\n")
        else:
            dropped += "seconds" in row
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
    return dropped


def ended(path: Path, step: int) -> bool:
    """Whether the file is that of a run which came to its end after `step`."""
    if not path.exists():
        return False
    rows = [_row(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return len(rows) > 1 and "peak_bytes" in rows[-1] and rows[-2].get("step") == step


def _row(line: str) -> dict[str, Any]:
    """The object of a line; an empty one where the line is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
