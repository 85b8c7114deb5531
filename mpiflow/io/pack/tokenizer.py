"""Tokenizers of the library `tokenizers`: learned from a text, or read from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError, UsageError
from mpiflow.io.pack.tokens import Marks

Kind = Literal["bpe", "wordpiece"]

MARKS = ("<pad>", "<start>", "<end>", "<mask>")
"""The tokens 0 to 3 of a tokenizer that is learned here; a WordPiece also has <unk>."""
# What a mark is called in tokenizers made elsewhere.
_NAMES = {
    "start": ("<start>", "[CLS]", "<s>"),
    "end": ("<end>", "[SEP]", "</s>", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]"),
}
_BYTES = 256


class Tokenizer:
    """Text to numbers below `vocabulary`."""

    def __init__(self, made: Any, name: str) -> None:
        self._made, self.name = made, name
        made.no_padding()
        made.no_truncation()
        self.vocabulary = 1 + max(made.get_vocab().values())

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without any that mark its begin or end."""
        return [one.ids for one in self._made.encode_batch_fast(texts, add_special_tokens=False)]

    def mark(self, meaning: str) -> int:
        """The token that means start, end or mask; DataError where there is none."""
        for name in _NAMES[meaning]:
            number = self._made.token_to_id(name)
            if number is not None:
                return int(number)
        raise DataError(f"{self.name} has no token of the names {', '.join(_NAMES[meaning])}")

    def marks(self) -> Marks:
        """What pairs need; DataError where their models would take a word for padding."""
        words = self._words()
        if 0 in words:
            raise DataError(f"{self.name}: token 0 is a word, which models of pairs do not read:"
                            " for them it is padding")  # fmt: skip
        return Marks(self.mark("start"), self.mark("end"), self.mark("mask"), words)

    def _words(self) -> NDArray[np.int64]:
        """The tokens that stand for text, not for a mark."""
        special = [n for n, token in self._made.get_added_tokens_decoder().items() if token.special]
        return np.setdiff1d(np.arange(self.vocabulary), special)

    def text(self) -> str:
        """The content of its tokenizer.json."""
        return str(self._made.to_str(pretty=True))


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, as Hugging Face's library writes it."""
    library = _library()
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        return Tokenizer(library.Tokenizer.from_file(str(path)), str(path))
    except Exception as problem:  # The library raises no narrower one.
        raise DataError(f"{path}: not a tokenizer.json: {problem}") from problem


def learn_tokenizer(texts: Iterable[str], kind: Kind, vocabulary: int) -> Tokenizer:
    """A tokenizer of `vocabulary` tokens at most, from the words of the texts and their number.

    bpe encodes bytes, as GPT-2's does; wordpiece lower-case words, as BERT's.
    """
    library = _library()
    marks = [*MARKS] if kind == "bpe" else [*MARKS, "<unk>"]
    if kind == "bpe" and vocabulary < _BYTES + len(marks):
        raise UsageError(
            f"--vocabulary {vocabulary}: bytes and marks alone are {_BYTES + len(marks)} tokens"
        )
    made = _bpe(library) if kind == "bpe" else _wordpiece(library)
    made.train_from_iterator(texts, _trainer(library, kind, vocabulary, marks))
    learned = Tokenizer(made, "the learned tokenizer")
    if learned.vocabulary > vocabulary:
        raise UsageError(
            f"--vocabulary {vocabulary}: the characters of the text and the marks alone are"
            f" {learned.vocabulary} tokens"
        )
    return learned


def _bpe(library: Any) -> Any:
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    return made


def _wordpiece(library: Any) -> Any:
    made = library.Tokenizer(library.models.WordPiece(unk_token="<unk>"))
    made.normalizer = library.normalizers.BertNormalizer()
    made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    made.decoder = library.decoders.WordPiece()
    return made


def _trainer(library: Any, kind: Kind, vocabulary: int, marks: list[str]) -> Any:
    options = {"vocab_size": vocabulary, "special_tokens": marks, "show_progress": False}
    if kind == "bpe":
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        return library.trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    return library.trainers.WordPieceTrainer(**options)


def _library() -> Any:
    """The package tokenizers."""
    try:
        import tokenizers
    except ImportError as problem:
        raise DataError(
            f"packing text needs tokenizers, which cannot be imported: {problem}\n"
            "  install it with `python -m pip install 'mpiflow[pack]'`"
        ) from problem
    return tokenizers
