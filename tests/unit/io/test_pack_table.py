"""CSV: columns to fields, types, and every cell that is no such number named by file and line."""

import gzip

import numpy as np
import pytest

from mpiflow.errors import DataError, UsageError
from mpiflow.io.pack import table
from mpiflow.io.pack.columns import TableField, parse_field
from mpiflow.io.pack.names import Numbering
from mpiflow.io.pack.table import read_tables

IRIS = """width,height,kind,count
1.5,2,setosa,3
0.5,-1e3,"vir,ginica",4

2.25,7,setosa,-5
"""


@pytest.fixture
def read(tmp_path):
    """`read(text, *fields)` gives the rows of a file with this text, all pieces joined."""

    def read(*texts, fields=(), names=tmp_path / "none", **options):
        files = [tmp_path / f"{number}.csv" for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        made = read_tables(files, [parse_field(f) for f in fields], cached(names), **options)
        pieces = list(made)
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def cached(folder):
        found = {}
        return lambda name: found.setdefault(name, Numbering(folder / f"{name}.txt"))

    return read


@pytest.mark.parametrize("block", [1, 8, 1000])
def test_columns_become_fields_of_their_types(read, monkeypatch, block):
    monkeypatch.setattr(table, "_BLOCK_CELLS", block)
    rows = read(
        IRIS, gzip.compress(IRIS.encode()),
        fields=["x=width,height", "kind:category", "count:int8", "all=count..count:float64:1x1x1"],
    )  # fmt: skip
    assert {name: (a.dtype.name, a.shape) for name, a in rows.items()} == {
        "x": ("float32", (6, 2)),
        "kind": ("int32", (6,)),
        "count": ("int8", (6,)),
        "all": ("float64", (6, 1, 1, 1)),
    }
    assert rows["x"][:3].tolist() == [[1.5, 2], [0.5, -1000], [2.25, 7]]
    assert rows["kind"].tolist() == [0, 1, 0] * 2
    assert rows["count"].tolist() == [3, 4, -5] * 2


def test_without_fields_every_column_is_one_of_the_type_of_its_first_cell(read):
    rows = read("a,b\n1,2.5\n-7,3\n")
    assert {name: (a.dtype.name, a.tolist()) for name, a in rows.items()} == {
        "a": ("int64", [1, -7]),
        "b": ("float32", [2.5, 3]),
    }


def test_columns_without_a_header_are_numbered(read):
    rows = read("1;2;3\n4;5;6\n", fields=["x=1..2", "y=3"], header=False, delimiter=";")
    assert rows["x"].tolist() == [[1, 2], [4, 5]]
    assert rows["y"].tolist() == [3, 6]


def test_truth_values_are_read_in_words_and_digits(read):
    assert read("a\n0\ntrue\nFALSE\n1\n", fields=["a:bool"])["a"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("a\n1\n\n\n?\n", "a:int64", "line 5, column 'a': the cell is missing .'.'.; write a"),
        ("a,b\n1,2\n3,\n", "x=a,b:float32", "line 3, column 'b': the cell is missing; write"),
        ("a\n1\nNaN\n", "a:float32", "line 3, column 'a': the cell is missing .'NaN'."),
        ("a\n1\n2.5\n", "a", r"line 3, column 'a': '2.5' is not a whole number; the first row makes"
         r" field 'a' int64, give another type as in --field a=a:float64"),
        ("a\nx\ny\n", "a", r"line 2, column 'a': 'x' is not a number; the first row makes field"
         r" 'a' float32, give another type as in --field a=a:category$"),
        ("a\n1\nx\n", "a:float32", "line 3, column 'a': 'x' is not a number$"),
        ("a\n255\n256\n", "a:uint8", r"line 3, column 'a': 256 does not fit uint8 \(0 to 255\)"),
        ("a\n1\n1e39\n", "a:float32", "line 3, column 'a': 1e39 does not fit float32"),
        ("a\n0\n2\n", "a:bool", "line 3, column 'a': '2' is not a truth value"),
        ("a,b\n,1\n", "a:category", "line 2, column 'a': the cell is missing; write a name"),
        ("a,b\n1,2\n3\n", "a", "line 3 has 1 cells, the first line 2"),
        ('a,b\n1,"2"x\n', "a", "line 2: .*expected after"),
        ("a,a\n1,2\n", "a", "the header names 'a' twice"),
        ("a\n", "a", "no rows"),
        ("", "a", "no rows"),
        (b"a\n1\n\xff\n", "a", "line 3: not text in UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_named_by_file_and_line(read, text, field, words):
    with pytest.raises(DataError, match=rf"0\.csv:? {words}|0\.csv: {words}"):
        read(text, fields=[field])


def test_files_with_other_columns_are_refused(read):
    with pytest.raises(DataError, match=r"1\.csv has the columns \['b'\]; .*0\.csv has \['a'\]"):
        read("a\n1\n", "b\n1\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hight", "field 'hight': no column 'hight'; there are height"),
        ("x=height..width", "column 'height' comes after 'width'"),
        ("x=width,height:float32:3", r"has 2 columns, its shape \(3,\) takes 3"),
        ("=a", "write NAME=COLUMN"),
        ("x=a,,b", "write NAME=COLUMN"),
        ("x=a:complex64", "'complex64' is none of float32"),
        ("x=a:int8:0x2", "'0x2' is not the shape of a row"),
    ],
)
def test_fields_that_cannot_be_meant_are_refused(read, text, words):
    with pytest.raises(UsageError, match=words):
        read(IRIS, fields=[text])


def test_a_field_is_written_as_text():
    assert parse_field("x") == TableField("x", ("x",))
    assert parse_field("x=a,p0..p9:uint8:2x5") == TableField("x", ("a", "p0..p9"), "uint8", (2, 5))


def test_names_are_numbered_as_in_the_file_that_is_there(read, tmp_path):
    (tmp_path / "kind.txt").write_text("vir,ginica\nother\nsetosa\n")
    assert read(IRIS, fields=["kind:category"], names=tmp_path)["kind"].tolist() == [2, 0, 2]
    (tmp_path / "kind.txt").write_text("vir,ginica\n")
    with pytest.raises(
        DataError, match=r"line 2, column 'kind': 'setosa' is not among the 1 names"
    ):
        read(IRIS, fields=["kind:category"], names=tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_name(read):
    assert list(read(b"\xef\xbb\xbfa\r\n1\r\n")) == ["a"]
