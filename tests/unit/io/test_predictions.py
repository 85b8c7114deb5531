"""The file of predictions, and what is beside it while it is written."""

import pytest

from mpiflow.errors import DataError
from mpiflow.io import predictions
from mpiflow.io.predictions import Rows

ROWS = [Rows("logits", (7, 3), "float32")]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_beside_it_is_there_until_it_is_cleared(tmp_path):
    path = tmp_path / "new" / "out.h5"
    predictions.folder_of(path).mkdir(parents=True)
    (predictions.folder_of(path) / "failure.txt").write_text("of a run before")
    predictions.create(path, ROWS, {})
    assert names(path.parent) == [".out.h5.part", ".out.h5.ranks"]
    assert not list(predictions.folder_of(path).iterdir())
    predictions.publish(path)
    predictions.clear(path)
    assert names(path.parent) == ["out.h5"]


def test_no_folder_stays_where_there_is_no_room_for_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predictions, "_reserve", full)
    with pytest.raises(DataError, match=r"out.h5: cannot be written: No space left on device"):
        predictions.create(tmp_path / "out.h5", ROWS, {})
    assert ".out.h5.ranks" not in names(tmp_path)
