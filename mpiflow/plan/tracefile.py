"""What one rank recorded of some steps of a program, as a file: arrays, and a header in JSON.

    run/digits/trace/rank-00003.npz     header   bytes of JSON: who, which steps, which firings
                                        times    (steps, firings, 2): start and stop
                                        steps    (steps, 2): when each step began and ended

Times are seconds of the rank's own clock; those of the ranks of a host are the same, and `clock`
says how that of the host differs from that of rank 0. A firing that was not seen has NaN.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpiflow.errors import DataError

FOLDER = "trace"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Offset:
    """At local time `at`, this clock was `ahead` seconds before that of rank 0, give or take."""

    at: float
    ahead: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class Clock:
    """How a clock differs from that of rank 0: what was found before the steps, and after."""

    before: Offset
    after: Offset

    @property
    def uncertainty(self) -> float:
        """Seconds by which an aligned time may be wrong."""
        return max(self.before.uncertainty, self.after.uncertainty)

    def aligned(self, times: np.ndarray) -> np.ndarray:
        """Local times as the clock of rank 0 has them; what it gains on the way is linear."""
        span = self.after.at - self.before.at
        gained = (self.after.ahead - self.before.ahead) / span if span > 0 else 0.0
        return times - (self.before.ahead + gained * (times - self.before.at))


SAME = Clock(Offset(0.0, 0.0, 0.0), Offset(0.0, 0.0, 0.0))
"""The clock of rank 0, and of every rank of its host."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Some steps of a rank. `first` is the number of the first, counted from 1.

    `firings` are (task, micro-batch), `times` their start and stop in each step.
    """

    rank: int
    host: str
    program: str
    digest: str
    first: int
    firings: tuple[tuple[str, int], ...]
    times: np.ndarray
    steps: np.ndarray
    clock: Clock = SAME

    def save(self, folder: Path) -> Path:
        """Write it to a run's folder of traces; the file appears when it is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file_name(self.rank)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        header = {
            "format": _FORMAT, "rank": self.rank, "host": self.host, "program": self.program,
            "digest": self.digest, "first": self.first, "firings": self.firings,
            "clock": [_plain(self.clock.before), _plain(self.clock.after)],
        }  # fmt: skip
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        try:
            with part.open("wb") as file:
                np.savez(file, header=text, times=self.times, steps=self.steps)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path


def _plain(offset: Offset) -> list[float]:
    return [offset.at, offset.ahead, offset.uncertainty]


def file_name(rank: int) -> str:
    """The name of the file of a rank."""
    return f"rank-{rank:05}.npz"


def recorded_ranks(folder: Path) -> dict[int, Path]:
    """The files in a folder of traces, by rank. What is named otherwise is none."""
    names = ((path, path.stem.removeprefix("rank-")) for path in folder.glob("rank-*.npz"))
    return dict(sorted((int(name), path) for path, name in names if name.isdecimal()))


def load(path: Path) -> RankTrace:
    """The trace in a file. DataError where it is none, or is not what its header says."""
    try:
        # Opened here, as NumPy leaves a file open in which it does not find an archive.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays: Mapping[str, np.ndarray] = {name: file[name] for name in file.files}
        header = json.loads(arrays["header"].tobytes())
        made = _trace(header, arrays["times"], arrays["steps"])
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as problem:
        raise DataError(f"{path}: not a trace of a rank: {problem}") from problem
    wanted = (len(made.steps), len(made.firings), 2), (len(made.times), 2)
    if (made.times.shape, made.steps.shape) != wanted or made.times.dtype != np.float64:
        raise DataError(
            f"{path}: has times of shape {made.times.shape} and {made.times.dtype} for"
            f" {len(made.firings)} firings in {len(made.steps)} steps; record it again"
        )
    return made


def _trace(header: dict[str, Any], times: np.ndarray, steps: np.ndarray) -> RankTrace:
    if header["format"] != _FORMAT:
        raise ValueError(f"format {header['format']}, this mpiflow reads {_FORMAT}")
    before, after = (Offset(*map(float, each)) for each in header["clock"])
    return RankTrace(
        int(header["rank"]),
        str(header["host"]),
        str(header["program"]),
        str(header["digest"]),
        int(header["first"]),
        tuple((str(name), int(micro)) for name, micro in header["firings"]),
        times,
        steps,
        Clock(before, after),
    )
