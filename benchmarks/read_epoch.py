"""A shuffled epoch against reading the same files in order through h5py.

python benchmarks/read_epoch.py [MEGABYTES]     prints medians of seconds, and their ratio
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import h5py
import numpy as np

from mpiflow.io.dataset import inspect, open_reader
from mpiflow.io.sampler import steps_per_epoch

LAYOUTS = {
    "contiguous": {},
    "chunks of 1 row": {"chunks": (1, 256)},
    "chunks of 64 rows": {"chunks": (64, 256)},
    "chunks of 1024 rows": {"chunks": (1024, 256)},
    "1024 rows, gzip": {"chunks": (1024, 256), "compression": "gzip"},
    "1024 rows, shuffle+gzip": {"chunks": (1024, 256), "compression": "gzip", "shuffle": True},
    "1024 rows, lzf": {"chunks": (1024, 256), "compression": "lzf"},
}
FILES, REPEATS, BATCH = 4, 3, 256


def write(folder: Path, megabytes: int, options: dict) -> None:
    rows = megabytes * 2**20 // 1024 // FILES
    for index in range(FILES):
        ids = np.arange(index * rows, (index + 1) * rows)
        x = (ids[:, None] % 251 + np.arange(256) % 7).astype("f4")
        with h5py.File(folder / f"s{index}.h5", "w") as file:
            file.create_dataset("x", data=x, **options)


def in_order(folder: Path) -> float:
    """Seconds to read all rows in order, a chunk or 1,024 rows at a time."""
    start = time.perf_counter()
    for path in sorted(folder.iterdir()):
        with h5py.File(path) as file:
            step = max(1024, (file["x"].chunks or (0,))[0])
            for row in range(0, len(file["x"]), step):
                file["x"][row : row + step]
    return time.perf_counter() - start


def shuffled(folder: Path) -> tuple[float, float]:
    """Seconds to read a shuffled epoch after the first, and how often each row was decoded."""
    data = inspect("d", "*.h5", folder, batch=BATCH, shuffle=True, seed=0, lanes=8, window=4)
    out = {"x": np.empty((BATCH, 256), "f4")}
    reader = open_reader(data, folder)
    seconds = decoded = 0.0
    for epoch in range(2):
        decoded, start = reader.decoded_bytes, time.perf_counter()
        for step in range(steps_per_epoch(data)):
            reader.read(epoch * steps_per_epoch(data) + step, (0, BATCH), out)
        seconds = time.perf_counter() - start
    reader.close()
    return seconds, (reader.decoded_bytes - decoded) / (1024 * data.rows)


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"{megabytes} MiB in {FILES} files, batch {BATCH}, medians of {REPEATS}")
    print(f"{'layout':24} {'in order':>9} {'shuffled':>9} {'ratio':>6} {'decodes a row':>16}")
    for layout, options in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as name:
            write(Path(name), megabytes, options)
            base = median(in_order(Path(name)) for _ in range(REPEATS))
            runs = [shuffled(Path(name)) for _ in range(REPEATS)]
            seconds = median(run[0] for run in runs)
            print(
                f"{layout:24} {base:8.3f}s {seconds:8.3f}s {seconds / base:6.2f} {runs[0][1]:16.2f}"
            )


if __name__ == "__main__":
    main()
