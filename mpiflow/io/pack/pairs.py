"""Rows as BERT trains on them (Devlin et al. 2019): two pieces of text, with some tokens masked.

What is masked, and which piece is the second, is a pure function of (seed, row): any rows can be
made in any order, by words of Philox that are counted by row.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mpiflow.graph.philox import philox4x32
from mpiflow.io.pack.rows import Arrays, Rows, Selection
from mpiflow.io.pack.tokens import Marks, TokenRows

IGNORED = -1
"""The label of a token that is not to be predicted."""

_BLOCK_ROWS = 1024
_CHOSEN, _MASKED, _KEPT = 0.15, 0.8, 0.9


class PairRows(Rows):
    """Rows `tokens` START a END b END, `segment` 0 up to the first END, `label` and `next`.

    In half of the rows b follows a in the text (`next` is 1), in the others it is the b of another
    row. 15 % of the tokens of a and b have a label, others IGNORED; of these 80 % are masked and
    10 % replaced by any token. `pieces` are the rows of a and b together.
    """

    MARKS: ClassVar[int] = 3
    SHORTEST: ClassVar[int] = 5

    def __init__(self, pieces: TokenRows, marks: Marks, seed: int) -> None:
        self._pieces, self._seed = pieces, seed
        self._marks = marks
        self._dtype = pieces.tokens.dtype
        self._first = pieces.length // 2

    def __len__(self) -> int:
        return len(self._pieces)

    def take(self, which: Selection) -> Arrays:
        """The rows of a slice, or of the given numbers."""
        rows = np.arange(len(self))[which]
        blocks = [
            self._block(rows[at : at + _BLOCK_ROWS]) for at in range(0, len(rows), _BLOCK_ROWS)
        ]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _block(self, rows: NDArray[np.int64]) -> Arrays:
        length = self._pieces.length + self.MARKS
        # Whether b follows, which other it is; for each token whether it is chosen, its fate, the
        # word that replaces it.
        words = self._marks.words
        random = self._random(rows, 2 + 3 * length)
        follows = random[:, 0] < 0.5
        count = len(self)
        other = (rows + 1 + (random[:, 1] * (count - 1)).astype(np.int64)) % count
        tokens = self._tokens(rows, np.where(follows, rows, other))
        chosen, fate, word = random[:, 2:].reshape(len(rows), 3, length).transpose(1, 0, 2)
        is_text = np.ones(length, bool)
        is_text[[0, self._first + 1, -1]] = False
        labelled = (chosen < _CHOSEN) & is_text
        label = np.where(labelled, tokens, IGNORED).astype(np.int32)
        tokens[labelled & (fate < _MASKED)] = self._marks.mask
        replaced = labelled & (fate >= _KEPT)
        tokens[replaced] = words[(word[replaced] * len(words)).astype(np.int64)]
        segment = np.repeat([[0, 1]], len(rows), axis=0).repeat(
            [self._first + 2, length - self._first - 2], axis=1
        )
        return {
            "tokens": tokens.astype(self._dtype),
            "segment": segment.astype(np.uint8),
            "label": label,
            "next": follows.astype(np.uint8),
        }

    def _tokens(self, rows: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        """START, a of `rows`, END, b of `second`, END."""
        a = self._pieces.take(rows)["tokens"][:, : self._first]
        b = self._pieces.take(second)["tokens"][:, self._first :]
        column = np.ones((len(rows), 1), np.int64)
        end = self._marks.end * column
        return np.hstack([self._marks.start * column, a, end, b, end])

    def _random(self, rows: NDArray[np.int64], count: int) -> NDArray[np.float64]:
        """`count` numbers from 0 to below 1 for each row."""
        groups = -(-count // 4)
        counter = np.zeros((len(rows), groups, 4), np.uint32)
        counter[..., 0] = np.arange(groups)
        counter[..., 1] = (rows & 0xFFFFFFFF)[:, None]
        counter[..., 2] = (rows >> 32)[:, None]
        key = (self._seed & 0xFFFFFFFF, self._seed >> 32)
        words = philox4x32(counter.reshape(-1, 4), key)
        return words.reshape(len(rows), -1)[:, :count] / 2.0**32
