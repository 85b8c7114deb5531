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

_BLOCK_ROWS = 1024
_CHOSEN, _MASKED, _KEPT = 0.15, 0.8, 0.9


def hidden_count(length: int) -> int:
    """How many tokens of a row of this length are to be found: 15 % of those of the text."""
    return max(1, round(_CHOSEN * (length - PairRows.MARKS)))


class PairRows(Rows):
    """Rows `tokens` START a END b END, `segment` 0 up to the first END, and what is to be found.

    In half of the rows b follows a in the text (`next` is 1), in the others it is the b of another
    row. Of the tokens of a and b `hidden_count` stand at `positions`, in order, and were `label`
    before 80 % of these were masked and 10 % replaced by any token. `pieces` are the rows of a and
    b together.
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
        # Whether b follows, which other it is, and what `_hide` takes.
        random = self._random(rows, 2 + 3 * length)
        follows = random[:, 0] < 0.5
        count = len(self)
        other = (rows + 1 + (random[:, 1] * (count - 1)).astype(np.int64)) % count
        tokens = self._tokens(rows, np.where(follows, rows, other))
        positions, label = self._hide(tokens, random[:, 2:].reshape(len(rows), 3, length))
        segment = np.repeat([[0, 1]], len(rows), axis=0).repeat(
            [self._first + 2, length - self._first - 2], axis=1
        )
        return {
            "tokens": tokens.astype(self._dtype),
            "segment": segment.astype(np.uint8),
            "positions": positions.astype(np.int32),
            "label": label.astype(np.int32),
            "next": follows.astype(np.uint8),
        }

    def _hide(
        self, tokens: NDArray[np.int64], random: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hide some tokens; gives the positions and what was there.

        `random` has for each token its order among those to be hidden, its fate, and the word that
        replaces it.
        """
        order, *others = random.transpose(1, 0, 2)
        order[:, [0, self._first + 1, -1]] = 1.0  # the marks, after all others
        first = np.argsort(order, axis=1, kind="stable")[:, : hidden_count(tokens.shape[1])]
        positions = np.sort(first, axis=1)
        label = np.take_along_axis(tokens, positions, 1)
        fate, word = (np.take_along_axis(values, positions, 1) for values in others)
        shown = np.where(fate < _MASKED, self._marks.mask, label)
        replaced = fate >= _KEPT
        words = self._marks.words
        shown[replaced] = words[(word[replaced] * len(words)).astype(np.int64)]
        np.put_along_axis(tokens, positions, shown, 1)
        return positions, label

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
