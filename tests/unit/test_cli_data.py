"""Packing from the command line: a command for each kind of data, and the lists beside it."""

import gzip
import json

import h5py
import numpy as np
import pytest

from mpiflow.cli import main


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs `mpiflow data ...` in an empty folder; gives exit code, standard output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main(["data", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def fields(path):
    with h5py.File(path) as file:
        return {name: (array.shape, array.dtype.name) for name, array in file.items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_arrays_are_packed_shuffled_and_divided(call, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(20.0), label=np.arange(20))
    code, out, errors = call(
        "pack", "arrays", "a.npz", "out", "--test", "0.2", "--shuffle", "--seed", 7, "--shards", 3,
        "--compression", "gzip",
    )  # fmt: skip
    assert (code, errors) == (0, "")
    assert "out/train-*.h5 in " in out
    assert ": 3 files, 16 rows" in out
    assert ": 1 file, 4 rows" in out
    assert out.count("problems: none") == 2
    assert names(tmp_path / "out") == [
        "test-000.h5", "train-000.h5", "train-001.h5", "train-002.h5",
    ]  # fmt: skip
    code, out, errors = call("pack", "arrays", "a.npz", "out", "--test", "0.2")
    assert code == 1
    assert "train-000.h5, train-001.h5, train-002.h5 would be overwritten" in errors


def test_one_set_goes_to_files_of_its_name(call, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(20.0))
    assert call("pack", "arrays", "a.npz", "out/valid-*.h5", "--shards", "9,11")[0] == 0
    assert names(tmp_path / "out") == ["valid-000.h5", "valid-001.h5"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--test", "2.5"), "--test 2.5: write a share such as 0.1"),
        (("--test", "nan"), "--test nan: write a share"),
        (("--test", "20"), "20 of 20 rows to test leave none to train"),
        (("--shards", "two"), "--shards two: write a number of files"),
        (("--shards", "4,0"), "--shards 4,0: write a number of files"),
    ],
)
def test_options_that_cannot_be_meant_are_usage_errors(call, tmp_path, options, words):
    np.savez(tmp_path / "a.npz", x=np.arange(20.0))
    code, out, errors = call("pack", "arrays", "a.npz", "out", *options)
    assert (code, out) == (2, "")
    assert words in errors
    assert names(tmp_path) == ["a.npz"]


def test_images_are_packed_with_the_list_of_their_classes(call, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, size in (("cat/1", (9, 7)), ("dog/1", (5, 8)), ("dog/2", (6, 6))):
        path = tmp_path / f"photos/{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.zeros((*size, 3), np.uint8)).save(path)
    (tmp_path / "photos/dog/Thumbs.db").touch()
    code, out, _ = call("pack", "images", "photos", "out", "--size", "4x3", "--gray")
    assert code == 0
    assert "left out, as no images: photos/dog/Thumbs.db\n" in out
    assert "2 classes, named in out/classes.txt" in out
    assert fields("out/train-000.h5") == {
        "image": ((3, 1, 3, 4), "uint8"), "label": ((3,), "uint16"),
    }  # fmt: skip
    (tmp_path / "photos/dog").rename(tmp_path / "photos/eel")
    code, out, errors = call("pack", "images", "photos", "out/test-*.h5", "--size", 4)
    assert code == 1
    assert "'eel' is not among the 2 names in out/classes.txt" in errors
    assert names(tmp_path / "out") == ["classes.txt", "train-000.h5"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--fit", "pad"), "--fit pad goes with --size"),
        (("--size", "0"), "--size 0: write a number of pixels"),
        (("--size", "3x4x5"), "--size 3x4x5: write a number of pixels"),
    ],
)
def test_sizes_that_cannot_be_meant_are_usage_errors(call, options, words):
    code, _, errors = call("pack", "images", "photos", "out", *options)
    assert code == 2
    assert words in errors


def write_idx(folder, *parts):
    folder.mkdir()
    for rows, part in enumerate(parts, 3):
        image = np.zeros((rows, 2, 2), np.uint8).tobytes()
        head = b"\0\0\x08\3" + np.array([rows, 2, 2], ">i4").tobytes()
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + image))
        label = b"\0\0\x08\1" + np.array([rows], ">i4").tobytes() + bytes(rows)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(label)


def test_a_folder_of_idx_files_is_packed_with_its_test_set(call, tmp_path):
    write_idx(tmp_path / "mnist", "train", "t10k")
    assert call("pack", "idx", "mnist", "out")[0] == 0
    assert fields("out/train-000.h5") == {
        "image": ((3, 1, 2, 2), "uint8"), "label": ((3,), "uint16"),
    }  # fmt: skip
    assert fields("out/test-000.h5")["label"] == ((4,), "uint16")
    code, _, errors = call("pack", "idx", "mnist", "other", "--test", "1")
    assert (code, "mnist has a set to test already" in errors) == (2, True)


