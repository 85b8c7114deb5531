"""Packs text as rows of tokens, for examples/gpt.py and examples/bert.py.

python examples/pack_text.py TEXT.txt --model gpt --vocabulary 256 --length 33

The text is any file in UTF-8; on Debian, `bible gen1:1-rev22:21 > kjv.txt` (package bible-kjv)
writes one. Its tokens are those of a byte-pair encoding that is learned from it, by the library
`tokenizers`. The last tenth is to test. Without a text, the two examples use `generate`.
"""

import argparse
from pathlib import Path

import numpy as np

from mpiflow.io.pack import pack

PAD, START, END, MASK, SPECIAL = 0, 1, 2, 3, 4
"""Tokens with a meaning; those of the text begin at SPECIAL."""
IGNORED = -1
"""The label of a token that is not to be predicted."""
ROWS, TEST_ROWS = 4000, 400


def folder_of(model: str, vocabulary: int, length: int) -> str:
    return f"text/{model}-{vocabulary}x{length}"


def dtype_of(vocabulary: int) -> str:
    """The smallest dtype that holds every token."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def chain(tokens: int, vocabulary: int, seed: int) -> np.ndarray:
    """A text without meaning: each token has four successors, taken with falling probability.

    The next token is at most 1.21 nats uncertain; one that is guessed by its frequency, about
    log v. Each passage has one of four topics, with words of its own.
    """
    topics, passage = 4, 300
    words = (vocabulary - SPECIAL) // topics
    follows = np.random.default_rng(0).integers(0, words, (topics, words, 4))
    draw = np.random.default_rng(seed)
    topic = np.repeat(draw.integers(0, topics, tokens // passage + 1), passage)[:tokens]
    choices = draw.choice(4, size=tokens, p=(0.5, 0.25, 0.15, 0.1))
    text = np.empty(tokens, np.int64)
    state = 0
    for i, choice in enumerate(choices):
        state = text[i] = follows[topic[i], state, choice]
    return SPECIAL + topic * words + text


def gpt_rows(text: np.ndarray, length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Consecutive pieces of the text, as `tokens` (n, length)."""
    rows = len(text) // length
    tokens = text[: rows * length].reshape(rows, length)
    return {"tokens": tokens.astype(dtype_of(vocabulary))}


def bert_rows(text: np.ndarray, length: int, vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    """Rows START a END b END, and what BERT (Devlin et al. 2019) is to find out about them.

    In half of the rows b follows a in the text (`next` is 1), in the others it is from elsewhere.
    15 % of the tokens have a label; of these 80 % are masked and 10 % replaced by a random one.
    """
    draw = np.random.default_rng(seed)
    first = (length - 3) // 2
    second = length - 3 - first
    rows = len(text) // (first + second)
    pieces = text[: rows * (first + second)].reshape(rows, first + second)
    follows = draw.integers(0, 2, rows)
    other = pieces[draw.permutation(rows), first:]
    b = np.where(follows[:, None] == 1, pieces[:, first:], other)
    mark = np.full((rows, 1), END)
    tokens = np.hstack([np.full((rows, 1), START), pieces[:, :first], mark, b, mark])
    segment = np.repeat([[0] * (first + 2) + [1] * (second + 1)], rows, axis=0)

    chosen = (draw.random(tokens.shape) < 0.15) & (tokens >= SPECIAL)
    label = np.where(chosen, tokens, IGNORED)
    fate = draw.random(tokens.shape)
    tokens[chosen & (fate < 0.8)] = MASK
    replaced = chosen & (fate >= 0.9)
    tokens[replaced] = draw.integers(SPECIAL, vocabulary, replaced.sum())
    return {
        "tokens": tokens.astype(dtype_of(vocabulary)),
        "segment": segment.astype(np.uint8),
        "label": label.astype(np.int32),
        "next": follows.astype(np.uint8),
    }


def write(text: np.ndarray, out: Path, model: str, vocabulary: int, length: int) -> None:
    """Packs the text, its last tenth to test."""
    cut = len(text) - len(text) // 10
    for seed, (name, part) in enumerate((("train", text[:cut]), ("test", text[cut:]))):
        if model == "gpt":
            rows = gpt_rows(part, length, vocabulary)
        else:
            rows = bert_rows(part, length, vocabulary, seed)
        pack(rows, out / f"{name}-*.h5", shards=4 if name == "train" else 1, overwrite=True)
        print(f"{out}/{name}-*.h5: {len(rows['tokens'])} rows of {length} tokens")


def generate(data: Path, model: str, vocabulary: int, length: int) -> None:
    """Packs a generated text, where there is no other."""
    out = data / folder_of(model, vocabulary, length)
    print(f"{out} has no files: packing a generated text; see examples/pack_text.py for a real one")
    tokens = (ROWS + TEST_ROWS) * length
    write(chain(tokens, vocabulary, seed=1), out, model, vocabulary, length)


def encoded(path: str, vocabulary: int) -> np.ndarray:
    """The tokens of a text file, whose encoding is learned from it."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    marks = ["<pad>", "<start>", "<end>", "<mask>"]
    tokenizer.train([path], vocab_size=vocabulary, special_tokens=marks, show_progress=False)
    ids = np.array(tokenizer.encode(Path(path).read_text(encoding="utf-8")).ids)
    if ids.max() >= vocabulary:
        raise SystemExit(f"{path} needs {ids.max() + 1} tokens at least; give --vocabulary")
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="a text file")
    parser.add_argument("--model", choices=("gpt", "bert"), default="gpt")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--length", type=int, default=33, help="tokens of a row (default: 33)")
    parser.add_argument("--data", default=".", help="the data folder (default: here)")
    given = parser.parse_args()
    out = Path(given.data) / folder_of(given.model, given.vocabulary, given.length)
    text = encoded(given.text, given.vocabulary)
    share = np.bincount(text)[np.unique(text)] / len(text)
    print(f"{len(text)} tokens; by frequency alone, each is {-(share * np.log(share)).sum():.3f}"
          " nats uncertain")  # fmt: skip
    write(text, out, given.model, given.vocabulary, given.length)


if __name__ == "__main__":
    main()
