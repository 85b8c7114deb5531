"""Packs generated random fields for examples/field.py: volumes, and the numbers that made them.

python examples/pack_field.py [--size 16] [--data FOLDER]

A field is noise whose waves of length l have the strength l^slope, times an amplitude; slope and
amplitude, each between -1 and 1, are to be found. The example does the same where there are no
files.
"""

import argparse
from pathlib import Path

import numpy as np

from mpiflow.io.pack import pack

NUMBERS = 2
ROWS, TEST_ROWS = 640, 80


def folder_of(size: int) -> str:
    return f"field/{size}"


def draw_fields(size: int, rows: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    wave = np.fft.fftfreq(size) * size
    length = np.sqrt(sum(np.meshgrid(wave**2, wave**2, wave[: size // 2 + 1] ** 2)))
    length[0, 0, 0] = 1
    numbers = draw.uniform(-1, 1, (rows, NUMBERS))
    volume = np.empty((rows, 1, size, size, size), np.float32)
    for row, (slope, amplitude) in enumerate(numbers):
        noise = np.fft.rfftn(draw.standard_normal((size,) * 3))
        field = np.fft.irfftn(noise * length ** -(1.5 + slope), s=(size,) * 3, axes=(0, 1, 2))
        volume[row, 0] = field / field.std() * (1 + amplitude / 2)
    return {"volume": volume, "numbers": numbers.astype(np.float32)}


def generate(data: Path, size: int) -> None:
    """Packs generated fields, where there are no others."""
    print(f"{data / folder_of(size)} has no files: packing generated fields")
    write(data, size)


def write(data: Path, size: int) -> None:
    out = data / folder_of(size)
    for seed, (name, count) in enumerate((("train", ROWS), ("test", TEST_ROWS))):
        rows = draw_fields(size, count, seed + 1)
        pack(rows, out / f"{name}-*.h5", shards=4 if name == "train" else 1, overwrite=True)
        print(f"{out}/{name}-*.h5: {count} volumes of {size}^3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=16, help="points a side (default: 16)")
    parser.add_argument("--data", default=".", help="the data folder (default: here)")
    given = parser.parse_args()
    write(Path(given.data), given.size)


if __name__ == "__main__":
    main()
