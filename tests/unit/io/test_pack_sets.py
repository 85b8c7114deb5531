"""Rows in another order and in two sets: all of them once, the same each time, in little memory."""

import os
import resource
import tracemalloc

import h5py
import numpy as np
import pytest

from mpiflow.errors import DataError, UsageError
from mpiflow.io.pack import Storage, pack, pack_sets
from mpiflow.io.pack import rows as pack_rows
from mpiflow.io.pack.rows import ArrayRows

ROWS = 103


def rows(count=ROWS):
    return {"id": np.arange(count), "x": np.arange(3 * count, dtype="f4").reshape(count, 3)}


def stream(count=ROWS, step=10):
    for start in range(0, count, step):
        yield {name: array[start : start + step] for name, array in rows(count).items()}


def packed(folder, pattern):
    """The ids of each file, whose rows are checked to belong together."""
    found = []
    for path in sorted(folder.glob(pattern)):
        with h5py.File(path) as file:
            found.append(file["id"][()])
            assert np.array_equal(file["x"][:, 0], 3 * found[-1])
    return found


@pytest.mark.parametrize("source", [rows, stream, lambda: ArrayRows(rows())])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("test", "count"), [(0.1, 10), (7, 7), (0.001, 1)])
def test_rows_to_test_are_taken_from_those_to_train(tmp_path, source, shuffle, test, count):
    files = pack(source(), tmp_path, test=test, shuffle=shuffle, seed=5)
    assert [file.name for file in files] == ["train-000.h5", "test-000.h5"]
    (train,), (kept,) = packed(tmp_path, "train-*.h5"), packed(tmp_path, "test-*.h5")
    assert len(kept) == count
    assert sorted([*train, *kept]) == list(range(ROWS))
    assert (list(train) == sorted(train)) is not shuffle
    assert sorted(os.listdir(tmp_path)) == ["test-000.h5", "train-000.h5"]


def test_the_rows_to_test_follow_from_the_seed_alone(tmp_path):
    kept = []
    for number, (source, shuffle, seed) in enumerate(
        [(rows(), False, 0), (stream(), False, 0), (rows(), True, 0), (rows(), False, 1)]
    ):
        pack(source, tmp_path / str(number), test=20, shuffle=shuffle, seed=seed)
        kept.append(set(packed(tmp_path / str(number), "test-*.h5")[0]))
    assert kept[0] == kept[1] == kept[2] != kept[3]


def test_shuffled_rows_are_the_same_from_arrays_and_from_a_stream(tmp_path):
    for name, source in (("a", rows()), ("b", stream())):
        pack(source, tmp_path / name / "x-*.h5", shuffle=True, seed=3, shards=4)
    first, second = (packed(tmp_path / name, "x-*.h5") for name in ("a", "b"))
    assert [len(ids) for ids in first] == [26, 26, 26, 25]
    assert all(map(np.array_equal, first, second))
    assert sorted(np.concatenate(first)) == list(range(ROWS))
    assert list(np.concatenate(first)) != list(range(ROWS))


def test_later_sets_have_shards_in_proportion(tmp_path):
    pack(rows(), tmp_path / "a", test=26, shards=3)
    assert [len(ids) for ids in packed(tmp_path / "a", "train-*.h5")] == [26, 26, 25]
    assert [len(ids) for ids in packed(tmp_path / "a", "test-*.h5")] == [26]
    sets = {"train": rows(40), "valid": rows(20), "test": lambda: stream(10)}
    pack_sets(sets, tmp_path / "b", storage=Storage(shards=4))
    assert [len(packed(tmp_path / "b", f"{name}-*.h5")) for name in sets] == [4, 2, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"test": 103}, "103 of 103 rows to test leave none to train"),
        ({"test": 2.5}, "not 2.5"),
        ({"test": -1}, "not -1"),
        ({"test": 3, "shards": [50, 53]}, "give the number of shards"),
    ],
)
def test_sets_that_cannot_be_meant_are_refused(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        pack(rows(), tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"shuffle": True}])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, options):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    pieces = ({"x": np.zeros((1000, 8))} for _ in range(5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"cannot be written: .*MiB are free there"):
            pack(pieces, tmp_path, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_two_sets_need_a_folder(tmp_path):
    with pytest.raises(UsageError, match=r"x-\*\.h5: the sets train, test need a folder"):
        pack(rows(), tmp_path / "x-*.h5", test=3)


def test_all_sets_appear_together_or_none(tmp_path):
    def broken():
        yield from stream(30)
        raise KeyboardInterrupt

    pack_sets({"train": rows(5)}, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        pack_sets({"train": rows(), "test": broken}, tmp_path, overwrite=True)
    assert [list(ids) for ids in packed(tmp_path, "train-*.h5")] == [[0, 1, 2, 3, 4]]
    assert os.listdir(tmp_path) == ["train-000.h5"]


def test_files_beside_appear_with_the_rows(tmp_path):
    asked = []

    def beside():
        asked.append(sorted(path.name for path in tmp_path.iterdir()))
        return {tmp_path / "classes.txt": "a\nb\n"}

    pack(rows(5), tmp_path, test=1, beside=beside)
    assert asked == [[".test-0.h5.part", ".train-0.h5.part"]]
    assert sorted(os.listdir(tmp_path)) == ["classes.txt", "test-000.h5", "train-000.h5"]
    assert (tmp_path / "classes.txt").read_text() == "a\nb\n"


def test_files_that_may_not_be_overwritten_are_found_before_any_work(tmp_path):
    pack_sets({"test": rows(5)}, tmp_path)

    def untouched():
        raise AssertionError("the source was asked for rows")

    with pytest.raises(DataError, match=r"test-000\.h5 would be overwritten"):
        pack_sets({"train": untouched, "test": untouched}, tmp_path)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"test": 0.1}, {"shards": 3}], ids=str)
def test_a_stream_is_packed_in_bounded_memory(tmp_path, monkeypatch, options):
    monkeypatch.setattr(pack_rows, "PIECE_BYTES", 1 << 20)
    pieces = ({"x": np.full((128, 1024), i, np.float32)} for i in range(48))  # 24 MiB
    pack({"x": np.zeros(1)}, tmp_path / "first.h5")  # what the first one imports
    tracemalloc.start()
    try:
        pack(pieces, tmp_path, **options)
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()
