"""Philox4x32-10, a counter-based random generator: the words are a pure function of counter, key.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). Ours rather than
numpy.random's, whose streams may change between versions, and which cannot start at an element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(counter: Any, key: tuple[int, int], xp: Any = np) -> Any:
    """Four random words for each row of `counter`, both uint32 of shape (n, 4), of module `xp`."""
    words = xp.ascontiguousarray(counter.T, xp.uint64)
    scramble(xp, words, xp.empty((2, len(counter)), xp.uint64), key)
    return xp.ascontiguousarray(words.T, xp.uint32)


def scramble(xp: Any, words: Any, products: Any, key: tuple[int, int]) -> None:
    """The random words of counters (4, n), in their place; all uint64, `products` being (2, n).

    Nothing is allocated. Words and products are 64 bits wide since the products of a round are.
    """
    a, b, c, d = words
    low, high = products
    constants = [xp.uint64(number) for number in (*_MULTIPLIERS, _LOW, 32)]
    m, n, mask, half = constants
    for number in range(_ROUNDS):
        k, s = (xp.uint64((key[i] + number * _WEYL[i]) & _LOW) for i in (0, 1))
        xp.multiply(a, m, out=low)
        xp.multiply(c, n, out=high)
        # (a, b, c, d) becomes (high(cn) ^ b ^ k, low(cn), high(am) ^ d ^ s, low(am)).
        for target, other, product, word in ((a, b, high, k), (c, d, low, s)):
            xp.bitwise_xor(other, word, out=other)
            xp.right_shift(product, half, out=target)
            xp.bitwise_xor(target, other, out=target)
            xp.bitwise_and(product, mask, out=other)
