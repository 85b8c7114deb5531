"""Text as rows of tokens of one length, cut from what a tokenizer makes of all of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError, UsageError
from mpiflow.io.pack.files import text_lines
from mpiflow.io.pack.pairs import PairRows
from mpiflow.io.pack.rows import Arrays, Rows, spooled, test_rows
from mpiflow.io.pack.tokenizer import Kind, Tokenizer, learn_tokenizer
from mpiflow.io.pack.tokens import TokenRows, token_dtype
from mpiflow.io.pack.write import Progress

Documents = Literal["none", "file", "blank", "line"]
"""What ends a document: nothing, the end of a file, a blank line, the end of a line."""

_PART_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text, on the disk, and where each document ends among them."""

    tokenizer: Tokenizer
    tokens: NDArray[Any]
    ends: NDArray[np.int64]

    def rows(self, length: int) -> TokenRows:
        """Rows one after another, whatever documents they have a part in."""
        return self._rows(length, np.array([len(self.tokens)]))

    def rows_of_documents(self, length: int) -> TokenRows:
        """Rows of one document each; the tokens at its end that fill no row are left out."""
        return self._rows(length, self.ends)

    def _rows(self, length: int, ends: NDArray[np.int64]) -> TokenRows:
        begins = np.concatenate([[0], ends[:-1]])
        counts = (ends - begins) // length
        first = np.cumsum(counts) - counts
        number = np.arange(counts.sum()) - np.repeat(first, counts)
        return TokenRows(self.tokens, np.repeat(begins, counts) + number * length, length)

    def nats(self) -> float:
        """The entropy of a token that is guessed by its frequency alone."""
        count = np.zeros(self.tokenizer.vocabulary, np.int64)
        for start in range(0, len(self.tokens), _PART_BYTES):
            part = self.tokens[start : start + _PART_BYTES]
            count += np.bincount(part, minlength=len(count))
        share = count[count > 0] / len(self.tokens)
        return float(-(share * np.log(share)).sum())


def encode(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    documents: Documents = "none",
    mark_ends: bool = False,
    progress: Progress | None = None,
) -> Encoded:
    """The tokens of all files, on the disk in `folder`; `mark_ends`: one more after a document."""
    end = [tokenizer.mark("end")] if mark_ends and documents != "none" else []
    ends = array("q")
    lines = _documents(_lines(files, "encoded", progress), documents)
    stream = _encoded(lines, tokenizer, end, ends)
    first = next(stream, None)
    if first is None:
        raise DataError(f"{', '.join(map(str, files))}: no text")
    tokens = spooled(chain([first], stream), folder).arrays["tokens"]
    return Encoded(tokenizer, tokens, np.array(ends if ends else [len(tokens)], np.int64))


def learn(
    files: Sequence[Path], kind: Kind, vocabulary: int, progress: Progress | None = None
) -> Tokenizer:
    """A tokenizer that is learned from the files."""
    lines = _lines(files, "learned from", progress)
    return learn_tokenizer((line for line in lines if line is not None), kind, vocabulary)


def _lines(files: Sequence[Path], what: str, progress: Progress | None) -> Iterator[str | None]:
    """The lines of the files, long ones in pieces, and None after each file."""
    total = sum(path.stat().st_size for path in files if path.is_file())
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            # Those of a compressed file are more than its size.
            progress(f"bytes {what}", done, max(total, done))

    for path in files:
        yield from text_lines(path, _PART_BYTES, count)
        yield None


def _documents(lines: Iterable[str | None], documents: Documents) -> Iterator[str | None]:
    """The texts to encode, and None after each document that has any."""
    began = False
    for line in lines:
        blank = line is None or not line.strip()
        if line is not None and not (blank and documents in ("blank", "line")):
            began = True
            yield line.rstrip("\r\n") if documents == "line" else line
        ends = {
            "none": False,
            "file": line is None,
            "blank": blank,
            "line": line is None or line.endswith("\n"),
        }
        if began and ends[documents]:
            began = False
            yield None


def _encoded(
    texts: Iterator[str | None], tokenizer: Tokenizer, end: list[int], ends: array[int]
) -> Iterator[Arrays]:
    """The tokens in pieces; where documents end is added to `ends`."""
    dtype, done = token_dtype(tokenizer.vocabulary), 0
    for part in _parts(texts):
        found = iter(tokenizer.encode([text for text in part if text is not None]))
        tokens: list[int] = []
        for text in part:
            tokens += end if text is None else next(found)
            if text is None:
                ends.append(done + len(tokens))
        done += len(tokens)
        yield {"tokens": np.array(tokens, dtype)}


def _parts(texts: Iterator[str | None]) -> Iterator[list[str | None]]:
    """The texts in lists of some characters, which are encoded together."""
    part: list[str | None] = []
    size = 0
    for text in texts:
        part.append(text)
        size += 1 + len(text or "")
        if size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def text_sets(
    encoded: Encoded, length: int, *, pairs: bool, test: float, seed: int
) -> dict[str, Rows]:
    """The sets `train` and, with `test` rows or that share, `test`: the last rows of the text.

    Neighbours are alike, so that rows at random would not show what is learned.
    """
    if length < (PairRows.SHORTEST if pairs else 1):
        raise UsageError(
            f"--length {length}: a row has {PairRows.SHORTEST if pairs else 1} tokens at least"
        )
    rows = encoded.rows_of_documents(length - PairRows.MARKS) if pairs else encoded.rows(length)
    if not len(rows):
        most = "no document of the text has" if pairs else "the text does not have"
        raise DataError(
            f"{most} the {length} tokens of a row; all of it has {len(encoded.tokens)}; take a"
            " smaller --length"
        )
    count = test_rows(len(rows), test) if test else 0
    cut = len(rows) - count
    sets = {"train": rows.starts[:cut], "test": rows.starts[cut:]}
    made: dict[str, Rows] = {}
    for number, (name, starts) in enumerate(sets.items()):
        part = TokenRows(rows.tokens, starts, rows.length)
        if len(starts):
            made[name] = PairRows(part, encoded.tokenizer.marks(), seed + number) if pairs else part
    return made
