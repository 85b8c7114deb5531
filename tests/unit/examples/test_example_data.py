"""The generated data of the examples are what they say, and a measure is the exact one."""

import gzip
import sys

import numpy as np
import pytest
from jobs import EXAMPLES

from mpiflow.models.widedeep import BUCKETS, auc

sys.path.insert(0, str(EXAMPLES))
import pack_clicks
import pack_faces
import pack_fashion
import pack_field
import pack_text

VOCABULARY = 64


@pytest.fixture(scope="module")
def words():
    return pack_text.chain(20_000, VOCABULARY, seed=1)


def test_a_generated_text_is_predicted_by_its_last_token(words):
    assert pack_text.SPECIAL <= words.min() < words.max() < VOCABULARY
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(pairs, (words[:-1], words[1:]), 1)
    given = pairs / pairs.sum(1, keepdims=True).clip(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(pairs * np.log(given)) / pairs.sum()
    assert 1.0 < entropy < 1.25


def test_rows_of_a_decoder_are_the_text(words):
    tokens = pack_text.gpt_rows(words, 33, VOCABULARY)["tokens"]
    assert tokens.shape == (20_000 // 33, 33)
    assert np.array_equal(tokens.reshape(-1), words[: tokens.size])


def test_tokens_of_a_large_vocabulary_are_not_cut():
    text = np.array([1, 65_535, 65_536, 99_999])
    for vocabulary, dtype in ((65_536, "uint16"), (100_000, "uint32")):
        rows = pack_text.gpt_rows(text[text < vocabulary], 2, vocabulary)["tokens"]
        assert rows.dtype == dtype
        assert np.array_equal(rows.reshape(-1), text[: rows.size])


def test_rows_of_bert_hide_what_is_to_be_found(words):
    rows = pack_text.bert_rows(words, 33, VOCABULARY, seed=0)
    tokens, label = rows["tokens"].astype(int), rows["label"]
    chosen = label != pack_text.IGNORED
    text = tokens >= pack_text.SPECIAL
    share = chosen.sum() / (text | chosen).sum()
    assert share == pytest.approx(0.15, abs=0.01)
    assert (tokens[chosen] == pack_text.MASK).mean() == pytest.approx(0.8, abs=0.03)
    assert (tokens[chosen] == label[chosen]).mean() == pytest.approx(0.1, abs=0.03)
    assert not (tokens[~chosen] == pack_text.MASK).any()
    assert (tokens[:, 0] == pack_text.START).all()
    assert (tokens[:, -1] == pack_text.END).all()
    original = np.where(chosen, label, tokens)
    follows = rows["next"] == 1
    pieces = words[: len(tokens) * 30].reshape(-1, 30)
    second = original[:, 17:32]
    assert np.array_equal(second[follows], pieces[follows, 15:])
    assert (second[~follows] != pieces[~follows, 15:]).any(1).mean() > 0.9
    assert rows["segment"][0].tolist() == [0] * 17 + [1] * 16


def test_an_idx_file_is_read(tmp_path):
    image = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    header = b"\0\0\x08\x03" + np.array(image.shape, ">i4").tobytes()
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(header + image.tobytes()))
    assert np.array_equal(pack_fashion.read_idx(path), image)
    path.write_bytes(gzip.compress(b"\0\0\x0d\x03"))
    with pytest.raises(SystemExit, match="no IDX file of bytes"):
        pack_fashion.read_idx(path)


def test_test_rows_are_of_the_classes_of_the_training_rows_but_not_the_same():
    first, second = (pack_faces.draw_views(5, 3, seed) for seed in (1, 2))
    assert np.bincount(first["label"]).tolist() == [3] * 5
    assert not np.array_equal(first["image"], second["image"])
    means = [[v["image"][v["label"] == c].mean((0, 1)) for c in range(5)] for v in (first, second)]
    for c in range(5):
        distance = [np.abs(means[0][c] - means[1][other]).mean() for other in range(5)]
        assert np.argmin(distance) == c


def test_a_field_has_the_strength_that_it_says():
    rows = pack_field.draw_fields(8, 20, seed=0)
    assert rows["volume"].shape == (20, 1, 8, 8, 8)
    strength = rows["volume"].std(axis=(1, 2, 3, 4))
    np.testing.assert_allclose(strength, 1 + rows["numbers"][:, 1] / 2, rtol=1e-5)


def test_the_area_under_the_curve_of_histograms_is_the_exact_one():
    rows, probability = pack_clicks.draw_clicks(50, 4000, seed=1)
    click = rows["click"]
    exact = pack_clicks.exact_auc(probability, click)
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
