import numpy as np
import pytest

from mpiflow.graph.philox import philox4x32

# The known-answer vectors for philox4x32-10 that Random123 publishes: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_words_equal_the_published_vectors(counter, key, expected):
    got = philox4x32(np.array([words(counter)], np.uint32), tuple(words(key)))
    assert got.dtype == np.uint32
    assert got.tolist() == [words(expected)]


def test_a_row_does_not_depend_on_its_neighbours():
    counter = np.arange(28, dtype=np.uint32).reshape(7, 4)
    assert np.array_equal(philox4x32(counter, (1, 2))[3:5], philox4x32(counter[3:5], (1, 2)))


def test_only_32_bits_of_each_key_count():
    counter = np.arange(4, dtype=np.uint32).reshape(1, 4)
    key = (1 + (7 << 32), 2 + (1 << 63))
    assert np.array_equal(philox4x32(counter, key), philox4x32(counter, (1, 2)))


def test_no_rows_give_no_words():
    assert philox4x32(np.empty((0, 4), np.uint32), (1, 2)).shape == (0, 4)
