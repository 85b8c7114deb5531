"""Rows of tokens, cut from all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.io.pack.rows import Arrays, Rows, Selection

_BLOCK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class TokenRows(Rows):
    """Rows `tokens` (length,), which begin at `starts` of all tokens."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    length: int

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, which: Selection) -> Arrays:
        """The tokens of the rows."""
        starts, column = self.starts[which], np.arange(self.length)
        tokens = np.empty((len(starts), self.length), self.tokens.dtype)
        # In blocks: the places of tokens take more memory than these do.
        for at in range(0, len(starts), _BLOCK_ROWS):
            places = starts[at : at + _BLOCK_ROWS, None] + column
            tokens[at : at + _BLOCK_ROWS] = self.tokens[places]
        return {"tokens": tokens}


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens that rows of pairs need, and those that stand for text."""

    start: int
    end: int
    mask: int
    words: NDArray[np.int64]


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned dtype that holds every token; uint16 at least."""
    return np.dtype("uint16" if vocabulary <= 1 << 16 else "uint32")
