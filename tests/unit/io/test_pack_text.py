"""Text as rows of tokens: nothing is lost, documents and sets stay apart, pairs hide tokens."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest

from mpiflow.errors import DataError, UsageError
from mpiflow.io.pack import rows as pack_rows
from mpiflow.io.pack import text as pack_text
from mpiflow.io.pack.files import text_lines
from mpiflow.io.pack.pairs import PairRows, hidden_count
from mpiflow.io.pack.rows import shuffled
from mpiflow.io.pack.tokens import Marks, TokenRows, token_dtype

tokenizers = pytest.importorskip("tokenizers")
from mpiflow.io.pack.tokenizer import MARKS, learn_tokenizer, read_tokenizer  # noqa: E402

WORDS = "in the beginning was the word and the word was with gr\u00fcn\n\n"
TEXT = WORDS * 40 + "end"
END = MARKS.index("<end>")


@pytest.fixture(scope="module")
def tokenizer():
    return learn_tokenizer([TEXT], "bpe", 280)


@pytest.fixture
def encoded(tmp_path, tokenizer):
    """`encoded(texts, **options)` gives the tokens of files with these texts."""

    def encoded(*texts, **options):
        files = [tmp_path / f"{number}.txt" for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text.encode())
        return pack_text.encode(files, tokenizer, tmp_path, **options)

    return encoded


def decoded(tokenizer, tokens):
    return tokenizers.Tokenizer.from_str(tokenizer.text()).decode(
        list(map(int, tokens)), skip_special_tokens=False
    )


def test_all_of_the_text_is_in_its_tokens(encoded, tokenizer, tmp_path):
    found = encoded(TEXT, "more")
    assert decoded(tokenizer, found.tokens) == TEXT + "more"
    assert (tokenizer.vocabulary, found.tokens.dtype) == (280, np.uint16)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".txt"]


def test_tokens_do_not_depend_on_how_the_text_is_read(encoded, monkeypatch):
    whole = encoded(TEXT, documents="blank", mark_ends=True)
    monkeypatch.setattr(pack_text, "_PART_BYTES", 100)
    parts = encoded(TEXT, documents="blank", mark_ends=True)
    assert np.array_equal(whole.tokens, parts.tokens)
    assert np.array_equal(whole.ends, parts.ends)
    assert whole.nats() == pytest.approx(parts.nats())


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("none", ["a b\nc\n\n\nd\n", "e\n\n"]),
        ("file", ["a b\nc\n\n\nd\n", "e\n\n"]),
        ("blank", ["a b\nc\n", "d\n", "e\n"]),
        ("line", ["a b", "c", "d", "e"]),
    ],
)
def test_documents_end_with_a_token(encoded, tokenizer, documents, expected):
    found = encoded("a b\nc\n\n\nd\n", "e\n\n", documents=documents, mark_ends=True)
    pieces = np.split(found.tokens, found.ends)[:-1]
    if documents == "none":
        expected = ["".join(expected)]
    else:
        assert all(piece[-1] == END for piece in pieces)
        pieces = [piece[:-1] for piece in pieces]
    assert [decoded(tokenizer, piece) for piece in pieces] == expected


def test_rows_are_one_after_another_and_the_last_are_to_test(encoded):
    found = encoded(TEXT)
    sets = pack_text.text_sets(found, 7, pairs=False, test=0.1, seed=0)
    count = len(found.tokens) // 7
    assert {name: len(rows) for name, rows in sets.items()} == {
        "train": count - round(count / 10), "test": round(count / 10),
    }  # fmt: skip
    taken = [rows.take(slice(0, len(rows)))["tokens"] for rows in sets.values()]
    assert np.array_equal(np.concatenate(taken).reshape(-1), found.tokens[: 7 * count])


def test_rows_of_tokens_are_taken_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(pack_rows, "PIECE_BYTES", 4 << 20)
    rows = TokenRows(np.zeros(6 << 20, np.uint16), 64 * np.arange(6 << 14), 64)
    tracemalloc.start()
    try:
        count = sum(len(piece["tokens"]) for piece in shuffled(rows, 0).pieces())
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    assert count == 6 << 14


def test_rows_of_documents_have_a_part_in_one_only(encoded):
    found = encoded("one two three four\n\nfive six seven\n\nx\n", documents="blank")
    rows = found.rows_of_documents(5)
    begins = [0, *found.ends[:-1]]
    expected = [s for b, e in zip(begins, found.ends, strict=True) for s in range(b, e - 4, 5)]
    assert rows.starts.tolist() == expected
    assert len(expected) >= 2


def test_a_text_without_a_row_is_refused(encoded):
    with pytest.raises(DataError, match=r"0\.txt, .*1\.txt: no text"):
        encoded("", "", documents="file", mark_ends=True)
    with pytest.raises(DataError, match="the text does not have the 99 tokens of a row; all"):
        pack_text.text_sets(encoded("short"), 99, pairs=False, test=0, seed=0)
    with pytest.raises(UsageError, match="--length 4: a row has 5 tokens at least"):
        pack_text.text_sets(encoded(TEXT), 4, pairs=True, test=0, seed=0)


def test_lines_are_read_in_pieces_that_cut_no_character(tmp_path):
    text = "a\u00fc\u20ac\U0001f600\n" * 3
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "a.gz"):
        for most in (4, 5, 7, -1):
            counted = []
            lines = list(text_lines(tmp_path / name, most, counted.append))
            assert "".join(lines) == text
            assert sum(counted) == len(text.encode())
    (tmp_path / "a.txt").write_bytes(b"fine\nno\xe2(\n")
    with pytest.raises(DataError, match=r"a\.txt line 2: not text in UTF-8: .*0xe2"):
        list(text_lines(tmp_path / "a.txt", 4))
    (tmp_path / "a.txt").write_bytes(b"cut \xe2\x82")
    with pytest.raises(DataError, match=r"line 1: not text in UTF-8"):
        list(text_lines(tmp_path / "a.txt"))


def test_a_tokenizer_is_read_as_it_was_written(tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer.text())
    again = read_tokenizer(tmp_path / "tokenizer.json")
    assert again.encode([TEXT]) == tokenizer.encode([TEXT])
    assert json.loads(again.text()) == json.loads(tokenizer.text())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json"):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_wordpiece_tokenizer_is_learned_in_lower_case():
    made = learn_tokenizer([TEXT], "wordpiece", 60)
    assert made.encode(["THE Word"]) == made.encode(["the word"])
    assert made.vocabulary <= 60
    assert 0 not in made.marks().words


@pytest.mark.parametrize(("kind", "vocabulary"), [("bpe", 259), ("wordpiece", 12)])
def test_a_vocabulary_that_cannot_hold_the_text_is_refused(kind, vocabulary):
    with pytest.raises(UsageError, match=f"--vocabulary {vocabulary}: .* alone are"):
        learn_tokenizer([TEXT], kind, vocabulary)


def test_the_marks_of_other_tokenizers_are_found_by_name(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="a"))
    made.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    made.save(str(tmp_path / "t.json"))
    marks = read_tokenizer(tmp_path / "t.json").marks()
    assert (marks.start, marks.end, marks.mask, marks.words.tolist()) == (2, 3, 4, [1])
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    made.save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match="has no token of the names <end>, "):
        read_tokenizer(tmp_path / "t.json").mark("end")
    with pytest.raises(DataError, match="token 0 is a word"):
        read_tokenizer(tmp_path / "t.json").marks()


def test_tokens_of_a_large_vocabulary_are_not_cut():
    assert [token_dtype(1 << 16), token_dtype((1 << 16) + 1)] == ["uint16", "uint32"]


# -- pairs ----------------------------------------------------------------------------------------

VOCABULARY, LENGTH, START, MASK = 64, 33, 1, 3
PIECE = LENGTH - PairRows.MARKS


@pytest.fixture(scope="module")
def pieces():
    words = np.random.RandomState(0).randint(4, VOCABULARY, 2000 * PIECE).astype(np.uint16)
    return TokenRows(words, PIECE * np.arange(2000), PIECE)


@pytest.fixture(scope="module")
def pairs(pieces):
    return PairRows(pieces, Marks(START, END, MASK, np.arange(4, VOCABULARY)), seed=0)


def test_pairs_hide_what_is_to_be_found(pieces, pairs):
    rows = pairs.take(slice(0, 2000))
    tokens, label, positions = (rows[k].astype(int) for k in ("tokens", "label", "positions"))
    assert label.shape == positions.shape == (2000, hidden_count(LENGTH))
    assert (np.diff(positions, axis=1) > 0).all()
    chosen = np.zeros(tokens.shape, bool)
    np.put_along_axis(chosen, positions, True, 1)
    assert not chosen[:, [0, 16, 32]].any()
    text_share = np.delete(chosen, [0, 16, 32], 1).mean(0)
    assert text_share == pytest.approx(hidden_count(LENGTH) / PIECE, abs=0.05)
    shown = np.take_along_axis(tokens, positions, 1)
    assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (shown == label).mean() == pytest.approx(0.1, abs=0.02)
    assert not (tokens[~chosen] == MASK).any()
    assert (tokens[:, 0] == START).all()
    assert (tokens[:, [16, 32]] == END).all()
    assert rows["segment"][0].tolist() == [0] * 17 + [1] * 16
    original = tokens.copy()
    np.put_along_axis(original, positions, label, 1)
    follows = rows["next"] == 1
    text = pieces.take(slice(0, 2000))["tokens"]
    assert follows.mean() == pytest.approx(0.5, abs=0.03)
    assert np.array_equal(original[:, 1:16], text[:, :15])
    assert np.array_equal(original[follows, 17:32], text[follows, 15:])
    assert (original[~follows, 17:32] != text[~follows, 15:]).any(1).all()


def test_pairs_are_the_same_in_any_order(pairs):
    whole = pairs.take(slice(0, 2000))
    order = np.random.RandomState(1).permutation(2000)
    for name, array in pairs.take(order).items():
        assert np.array_equal(array, whole[name][order])
