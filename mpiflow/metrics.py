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


def cut(path: Path, step: int) -> int:
    """Drop the rows after `step`, and the last object of a run; gives how many rows were dropped.

    A line that a killed run left half written is dropped too.
    """
    if not path.exists():
        return 0
    kept, dropped = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            keep = isinstance(row, dict) and row.get("step", step + 1) <= step
        except json.JSONDecodeError:
            keep = False
        if keep:
            kept.append(line + "\n")
        else:
            dropped += 1
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)
    return dropped
