"""Packs Fashion-MNIST for examples/images.py: 60,000 images of clothes to train, 10,000 to test.

apt-get install dataset-fashion-mnist        or four files train-images-idx3-ubyte.gz ... elsewhere
python examples/pack_fashion.py [--source FOLDER] [--data FOLDER]

Any set in the same format (MNIST and others) will do. Without one the example uses `generate`.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np

from mpiflow.io.pack import pack

SOURCE = "/usr/share/datasets/fashion-mnist"
ROWS, TEST_ROWS = 4000, 500


def folder_of(size: int, channels: int, classes: int) -> str:
    return f"images/{size}x{channels}x{classes}"


def read_idx(path: Path) -> np.ndarray:
    """The bytes of an IDX file: two zeros, type 8 (bytes), the number of dims, their sizes."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise SystemExit(f"{path} is no IDX file of bytes: it begins with {content[:4]!r}")
    dims = content[3]
    shape = np.frombuffer(content, ">i4", dims, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape)


def draw_images(rows: int, size: int, channels: int, classes: int, seed: int) -> tuple:
    """Images and labels: each class is a pattern of a few waves, moved and covered with noise."""
    shape = np.random.default_rng(0)
    at = np.arange(size) * 2 * np.pi / size
    patterns = np.zeros((classes, channels, size, size))
    for _ in range(4):
        x, y, phase = (shape.integers(1, 5, (3, classes, channels, 1, 1))).astype(float)
        patterns += np.sin(x * at[:, None] + y * at[None, :] + phase)
    draw = np.random.default_rng(seed)
    label = draw.integers(0, classes, rows)
    image = patterns[label]
    for row, (down, right) in enumerate(draw.integers(-2, 3, (rows, 2))):
        image[row] = np.roll(image[row], (down, right), (1, 2))
    image = 128 + 24 * image + 40 * draw.standard_normal(image.shape)
    return np.clip(image, 0, 255).astype(np.uint8), label.astype(np.uint16)


def write(out: Path, name: str, image: np.ndarray, label: np.ndarray) -> None:
    rows = {"image": image, "label": label}
    pack(rows, out / f"{name}-*.h5", shards=4 if name == "train" else 1, overwrite=True)
    print(f"{out}/{name}-*.h5: {len(label)} images {image.shape[1:]}")


def generate(data: Path, size: int, channels: int, classes: int) -> None:
    """Packs generated images, where there are no others."""
    out = data / folder_of(size, channels, classes)
    print(
        f"{out} has no files: packing generated images; see examples/pack_fashion.py for real ones"
    )
    for seed, (name, rows) in enumerate((("train", ROWS), ("test", TEST_ROWS))):
        write(out, name, *draw_images(rows, size, channels, classes, seed + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=SOURCE, help=f"the files' folder (default: {SOURCE})")
    parser.add_argument("--data", default=".", help="the data folder (default: here)")
    given = parser.parse_args()
    for name, part in (("train", "train"), ("test", "t10k")):
        files = {
            field: next(Path(given.source).glob(f"{part}-{kind}-ubyte*"), None)
            for field, kind in (("image", "images-idx3"), ("label", "labels-idx1"))
        }
        if None in files.values():
            raise SystemExit(
                f"{given.source} has no {part}-*-ubyte.gz; apt-get install dataset-fashion-mnist,"
                " or name the folder with --source"
            )
        image, label = read_idx(files["image"])[:, None], read_idx(files["label"])
        out = Path(given.data) / folder_of(image.shape[-1], 1, 10)
        # As generated ones are, so that the same job reads both.
        write(out, name, image, label.astype(np.uint16))


if __name__ == "__main__":
    main()
