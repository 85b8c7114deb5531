"""What reading costs: the rows of batches, by the reader that training uses, all ranks at once."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpiflow.calibration.fit import Fit, fit_line, fit_of
from mpiflow.io.dataset import inspect, open_reader
from mpiflow.io.pack import pack

_ROW = 3 << 10
"""Bytes: an image of 32 x 32 pixels in three channels."""
_BATCHES = (4, 32, 256)
_EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Storage:
    """Seconds of a read request, bytes a second of one rank while all read, and how good it is."""

    latency: float
    bandwidth: float
    fit: Fit


def write_rows(folder: Path, *, quick: bool) -> int:
    """Pack rows into files in `folder`, and have them stored; gives their bytes. One rank only."""
    rows = (16 << 20 if quick else 64 << 20) // _ROW
    image = np.random.default_rng(0).integers(0, 256, (rows, _ROW), np.uint8)
    pack({"image": image}, f"{folder}/rows-*.h5", shards=[rows // 2, rows - rows // 2])
    return image.nbytes


def forget_pages(folder: Path) -> None:
    """Let the system drop what it keeps of the files, as far as it does."""
    for path in folder.glob("rows-*.h5"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_reads(folder: Path, *, forget: bool) -> list[tuple[float, float]]:
    """Bytes and seconds of a batch of some sizes, the mean over whole epochs of shuffled rows."""
    points = []
    for batch in _BATCHES:
        seconds = []
        for epoch in range(_EPOCHS):
            if forget:
                forget_pages(folder)
            seconds.append(_epoch(folder, batch, seed=epoch))
        points.append((float(batch * _ROW), statistics.median(seconds)))
    return points


def _epoch(folder: Path, batch: int, seed: int) -> float:
    """Seconds of a batch, blocks of rows that are read ahead included."""
    data = inspect(
        "train", "rows-*.h5", folder, batch=batch, shuffle=True, seed=seed, lanes=4, window=4,
        fields=None, rows=None, drop=True,
    )  # fmt: skip
    reader = open_reader(data, folder)
    out = {"image": np.empty((batch, _ROW), np.uint8)}
    steps = data.rows // batch
    began = time.perf_counter()
    for step in range(steps):
        reader.read(step, (0, batch), out)
    seconds = time.perf_counter() - began
    reader.close()
    return seconds / steps


def fit_storage(points: list[tuple[float, float]]) -> Storage:
    """Latency and bandwidth of reads; a latency that is not to be seen is none."""
    nbytes, seconds = zip(*points, strict=True)
    latency, each = fit_line(nbytes, seconds)
    fit = fit_of([latency + each * n for n in nbytes], seconds)
    return Storage(latency, 1 / max(each, 1e-15), fit)
