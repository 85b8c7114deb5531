import h5py
import numpy as np
import pytest

from mpiflow.io.info import info, info_text
from mpiflow.io.pack import pack


def save(path, name="x", array=None, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=np.zeros((64, 8), "f4") if array is None else array,
                            **options)  # fmt: skip


def test_a_packed_set_has_no_problems(tmp_path):
    ids = np.arange(4001)
    for compression in (None, "gzip"):
        pattern = f"{compression}-*.h5"
        rows = {"image": np.outer(ids, np.arange(64)).astype("f4"), "label": ids}
        pack(rows, tmp_path / pattern, shards=3, chunk_rows=600, compression=compression)
        data = info(pattern, tmp_path)
        assert data.problems == ()
        assert (data.rows, len(data.shards)) == (4001, 3)
        assert data.nbytes == sum(path.stat().st_size for path in tmp_path.glob(pattern))


def test_text_lists_fields_and_files_in_columns(tmp_path):
    pack({"image": np.zeros((1437, 8, 8), "u1"), "label": np.arange(1437)},
         tmp_path / "s*.h5", shards=[1000, 437], chunk_rows=1000, compression="gzip")  # fmt: skip
    lines = info_text(info("s*.h5", tmp_path)).splitlines()
    assert lines[0].startswith(f"s*.h5 in {tmp_path}: 2 files, 1437 rows, ")
    assert lines[2:5] == [
        "field  dtype  row shape",
        "image  uint8  8 x 8",
        "label  int64  one number",
    ]
    assert lines[6].split() == ["file", "rows", "size", "stored", "as"]
    assert lines[7].startswith("s000.h5  1000  ")
    assert lines[8].startswith("s001.h5   437  ")
    assert lines[7].endswith("1 x 1000 rows shuffle+gzip")
    assert lines[-1] == "problems: none"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"array": np.zeros((0, 8)), "chunks": (4, 8), "maxshape": (None, 8)}, "holds no rows"),
        ({"chunks": (4, 8)}, "chunks of 128 bytes at most, each a read of its own"),
        ({"array": np.zeros((3, 1 << 20)), "chunks": (3, 1 << 20)}, "chunks of 24.0 MiB"),
        ({"chunks": (64, 8), "compression": "lzf"}, "its filter lzf (use gzip or none)"),
        ({"chunks": (64, 4)}, "cut rows of (8,)"),
        ({"array": np.zeros((3, 8)), "chunks": (64, 8), "maxshape": (None, 8)}, "padding"),
    ],
)
def test_what_makes_reading_slow_is_said(tmp_path, options, words):
    save(tmp_path / "s1.h5", **options)
    save(tmp_path / "s2.h5", **options)
    (problem,) = info("s*.h5", tmp_path).problems
    assert problem.startswith("s1.h5 and 1 more: ")
    assert words in problem


def test_fields_with_unequal_chunks_are_said(tmp_path):
    with h5py.File(tmp_path / "s1.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((4096, 8)), chunks=(300, 8))
        file.create_dataset("y", data=np.zeros((4096, 8)), chunks=(512, 8))
    (problem,) = info("s*.h5", tmp_path).problems
    assert "'x' has 300 rows a chunk, which does not divide the 512" in problem


def test_short_chunks_of_a_narrow_field_beside_a_wide_one_are_no_problem(tmp_path):
    pack({"image": np.zeros((100, 4096)), "label": np.arange(100)}, tmp_path / "s.h5")
    data = info("s.h5", tmp_path)
    assert data.shards[0].chunk_rows == 7
    assert data.problems == ()


def test_rows_never_written_are_said(tmp_path):
    with h5py.File(tmp_path / "s1.h5", "w") as file:
        file.create_dataset("x", (2048, 8), "f8", chunks=(512, 8))[:512] = 1
        file.create_dataset("y", (2048, 8), "f8", chunks=(512, 8))
        file.create_dataset("z", (2048, 8), "f8")
    problems = info("s*.h5", tmp_path).problems
    assert [text.split(": ")[1].split("; ")[0] for text in problems] == [
        "field 'x' was written in part, the rest reads as its fill value",
        "field 'y' was never written and reads as its fill value",
        "field 'z' was never written and reads as its fill value",
    ]


def test_bad_files_are_problems_not_errors(tmp_path):
    save(tmp_path / "s1.h5")
    save(tmp_path / "s2.h5", array=np.zeros((64, 7), "f4"))
    (tmp_path / "s3.h5").write_text("no")
    data = info("s*.h5", tmp_path)
    assert [shard.name for shard in data.shards] == ["s1.h5", "s2.h5"]
    assert "row shape (7,); s1.h5: (8,)" in data.problems[0]
    assert "not an HDF5 file" in data.problems[1]
    assert "problems:\n  s2.h5" in info_text(data)


def test_no_match_is_a_problem(tmp_path):
    data = info("s*.h5", tmp_path)
    assert "no file matches 's*.h5'" in data.problems[0]
    assert "0 files, 0 rows" in info_text(data)


def test_what_is_no_field_is_named(tmp_path):
    with h5py.File(tmp_path / "s1.h5", "w") as file:
        file["x"] = np.zeros(4096)
        file["names"] = ["a", "b"]
    assert "no fields: names" in info_text(info("s*.h5", tmp_path))
