import errno
import fcntl
import os
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpiflow.errors import DataError
from mpiflow.io.dataset import check_files, inspect

SIZES = (7, 5, 12)


def write(path, rows=7, start=0, **change):
    """One shard of `rows` rows numbered from `start`; `change` replaces or, if None, drops."""
    ids = np.arange(start, start + rows)
    arrays = {"x": np.sin(ids[:, None] + np.arange(4)).astype("f4"), "y": ids.astype("i8")}
    arrays |= change
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if array is not None:
                file[name] = array


@pytest.fixture
def folder(tmp_path):
    start = 0
    for name, rows in zip(("s1.h5", "s2.h5", "s10.h5"), SIZES, strict=True):
        write(tmp_path / name, rows, start)
        start += rows
    return tmp_path


def look(folder, pattern="s*.h5", **change):
    options = {"batch": 4, "shuffle": True, "seed": 0, "lanes": 2, "window": 4}
    return inspect("train", pattern, folder, **(options | change))


def test_shards_stand_in_natural_order_with_their_rows(folder):
    data = look(folder)
    assert [shard.name for shard in data.shards] == ["s1.h5", "s2.h5", "s10.h5"]
    assert [shard.rows for shard in data.shards] == list(SIZES)
    assert data.rows == 24
    assert [(f.name, f.shape, f.dtype) for f in data.fields] == [
        ("x", (4,), "float32"),
        ("y", (), "int64"),
    ]


def test_order_does_not_depend_on_the_listing(folder, monkeypatch):
    expected = look(folder)
    scandir = os.scandir
    entries = {}

    class Reversed:
        def __init__(self, path):
            with scandir(path) as found:
                entries[path] = list(found)[::-1]
            self.found = entries[path]

        def __enter__(self):
            return iter(self.found)

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(os, "scandir", Reversed)
    assert look(folder) == expected
    assert entries


def test_hidden_files_and_folders_are_not_shards(folder):
    (folder / ".s3.h5.swp").write_text("x")
    (folder / ".s4.h5").write_text("x")
    (folder / "s5.h5").mkdir()
    assert len(look(folder).shards) == 3
    assert len(look(folder, "*s*").shards) == 3


def test_a_dangling_link_is_a_bad_shard(folder):
    (folder / "s3.h5").symlink_to("gone.h5")
    with pytest.raises(DataError, match=r"s3\.h5: no such file"):
        look(folder)


