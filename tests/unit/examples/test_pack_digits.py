"""The digits example's data: exact totals, every class in both parts alike, the same each time."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="sklearn is not installed")
SCRIPT = Path(__file__).parents[3] / "examples/pack_digits.py"


def load_digits():
    # Imported here: it takes a second, which each process that collects tests would wait for.
    from sklearn import datasets

    return datasets.load_digits()


@pytest.fixture
def packed(tmp_path, monkeypatch):
    folder = tmp_path / "digits"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(folder)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return folder


def rows_of(folder, pattern):
    images, labels, lengths = [], [], []
    for path in sorted(folder.glob(pattern)):
        with h5py.File(path) as file:
            images.append(file["image"][:])
            labels.append(file["label"][:])
            lengths.append(len(labels[-1]))
    return np.concatenate(images), np.concatenate(labels), lengths


def test_shards_are_unequal_and_hold_every_digit_once(packed):
    train, train_labels, train_lengths = rows_of(packed, "train-*.h5")
    test, test_labels, test_lengths = rows_of(packed, "test-*.h5")
    assert (train_lengths, test_lengths) == ([401, 377, 350, 309], [200, 160])
    assert (train.dtype, train.shape[1:], train_labels.dtype) == (np.uint8, (64,), np.int64)
    digits = load_digits()
    whole = np.column_stack([digits.data, digits.target])
    both = np.vstack([np.column_stack([train, train_labels]), np.column_stack([test, test_labels])])
    assert np.array_equal(both[np.lexsort(both.T)], whole[np.lexsort(whole.T)])


def test_every_class_gives_a_fifth_to_the_test():
    labels = load_digits().target
    train, test = runpy.run_path(str(SCRIPT))["split_rows"](labels, 360)
    assert (len(train), len(test)) == (1437, 360)
    exact = np.bincount(labels) * 360 / 1797
    assert np.abs(np.bincount(labels[test]) - exact).max() < 1


def test_every_stretch_of_rows_has_every_class():
    labels = load_digits().target
    train, test = runpy.run_path(str(SCRIPT))["split_rows"](labels, 360)
    stretches = [*np.array_split(train, 4), *np.array_split(test, 2)]
    assert min(np.bincount(labels[rows], minlength=10).min() for rows in stretches) >= 10
