"""IDX files: MNIST's names, every type, and what is cut off, too long or something else."""

import gzip

import numpy as np
import pytest

from mpiflow.errors import DataError
from mpiflow.io.pack.idx import find_idx, read_idx

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def content(array):
    head = bytes([0, 0, CODES[array.dtype.str[1:]], array.ndim])
    sizes = np.array(array.shape, ">u4").tobytes()
    return head + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def joined(pieces):
    pieces = list(pieces)
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


IMAGES = np.arange(7 * 3 * 4, dtype=np.uint8).reshape(7, 3, 4)
LABELS = np.arange(7, dtype=np.uint8)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_images_get_a_channel_and_labels_their_dtype(tmp_path, monkeypatch, pack):
    monkeypatch.setattr("mpiflow.io.pack.idx.PIECE_BYTES", 30)  # three pieces
    for name, array in (("images", IMAGES), ("labels", LABELS)):
        (tmp_path / name).write_bytes(pack(content(array)))
    found = joined(read_idx({"image": tmp_path / "images", "label": tmp_path / "labels"}))
    assert np.array_equal(found["image"], IMAGES[:, None])
    assert (found["label"].tolist(), found["label"].dtype) == (list(range(7)), np.uint16)


@pytest.mark.parametrize("dtype", CODES)
def test_every_type_is_read(tmp_path, dtype):
    array = np.array([[-3, 2], [1, 120]]).astype(dtype)
    (tmp_path / "x").write_bytes(content(array))
    assert np.array_equal(joined(read_idx({"x": tmp_path / "x"}))["x"], array)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no IDX file, it begins with the bytes "),
        (b"\x89PNG", "no IDX file, it begins with the bytes 89 50 4e 47"),
        (b"\0\0\x0a\1\0\0\0\0", "no IDX file"),
        (b"\0\0\x08\3\0\0", "truncated among the 3 dims"),
        (content(IMAGES)[:-13], "truncated, it holds 5 of the 7 rows"),
        (content(IMAGES) + b"\0", "goes on after the 7 rows"),
        (gzip.compress(content(IMAGES))[:-20], "cannot be read"),
        (content(IMAGES[:6]), "images has 6, .*labels has 7"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(tmp_path, data, words):
    (tmp_path / "images").write_bytes(data)
    (tmp_path / "labels").write_bytes(content(LABELS))
    with pytest.raises(DataError, match=words):
        joined(read_idx({"image": tmp_path / "images", "label": tmp_path / "labels"}))


def test_the_files_of_mnist_are_found_by_their_names(tmp_path):
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte", "t10k-images.idx3-ubyte"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"no file t10k-labels-idx1-ubyte, plain or with \.gz"):
        find_idx(tmp_path)
    (tmp_path / "t10k-labels.idx1-ubyte").touch()
    (tmp_path / "train-labels-idx1-ubyte.gz").touch()  # beside the unpacked one
    found = {
        name: {f: path.name for f, path in s.items()} for name, s in find_idx(tmp_path).items()
    }
    assert found == {
        "train": {"image": "train-images-idx3-ubyte.gz", "label": "train-labels-idx1-ubyte"},
        "test": {"image": "t10k-images.idx3-ubyte", "label": "t10k-labels.idx1-ubyte"},
    }
    (tmp_path / "letters-train-images-idx3-ubyte").touch()
    with pytest.raises(DataError, match="there are letters-train-images-idx3-ubyte, train-images"):
        find_idx(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no file is named as MNIST's are"):
        find_idx(tmp_path / "none")
