"""The generated data of the examples are what they say, and a measure is the exact one."""

import sys

import numpy as np
import pytest
from jobs import EXAMPLES

from mpiflow.models.widedeep import BUCKETS, auc

sys.path.insert(0, str(EXAMPLES))
import generated

VOCABULARY = 64


@pytest.fixture(scope="module")
def words():
    return generated.text(20_000, 1, vocabulary=VOCABULARY).astype(int)


def test_a_generated_text_is_predicted_by_its_last_token(words):
    assert generated.MARKS <= words.min() < words.max() < VOCABULARY
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(pairs, (words[:-1], words[1:]), 1)
    given = pairs / pairs.sum(1, keepdims=True).clip(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(pairs * np.log(given)) / pairs.sum()
    assert 1.0 < entropy < 1.25


def test_rows_of_a_decoder_are_the_text():
    tokens = generated.token_rows(7, 1, vocabulary=VOCABULARY, length=33)["tokens"]
    assert tokens.shape == (7, 33)
    assert np.array_equal(tokens.reshape(-1), generated.text(7 * 33, 1, vocabulary=VOCABULARY))


def test_test_rows_are_of_the_classes_of_the_training_rows_but_not_the_same():
    first, second = (generated.faces(15, seed, classes=5) for seed in (1, 2))
    assert np.bincount(first["label"]).tolist() == [3] * 5
    assert not np.array_equal(first["image"], second["image"])
    means = [[v["image"][v["label"] == c].mean((0, 1)) for c in range(5)] for v in (first, second)]
    for c in range(5):
        distance = [np.abs(means[0][c] - means[1][other]).mean() for other in range(5)]
        assert np.argmin(distance) == c


def test_a_field_has_the_strength_that_it_says():
    rows = generated.fields(20, 0, size=8)
    assert rows["volume"].shape == (20, 1, 8, 8, 8)
    strength = rows["volume"].std(axis=(1, 2, 3, 4))
    np.testing.assert_allclose(strength, 1 + rows["numbers"][:, 1] / 2, rtol=1e-5)


def test_the_area_under_the_curve_of_histograms_is_the_exact_one():
    rows, probability = generated.clicks_and_truth(4000, 1, table=50)
    click = rows["click"]
    exact = generated.exact_auc(probability, click)
    assert 0.75 < exact < 0.95
    assert exact == pytest.approx(np.mean(probability[click == 1][:, None]
                                          > probability[click == 0][None, :]))  # fmt: skip
    bucket = (probability * BUCKETS).astype(int)
    counts = {"click": bucket[click == 1], "other": bucket[click == 0]}
    evaluation = {
        f"{name}{i:02}": float(count)
        for name, found in counts.items()
        for i, count in enumerate(np.bincount(found, minlength=BUCKETS))
    }
    assert auc(evaluation) == pytest.approx(exact, abs=2e-3)
