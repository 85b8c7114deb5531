import numpy as np
import pytest

from mpiflow.io.cache import ChunkCache


class Chunks:
    """Chunk c holds `sizes[c]` rows, row i of which is 100 c + i."""

    def __init__(self, *sizes):
        self.sizes, self.decoded = sizes, []

    def length(self, chunk):
        return self.sizes[chunk]

    def decode(self, chunk):
        self.decoded.append(chunk)
        return 100 * chunk + np.arange(self.sizes[chunk])


def gather(cache, chunks, *rows):
    out = np.full(len(rows), -1)
    which, offsets = np.divmod(np.array(rows, np.int64), 100)
    cache.gather(which, offsets, out, chunks)
    assert out.tolist() == list(rows)
    return chunks.decoded


def test_chunks_that_are_held_are_not_decoded_again():
    cache, chunks = ChunkCache(8, (), "i8", keep=True), Chunks(4, 4)
    gather(cache, chunks, 101, 3, 0)
    assert gather(cache, chunks, 2, 103) == [0, 1]
    assert cache.held_rows == 8


def test_the_chunk_not_used_for_longest_goes():
    cache, chunks = ChunkCache(8, (), "i8", keep=True), Chunks(4, 4, 4)
    for rows in ((0,), (100,), (1,), (200,)):
        gather(cache, chunks, *rows)
    assert gather(cache, chunks, 2, 203) == [0, 1, 2]
    assert gather(cache, chunks, 100) == [0, 1, 2, 1]


def test_a_chunk_that_is_used_up_makes_room():
    cache, chunks = ChunkCache(8, (), "i8", keep=False), Chunks(4, 4)
    gather(cache, chunks, 0, 1, 100)
    gather(cache, chunks, 2, 3)
    assert cache.held_rows == 4


def test_free_rows_side_by_side_are_joined():
    cache, chunks = ChunkCache(6, (), "i8", keep=False), Chunks(2, 2, 2, 5)
    gather(cache, chunks, 0, 100, 200)
    for rows in ((101,), (1,), (201,)):
        gather(cache, chunks, *rows)
    assert gather(cache, chunks, 304) == [0, 1, 2, 3]


def test_more_chunks_than_there_is_room_for_are_gathered_in_turns():
    cache, chunks = ChunkCache(5, (), "i8", keep=True), Chunks(4, 3, 4, 2)
    gather(cache, chunks, 301, 100, 2, 201, 102, 0)
    assert cache.held_rows <= 5
    assert sorted(chunks.decoded) == [0, 1, 2, 3]


def test_a_chunk_longer_than_the_cache_is_held_alone():
    cache, chunks = ChunkCache(3, (), "i8", keep=True), Chunks(2, 7, 2)
    gather(cache, chunks, 1, 106, 201, 0)
    assert len(cache.array) == 7
    assert sorted(chunks.decoded) == [0, 1, 2]


def test_a_chunk_that_cannot_be_read_takes_no_room():
    class Broken(Chunks):
        def decode(self, chunk):
            raise OSError("planted")

    cache = ChunkCache(4, (), "i8", keep=True)
    for _ in range(2):
        with pytest.raises(OSError, match="planted"):
            gather(cache, Broken(4), 3)
        assert cache.held_rows == 0
    gather(cache, Chunks(4), 3)
