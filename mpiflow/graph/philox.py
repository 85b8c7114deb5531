"""Philox4x32-10, a counter-based random generator: the words are a pure function of counter, key.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). Ours rather than
numpy.random's, whose streams may change between versions, and which cannot start at an element.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)
_MASK = 0xFFFFFFFF


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each row of `counter`, both uint32 of shape (n, 4)."""
    c0, c1, c2, c3 = (counter[:, column].astype(np.uint64) for column in range(4))
    k0, k1 = key[0] & _MASK, key[1] & _MASK
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = (product_1 >> _HIGH) ^ c1 ^ np.uint64(k0)
        c2 = (product_0 >> _HIGH) ^ c3 ^ np.uint64(k1)
        c1, c3 = product_1 & _LOW, product_0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def counters(start: int, stop: int, high: tuple[int, int] = (0, 0)) -> Words:
    """Counters start..stop-1 in the low 64 bits, `high` in the upper two words: (n, 4)."""
    low = np.arange(start, stop, dtype=np.uint64)
    words = np.empty((stop - start, 4), np.uint32)
    words[:, 0], words[:, 1] = low & _LOW, low >> _HIGH
    words[:, 2], words[:, 3] = high[0] & _MASK, high[1] & _MASK
    return words
