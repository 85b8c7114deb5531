"""Packs generated faces for examples/faces.py: views of identities, some of them to test.

python examples/pack_faces.py [--classes 64] [--data FOLDER]

The example does the same where there are no files. To train on faces of your own, write such files
from them: `image` (1, 28, 28) uint8, `label` () int32.
"""

import argparse
from pathlib import Path

import numpy as np

from mpiflow.io.pack import pack

SIZE, VIEWS, TEST_VIEWS = 28, 60, 8


def folder_of(classes: int) -> str:
    return f"faces/{classes}"


def draw_views(classes: int, views: int, seed: int) -> dict[str, np.ndarray]:
    """Views of each identity: a smooth pattern, moved, in another light, with noise."""
    coarse = np.random.default_rng(0).standard_normal((classes, 8, 8))
    at = np.linspace(0, 6.999, SIZE)
    low, part = at.astype(int), at % 1
    rows = coarse[:, low] * (1 - part)[:, None] + coarse[:, low + 1] * part[:, None]
    faces = rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
    draw = np.random.default_rng(seed)
    label = draw.permutation(np.repeat(np.arange(classes), views))
    image = faces[label]
    for i, (down, right) in enumerate(draw.integers(-1, 2, (len(label), 2))):
        image[i] = np.roll(image[i], (down, right), (0, 1))
    light, shade = draw.uniform(0.6, 1.4, (2, len(label), 1, 1))
    image = 128 * shade + 50 * light * image + 15 * draw.standard_normal(image.shape)
    image = np.clip(image, 0, 255).astype(np.uint8)
    return {"image": image[:, None], "label": label.astype(np.int32)}


def generate(data: Path, classes: int) -> None:
    """Packs generated identities, where there are no others."""
    print(f"{data / folder_of(classes)} has no files: packing generated faces")
    write(data, classes)


def write(data: Path, classes: int) -> None:
    out = data / folder_of(classes)
    for seed, (name, views) in enumerate((("train", VIEWS), ("test", TEST_VIEWS))):
        rows = draw_views(classes, views, seed + 1)
        pack(rows, out / f"{name}-*.h5", shards=4 if name == "train" else 1, overwrite=True)
        print(f"{out}/{name}-*.h5: {views} views of each of {classes} identities")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=64, help="identities (default: 64)")
    parser.add_argument("--data", default=".", help="the data folder (default: here)")
    given = parser.parse_args()
    write(Path(given.data), given.classes)


if __name__ == "__main__":
    main()