def test_all_bad_shards_are_listed_at_once(folder):
    whole = (folder / "s1.h5").read_bytes()
    (folder / "s20.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "s21.h5").write_text("not HDF5")
    (folder / "s22.h5").write_bytes(b"")
    write(folder / "s23.h5", y=None)
    write(folder / "s24.h5", x=np.zeros((7, 4), "f8"))
    write(folder / "s25.h5", x=np.zeros((7, 6), "f4"))
    write(folder / "s26.h5", y=np.arange(3))
    write(folder / "s27.h5", z=np.arange(7))
    write(folder / "s28.h5", x=None, y=None)
    with pytest.raises(DataError) as caught:
        look(folder)
    lines = str(caught.value).splitlines()
    assert "9 problem(s) in 12 file(s)" in lines[0]
    claims = [
        ("s20.h5", "truncated"),
        ("s21.h5", "not an HDF5 file"),
        ("s22.h5", "0 bytes"),
        ("s23.h5", "'y' is missing; s1.h5 has it"),
        ("s24.h5", "'x' has dtype float64; s1.h5: float32"),
        ("s25.h5", "'x' has row shape (6,); s1.h5: (4,)"),
        ("s26.h5", "unequal numbers of rows: 'x' 7, 'y' 3"),
        ("s27.h5", "has field 'z', which s1.h5 has not"),
        ("s28.h5", "it holds nothing"),
    ]
    for name, words in claims:
        assert any(name in line and words in line for line in lines), (name, words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(folder):
    (folder / "s2.h5").chmod(0)
    with pytest.raises(DataError, match=r"s2\.h5: permission"):
        look(folder)


def test_a_file_locked_by_its_writer_is_named(folder):
    with open(folder / "s2.h5") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"s2\.h5: another process has it open for writing"):
            look(folder)


def test_a_file_system_without_locks_is_read(folder, monkeypatch):
    expected = look(folder)
    opened = []
    original = h5py.File

    def file(path, mode, locking):
        opened.append(locking)
        if locking:
            raise OSError(errno.ENOLCK, "unable to lock file, errno = 37")
        return original(path, mode, locking=locking)

    monkeypatch.setattr(h5py, "File", file)
    assert look(folder) == expected
    assert opened == ["best-effort", False] * 3


def test_no_match_names_pattern_and_folder(folder):
    with pytest.raises(DataError, match=r"'none-\*\.h5' in .*" + folder.name):
        look(folder, "none-*.h5")


def test_a_batch_larger_than_the_rows_is_refused_with_both_numbers(folder):
    with pytest.raises(DataError, match="batch of 25 rows is larger than the 24 rows"):
        look(folder, batch=25)
    assert look(folder, batch=25, drop=False).batch == 25


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lanes": 5}, "5 lanes cannot share a batch of 4"),
        ({"lanes": 0}, "0 lanes"),
        ({"batch": 0}, "batch 0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(folder, change, words):
    with pytest.raises(DataError, match=words):
        look(folder, **change)


def test_a_shard_without_rows_counts_nothing(folder):
    write(folder / "s3.h5", 0)
    data = look(folder)
    assert [shard.rows for shard in data.shards] == [7, 5, 0, 12]
    with pytest.raises(DataError, match="no rows at all"):
        look(folder, "s3.h5")


def test_byte_order_is_no_difference(folder):
    write(folder / "s2.h5", 5, x=np.zeros((5, 4), ">f4"))
    assert look(folder).fields[0].dtype == "float32"


def test_text_and_scalars_are_no_fields(tmp_path):
    write(tmp_path / "s1.h5", name=["a"] * 7, version=3, flag=np.ones(7, bool))
    assert [f.name for f in look(tmp_path).fields] == ["flag", "x", "y"]
    assert look(tmp_path).fields[0].dtype == "bool"


DECLARED = {"y": ((), "int64"), "x": ((4,), "float32")}


def test_declared_fields_plan_without_files_and_without_h5py(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    data = look(tmp_path, fields=DECLARED, rows=24)
    assert (data.shards, data.rows, data.fingerprint) == ((), 24, "")
    assert [f.name for f in data.fields] == ["x", "y"]


def test_files_must_agree_with_the_declaration(folder):
    assert look(folder, fields=DECLARED, rows=24) == look(folder)
    with pytest.raises(DataError, match="'x' has dtype float32; the declaration: float16"):
        look(folder, fields=DECLARED | {"x": ((4,), "float16")})
    with pytest.raises(DataError, match="25 rows are declared, the files hold 24"):
        look(folder, fields=DECLARED, rows=25)


def test_a_declaration_chooses_among_fields(folder):
    data = look(folder, fields={"y": ((), "int64")})
    assert [f.name for f in data.fields] == ["y"]


def test_missing_h5py_is_said_in_words(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match="needs h5py"):
        look(folder)


def test_fingerprint_is_of_the_content_not_of_place_or_time(folder, tmp_path_factory):
    data = look(folder)
    other = tmp_path_factory.mktemp("other")
    for name in ("s1.h5", "s2.h5", "s10.h5"):
        (other / name).write_bytes((folder / name).read_bytes())
        os.utime(other / name, (1, 1))
    assert look(other) == data
    write(other / "s2.h5", 5, 8)
    changed = look(other)
    assert changed.fingerprint != data.fingerprint
    equal = [a == b for a, b in zip(data.shards, changed.shards, strict=True)]
    assert equal == [shard.name != "s2.h5" for shard in data.shards]


def test_check_accepts_the_same_files(folder):
    check_files(look(folder), folder)
    check_files(look(folder, fields={"y": ((), "int64")}), folder)


def changed_rows(folder):
    write(folder / "s2.h5", 6, 7)


def changed_content(folder):
    write(folder / "s2.h5", 5, 8)


def changed_dtype(folder):
    write(folder / "s2.h5", 5, 7, y=np.arange(5, dtype="i4"))


def one_less(folder):
    (folder / "s2.h5").unlink()


def one_more(folder):
    write(folder / "s3.h5")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (changed_rows, r"s2\.h5: 6 rows; the plan says 5"),
        (changed_content, r"plan again\n  s2\.h5: as many rows, but its content[^\n]*$"),
        (changed_dtype, r"s2\.h5: field 'y' has dtype int32; .*: int64"),
        (one_less, r"s2\.h5: no such file"),
        (one_more, r"s3\.h5: not in the plan"),
    ],
)
def test_check_says_which_shard_differs_and_how(folder, fault, words):
    data = look(folder)
    fault(folder)
    with pytest.raises(DataError, match="plan was made for other data") as caught:
        check_files(data, folder)
    assert caught.match(words)


def test_check_refuses_a_plan_made_without_files(folder):
    data = look(Path(folder / "none"), fields=DECLARED, rows=24)
    with pytest.raises(DataError, match="declared fields"):
        check_files(data, folder)


def test_long_chunks_of_a_narrow_field_do_not_make_wide_rows_pile_up(tmp_path):
    with h5py.File(tmp_path / "s1.h5", "w") as file:
        file.create_dataset("image", (5000, 4096), "f4", chunks=(8, 4096))
        file.create_dataset("label", (5000,), "i8", chunks=(2048,))
    assert look(tmp_path).shards[0].chunk_rows == 8


def test_rows_without_chunks_are_read_a_mebibyte_at_a_time(tmp_path):
    with h5py.File(tmp_path / "s1.h5", "w") as file:
        file.create_dataset("image", (5000, 255), "f4")
        file.create_dataset("label", (5000,), "i4")
    assert look(tmp_path).shards[0].chunk_rows == 1024


@pytest.mark.parametrize(
    ("field", "words"),
    [(((4, 0), "int8"), r"row shape \(4, 0\)"), (((), "int7"), "'int7', no dtype")],
)
def test_declarations_that_cannot_be_meant_are_refused(tmp_path, field, words):
    with pytest.raises(DataError, match=words):
        look(tmp_path, fields={"x": field}, rows=9)
