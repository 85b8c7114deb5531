"""The names of classes, in order of their numbers, in a text file beside the packed files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpiflow.errors import DataError


class Numbering:
    """The numbers of names: by their place in `file` where that is there, else as they come."""

    def __init__(self, file: Path) -> None:
        self.file, self.fixed = file, file.exists()
        self.names: list[str] = []
        if self.fixed:
            try:
                self.names = file.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError as problem:
                raise DataError(f"{file}: no list of names in UTF-8: {problem}") from problem
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def number(self, name: str) -> int:
        """The number of a name; DataError where the file that is there does not have it."""
        if name not in self._numbers:
            if self.fixed:
                raise DataError(
                    f"{name!r} is not among the {len(self)} names in {self.file}, which number the "
                    "files beside it; to number anew, remove that file and pack all of them again"
                )
            if len(name.splitlines()) != 1:
                raise DataError(f"the name {name!r} is not one line of text")
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

    def files(self) -> dict[Path, str]:
        """The file to write and its text; none where it was there."""
        return {} if self.fixed else {self.file: "".join(f"{name}\n" for name in self.names)}


def label_dtype(classes: int) -> np.dtype:
    """What the numbers of classes are stored as."""
    return np.dtype("uint16" if classes <= 1 << 16 else "int32")
