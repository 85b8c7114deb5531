import os

import h5py
import numpy as np
import pytest

from mpiflow.errors import DataError, UsageError
from mpiflow.io.dataset import inspect
from mpiflow.io.pack import pack


def arrays(rows=23):
    ids = np.arange(rows)
    return {"image": np.outer(ids, np.ones(6)).astype("u1").reshape(rows, 2, 3), "label": ids}


def pieces(*sizes):
    start = 0
    for size in sizes:
        yield {name: array[start : start + size] for name, array in arrays(sum(sizes)).items()}
        start += size


def stored(files):
    """Rows per file, and all arrays joined."""
    parts = []
    for path in files:
        with h5py.File(path) as file:
            parts.append({name: file[name][()] for name in file})
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return [len(part["label"]) for part in parts], joined


def assert_whole(files, sizes):
    rows, joined = stored(files)
    assert rows == sizes
    for name, array in arrays(sum(sizes)).items():
        assert joined[name].dtype == array.dtype
        assert np.array_equal(joined[name], array)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [23]),
        ({"shards": 4}, [6, 6, 6, 5]),
        ({"shards": [9, 2, 12]}, [9, 2, 12]),
        ({"shard_rows": 10}, [10, 10, 3]),
        ({"shard_rows": 10, "chunk_rows": 4, "compression": "gzip"}, [10, 10, 3]),
        ({"shards": 2, "compression": "lzf"}, [12, 11]),
    ],
)
def test_all_rows_arrive_in_order(tmp_path, options, sizes):
    files = pack(arrays(), tmp_path / "set" / "train-*.h5", **options)
    assert [path.name for path in files] == [f"train-{i:03d}.h5" for i in range(len(sizes))]
    assert sorted(os.listdir(tmp_path / "set")) == [path.name for path in files]
    assert_whole(files, sizes)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_stream_is_spread_over_shards_whatever_its_pieces(tmp_path, compression):
    seen = []
    files = pack(
        pieces(7, 1, 30, 2, 5), tmp_path / "s*.h5", shard_rows=16, chunk_rows=5,
        compression=compression, progress=lambda *counts: seen.append(counts),
    )  # fmt: skip
    assert_whole(files, [16, 16, 13])
    assert seen == [("rows written to s*.h5", done, None) for done in (7, 8, 38, 40, 45)]


def test_chunks_have_the_rows_asked_for_and_default_to_a_part_of_the_shard(tmp_path):
    for path, options, expected in [
        (tmp_path / "a.h5", {"chunk_rows": 5}, 5),
        (tmp_path / "b.h5", {"chunk_rows": 500}, 23),
        (tmp_path / "c.h5", {}, 23),
    ]:
        with h5py.File(pack(arrays(), path, **options)[0]) as file:
            assert file["image"].chunks == (expected, 2, 3)
            assert file["label"].chunks == (expected,)
    wide = {"x": np.zeros((64, 1 << 15), "f4")}
    with h5py.File(pack(wide, tmp_path / "d.h5")[0]) as file:
        assert file["x"].chunks[0] == 4


