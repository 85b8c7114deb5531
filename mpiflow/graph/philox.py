"""Philox4x32-10, a counter-based random generator: the words are a pure function of counter, key.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). Ours rather than
numpy.random's, whose streams may change between versions, and which cannot start at an element.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each row of `counter`, both uint32 of shape (n, 4)."""
    # Words 0 and 2 go through a round alike, and so do 1 and 3: two arrays of shape (2, n).
    even = np.ascontiguousarray(counter[:, 0::2].T, np.uint64)
    odd = np.ascontiguousarray(counter[:, 1::2].T, np.uint64)
    keys = np.array([[word & 0xFFFFFFFF] for word in key], np.uint64)
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even = (product >> _HIGH)[::-1] ^ odd ^ keys
        odd = (product & _LOW)[::-1]
        keys = (keys + _WEYL) & _LOW
    words = np.empty(counter.shape, np.uint32)
    words[:, 0::2], words[:, 1::2] = even.T, odd.T
    return words
