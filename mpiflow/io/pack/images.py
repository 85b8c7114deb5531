"""Images in a folder for each class, as torchvision's ImageFolder has them; decoded by Pillow."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError
from mpiflow.io.pack.names import Numbering, label_dtype
from mpiflow.io.pack.rows import Arrays, Rows, Selection

if TYPE_CHECKING:
    from PIL.Image import Image

Fit = Literal["crop", "pad", "stretch"]

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


class ImageFolder(Rows):
    """Rows `image` (channels, height, width) uint8 and `label` (), by class and name of the file.

    The classes are the folders in `folder`, numbered by `classes`, or in order of their names.
    Images become `size` (height, width) by `fit`: cut to its form around the middle,
    padded with black, or stretched. Without a size all of them must have the same.
    """

    def __init__(
        self,
        folder: Path,
        *,
        classes: Numbering | None = None,
        size: tuple[int, int] | None = None,
        fit: Fit = "crop",
        channels: Literal[1, 3] = 3,
    ) -> None:
        self._pillow = _pillow()
        self._size, self._fit, self._mode = size, fit, "L" if channels == 1 else "RGB"
        found, self.ignored = _class_files(folder)
        numbers = [
            number if classes is None else classes.number(name) for number, name in enumerate(found)
        ]
        self._paths = [path for paths in found.values() for path in paths]
        self._labels = np.repeat(
            np.array(numbers, label_dtype(len(found if classes is None else classes))),
            [len(paths) for paths in found.values()],
        )
        self._shape = self._decoded(self._paths[0]).shape

    def __len__(self) -> int:
        return len(self._paths)

    def take(self, which: Selection) -> Arrays:
        """The decoded images of a slice, or of the given numbers, by all CPUs."""
        labels = self._labels[which]
        paths = self._paths[which] if isinstance(which, slice) else [self._paths[i] for i in which]
        images = np.empty((len(paths), *self._shape), np.uint8)

        def fill(row: int) -> None:
            image = self._decoded(paths[row])
            if image.shape != self._shape:
                raise DataError(
                    f"{paths[row]} has {_pixels(image)}, {self._paths[0]} {_pixels(images[0])};"
                    " give all of them one size: --size 64"
                )
            images[row] = image

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
            for _ in workers.map(fill, range(len(paths))):
                pass
        return {"image": images, "label": labels}

    def _decoded(self, path: str) -> NDArray[np.uint8]:
        """The image (channels, height, width); DataError where it cannot be read."""
        library = self._pillow
        try:
            with library.Image.open(path) as file:
                image = self._sized(_plain(library.ImageOps.exif_transpose(file), self._mode))
                pixels = np.asarray(image, np.uint8)
        except (OSError, SyntaxError, ValueError, library.Image.DecompressionBombError) as problem:
            raise DataError(f"{path}: not an image that can be read: {problem}") from problem
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

    def _sized(self, image: Image) -> Image:
        if self._size is None:
            return image
        size, smooth = self._size[::-1], self._pillow.Image.Resampling.BILINEAR
        operations: dict[str, Callable[[], Image]] = {
            "crop": lambda: self._pillow.ImageOps.fit(image, size, smooth),
            "pad": lambda: self._pillow.ImageOps.pad(image, size, smooth),
            "stretch": lambda: image.resize(size, smooth),
        }
        return operations[self._fit]()


def _pillow() -> Any:
    """The package PIL, with the modules that are used."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as problem:
        raise DataError(
            f"decoding images needs Pillow, which cannot be imported: {problem}\n"
            "  install it with `python -m pip install 'mpiflow[pack]'`"
        ) from problem
    return PIL


def _plain(image: Image, mode: str) -> Image:
    """The image in 8-bit gray or colours; ValueError where more bits would be lost."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"it has mode {image.mode}, more than 8 bits a pixel; convert it before")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _pixels(image: NDArray[np.uint8]) -> str:
    return f"{image.shape[2]}x{image.shape[1]} pixels"


def _class_files(folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The images of each class, in order of their names, and the files that are no images."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    found: dict[str, list[str]] = {}
    ignored: list[str] = []
    for name in sorted(os.listdir(folder)):
        if name.startswith(".") or not (folder / name).is_dir():
            continue
        found[name] = []
        for place, below, files in os.walk(folder / name, followlinks=True):
            below[:] = sorted(one for one in below if not one.startswith("."))
            for file in sorted(one for one in files if not one.startswith(".")):
                path = os.path.join(place, file)
                known = os.path.splitext(file)[1].lower() in _SUFFIXES
                (found[name] if known else ignored).append(path)
        if not found[name]:
            raise DataError(f"{folder / name}: no image in this class; put some there or remove it")
    if not found:
        raise DataError(
            f"{folder}: no folders, and every class needs one, as in {folder}/cat/1.png"
        )
    return found, ignored