def test_npz_files_are_packed(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    assert_whole(pack(tmp_path / "a.npz", tmp_path / "s*.h5", shards=2), [12, 11])


def test_functions_of_a_file_are_packed(tmp_path):
    (tmp_path / "helper.py").write_text("rows = 4\n")
    (tmp_path / "make.py").write_text(
        "import numpy as np\nimport helper\n"
        "def whole():\n    return {'label': np.arange(helper.rows)}\n"
        "def stream():\n    yield whole()\n    yield whole()\n"
        "def wrong():\n    return 3\n"
        "def strings():\n    yield 'a'\n"
    )
    make = str(tmp_path / "make.py")
    assert stored(pack(f"{make}:whole", tmp_path / "w*.h5", shards=2))[0] == [2, 2]
    assert stored(pack(f"{make}:stream", tmp_path / "s*.h5", shard_rows=5))[0] == [5, 3]
    with pytest.raises(UsageError, match="no function 'absent'"):
        pack(f"{make}:absent", tmp_path / "x*.h5")
    with pytest.raises(DataError, match="gives int; it must give a mapping"):
        pack(f"{make}:wrong", tmp_path / "x*.h5")
    with pytest.raises(DataError, match="yields str"):
        pack(f"{make}:strings", tmp_path / "x*.h5")


def test_what_is_packed_can_be_planned_for(tmp_path):
    pack(arrays(), tmp_path / "s*.h5", shards=[9, 14], chunk_rows=4, compression="gzip")
    data = inspect("d", "s*.h5", tmp_path, batch=4, shuffle=True, seed=0, lanes=1, window=2)
    assert [(s.rows, s.chunk_rows) for s in data.shards] == [(9, 4), (14, 4)]
    assert [(f.name, f.shape, f.dtype) for f in data.fields] == [
        ("image", (2, 3), "uint8"),
        ("label", (), "int64"),
    ]


def test_packing_twice_gives_the_same_fingerprint(tmp_path):
    prints = set()
    for folder in ("a", "b"):
        pack(arrays(), tmp_path / folder / "s*.h5", shards=2)
        options = {"batch": 4, "shuffle": True, "seed": 0, "lanes": 1, "window": 2}
        prints.add(inspect("d", "s*.h5", tmp_path / folder, **options).fingerprint)
    assert len(prints) == 1


def test_files_are_overwritten_only_when_told_and_stale_ones_go(tmp_path):
    pack(arrays(), tmp_path / "s*.h5", shards=4)
    with pytest.raises(DataError, match=r"s000\.h5, s001\.h5, s002\.h5 and 1 more would be overw"):
        pack(arrays(9), tmp_path / "s*.h5", shards=2)
    assert_whole(sorted(tmp_path.glob("s*.h5")), [6, 6, 6, 5])
    files = pack(arrays(9), tmp_path / "s*.h5", shards=2, overwrite=True)
    assert sorted(tmp_path.iterdir()) == files
    assert_whole(files, [5, 4])


def test_files_of_another_set_are_never_removed(tmp_path):
    pack(arrays(), tmp_path / "test-*.h5")
    with pytest.raises(DataError, match=r"also matches test-000\.h5"):
        pack(arrays(), tmp_path / "*.h5", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["test-000.h5"]


def test_after_an_error_there_are_no_files_and_old_ones_stay(tmp_path):
    def broken():
        yield from pieces(10, 10)
        raise RuntimeError("planted")

    old = pack(arrays(9), tmp_path / "s*.h5")
    with pytest.raises(RuntimeError, match="planted"):
        pack(broken(), tmp_path / "s*.h5", shard_rows=4, overwrite=True)
    assert sorted(tmp_path.iterdir()) == old
    assert_whole(old, [9])


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (arrays(), {"shards": 2, "shard_rows": 3}, "not both"),
        (arrays(), {"shards": 0}, "not 0"),
        (arrays(), {"shards": 24}, "23 rows do not fill 24 shards"),
        (arrays(), {"shards": [20, 2]}, "take 22 rows, the source gives 23"),
        (arrays(), {"compression": "zip"}, "'zip' is not known; use gzip, lzf"),
        ("gone.npz", {}, r"no such file gone\.npz"),
        ("gone.py:rows", {}, r"no file gone\.py"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path, source, options, words):
    with pytest.raises(UsageError, match=words):
        pack(source, tmp_path / "s*.h5", **options)
    assert not list(tmp_path.iterdir())


def test_several_files_need_a_star_in_their_name(tmp_path):
    for source, options in [(arrays(), {"shards": 2}), (pieces(3, 4), {"shard_rows": 3})]:
        with pytest.raises(UsageError, match=r"need one \*"):
            pack(source, tmp_path / "s.h5", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ({"x": np.arange(3), "y": np.arange(4)}, {}, "'x': 3, 'y': 4"),
        ({"x": np.array(["a"])}, {}, "'x' has dtype <U1; only numbers"),
        ({"x": np.float32(1)}, {}, "'x' is a single value"),
        ({}, {}, "there are none"),
        ({"x": np.zeros((0, 3))}, {}, "no rows"),
        ([{"x": np.zeros(3)}, {"x": np.zeros(3, "f4")}], {}, "pieces differ"),
        ([{"x": np.zeros(3)}, {"x": np.zeros((3, 1))}], {}, "pieces differ"),
        ([{"x": np.zeros(3)}, {"z": np.zeros(3)}], {}, "pieces differ"),
        ([{"x": np.zeros(3)}], {"shards": [2]}, "more rows than the shards"),
        ([{"x": np.zeros(3)}], {"shards": [3, 2]}, "gave 3 rows, the shards take 5"),
        ([{"x": np.zeros(3)}], {"shards": [5]}, "gave 3 rows, the shards take 5"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(tmp_path, source, options, words):
    with pytest.raises(DataError, match=words):
        pack(source, tmp_path / "s*.h5", **options)
    assert not list(tmp_path.iterdir())


def test_arrays_of_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], object))
    with pytest.raises(DataError, match="plain arrays"):
        pack(tmp_path / "a.npz", tmp_path / "s*.h5")


def test_big_endian_arrays_are_stored_native(tmp_path):
    (path,) = pack({"x": np.arange(3, dtype=">i4")}, tmp_path / "s.h5")
    with h5py.File(path) as file:
        assert file["x"].dtype == np.dtype("i4")
        assert file["x"][()].tolist() == [0, 1, 2]
