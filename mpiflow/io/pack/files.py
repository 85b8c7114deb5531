"""Files that are read from the beginning to the end, plain or compressed by gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from mpiflow.errors import DataError


def open_bytes(path: Path) -> IO[bytes]:
    """The content of a file, unpacked where it is compressed."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")  # type: ignore[return-value]


def read_bytes(file: IO[bytes], nbytes: int, path: Path) -> bytes:
    """The next bytes, fewer at the end; DataError where they cannot be read."""
    try:
        return file.read(nbytes)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path}: cannot be read: {problem}") from problem


def text_lines(
    path: Path, most: int = -1, count: Callable[[int], None] = lambda nbytes: None
) -> Iterator[str]:
    """The lines of a file in UTF-8 with their ends; DataError with the line where it is not.

    Lines of more than `most` bytes come in pieces: it bounds the memory where there are no ends.
    `count` is told the bytes of each line.
    """
    number, rest = 1, b""
    with open_bytes(path) as file:
        while line := rest + _line(file, most, path):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            rest = b"" if line.endswith(b"\n") else _cut_character(line)
            try:
                yield line[: len(line) - len(rest)].decode()
            except UnicodeDecodeError as problem:
                raise DataError(
                    f"{path} line {number}: not text in UTF-8: {problem.reason}, byte "
                    f"0x{problem.object[problem.start]:02x}; convert it, as with iconv"
                ) from problem
            number += line.endswith(b"\n")
            count(len(line) - len(rest))


def _line(file: IO[bytes], most: int, path: Path) -> bytes:
    try:
        return file.readline(most)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path}: cannot be read: {problem}") from problem


def _cut_character(line: bytes) -> bytes:
    """The bytes of a character at the end of a piece that go on in the next one."""
    for count in (1, 2, 3):
        lead = line[-count] if len(line) > count else 0
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return line[-count:] if needed > count else b""
        if lead < 0x80:
            return b""
    return b""