def test_idx_files_are_given_by_field_or_without_a_test_set(call, tmp_path):
    write_idx(tmp_path / "mnist", "train")
    assert call("pack", "idx", "mnist", "out", "--test", "1")[0] == 0
    assert fields("out/train-000.h5")["label"] == ((2,), "uint16")
    file = "mnist/train-labels-idx1-ubyte"
    assert call("pack", "idx", f"y={file}", f"z={file}", "other.h5")[0] == 0
    assert fields("other.h5") == {"y": ((3,), "uint16"), "z": ((3,), "uint16")}
    code, _, errors = call("pack", "idx", "mnist", "more", "out")
    assert (code, "give one folder, or FIELD=FILE" in errors) == (2, True)


def test_tables_are_packed_with_the_names_of_their_classes(call, tmp_path):
    (tmp_path / "a.csv").write_text("w,h,kind\n1,2,b\n3,4.5,a\n5,6,b\n")
    code, out, _ = call(
        "pack", "csv", "a.csv", "out", "--field", "x=w,h:float32", "--field", "label=kind:category",
        "--test", 1,
    )  # fmt: skip
    assert code == 0
    assert "2 names of field label, listed in out/label.txt" in out
    assert (tmp_path / "out/label.txt").read_text() == "b\na\n"
    assert fields("out/train-000.h5") == {"x": ((2, 2), "float32"), "label": ((2,), "int32")}
    (tmp_path / "b.csv").write_text("w\n1\n\n-\n")
    code, _, errors = call("pack", "csv", "b.csv", "other")
    assert code == 1
    assert errors.startswith("mpiflow: b.csv line 4, column 'w': '-' is not a whole number")
    assert not (tmp_path / "other").exists()


def test_text_is_packed_with_its_tokenizer(call, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("in the beginning was the word\n" * 50)
    options = ("--length", 9, "--test", "0.1")
    code, out, _ = call("pack", "text", "a.txt", "gpt", "--vocabulary", 270, *options)
    assert code == 0
    assert "tokens of 270, by gpt/tokenizer.json; guessed by its frequency, each costs " in out
    assert names(tmp_path / "gpt") == ["test-000.h5", "tokenizer.json", "train-000.h5"]
    given = ("--tokenizer", "gpt/tokenizer.json", "--pairs")
    assert call("pack", "text", "a.txt", "bert", *given, *options)[0] == 0
    rows = fields("bert/train-000.h5")["next"][0][0]
    assert fields("bert/train-000.h5") == {
        "tokens": ((rows, 9), "uint16"), "segment": ((rows, 9), "uint8"),
        "positions": ((rows, 1), "int32"), "label": ((rows, 1), "int32"),
        "next": ((rows,), "uint8"),
    }  # fmt: skip
    assert json.loads((tmp_path / "bert/tokenizer.json").read_text()) == json.loads(
        (tmp_path / "gpt/tokenizer.json").read_text()
    )
    # Another text by the same tokenizer goes beside; another tokenizer does not replace it.
    beside = ("pack", "text", "a.txt", "gpt/more-*.h5", "--length", 9)
    assert call(*beside, "--tokenizer", "gpt/tokenizer.json")[0] == 0
    code, _, errors = call(*beside, "--vocabulary", 280)
    assert code == 1
    assert "gpt/tokenizer.json: would be overwritten; use it (--tokenizer gpt/token" in errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give --vocabulary N to learn a tokenizer, or --tokenizer"),
        (("--vocabulary", 300, "--tokenizer", "t.json"), "give --vocabulary N to learn"),
        (("--tokenizer", "t.json", "--kind", "bpe"), "--kind is that of a tokenizer to be"),
        (("--tokenizer", "t.json"), "t.json: no such file"),
        (("--vocabulary", 100), "bytes and marks alone are 260 tokens"),
        (("--vocabulary", 300, "--length", 0), "--length 0: rows have 1 token"),
    ],
)
def test_texts_that_cannot_be_meant_are_usage_errors(call, tmp_path, options, words):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("in the beginning was the word\n")
    code, _, errors = call("pack", "text", "a.txt", "out", "--length", 9, *options)
    assert code == 2
    assert words in errors


def test_interrupted_packing_leaves_nothing(call, tmp_path):
    (tmp_path / "rows.py").write_text(
        "import numpy as np\n"
        "def rows():\n"
        "    yield {'x': np.zeros(5)}\n"
        "    raise KeyboardInterrupt\n"
    )
    code, _, errors = call("pack", "arrays", "rows.py:rows", "out")
    assert (code, errors) == (130, "mpiflow: interrupted\n")
    assert not list((tmp_path / "out").iterdir())


def test_every_kind_of_data_has_help(capsys):
    for kind in ("arrays", "images", "idx", "csv", "text"):
        with pytest.raises(SystemExit) as left:
            main(["data", "pack", kind, "--help"])
        assert left.value.code == 0
        assert "OUT" in capsys.readouterr().out
