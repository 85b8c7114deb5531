"""Small generated data, from which the examples learn where there are no files of real ones.

Each set is drawn by a function of a seed: the rows to test have another one than those to train.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpiflow.io.pack import Storage, pack_sets
from mpiflow.io.pack.pairs import PairRows
from mpiflow.io.pack.tokens import Marks, TokenRows, token_dtype

Arrays = dict[str, np.ndarray]


def write(data: Path, folder: str, draw: Callable[[int, int], Arrays], rows: int) -> None:
    """Packs `rows` rows of `draw(rows, seed)` to train with, and an eighth of that to test."""
    print(f"{data / folder} has no files: packing generated rows")
    sets = {"train": draw(rows, 1), "test": draw(rows // 8, 2)}
    pack_sets(sets, data / folder, storage=Storage(shards=4), overwrite=True)


# -- images.py ------------------------------------------------------------------------------------


def images(rows: int, seed: int, *, size: int, channels: int, classes: int) -> Arrays:
    """Each class is a pattern of a few waves, moved and covered with noise."""
    shape = np.random.default_rng(0)
    at = np.arange(size) * 2 * np.pi / size
    patterns = np.zeros((classes, channels, size, size))
    for _ in range(4):
        x, y, phase = (shape.integers(1, 5, (3, classes, channels, 1, 1))).astype(float)
        patterns += np.sin(x * at[:, None] + y * at[None, :] + phase)
    draw = np.random.default_rng(seed)
    label = draw.integers(0, classes, rows)
    image = patterns[label]
    for row, (down, right) in enumerate(draw.integers(-2, 3, (rows, 2))):
        image[row] = np.roll(image[row], (down, right), (1, 2))
    image = 128 + 24 * image + 40 * draw.standard_normal(image.shape)
    return {"image": np.clip(image, 0, 255).astype(np.uint8), "label": label.astype(np.uint16)}


# -- gpt.py, bert.py ------------------------------------------------------------------------------

MARKS = 4
"""Tokens below stand for no text: padding, start, end, mask."""


def text(tokens: int, seed: int, *, vocabulary: int) -> np.ndarray:
    """A text without meaning: each token has four successors, taken with falling probability.

    The next token is at most 1.21 nats uncertain; one that is guessed by its frequency, about
    log v. Each passage has one of four topics, with words of its own.
    """
    topics, passage = 4, 300
    words = (vocabulary - MARKS) // topics
    follows = np.random.default_rng(0).integers(0, words, (topics, words, 4))
    draw = np.random.default_rng(seed)
    topic = np.repeat(draw.integers(0, topics, tokens // passage + 1), passage)[:tokens]
    choices = draw.choice(4, size=tokens, p=(0.5, 0.25, 0.15, 0.1))
    found = np.empty(tokens, np.int64)
    state = 0
    for i, choice in enumerate(choices):
        state = found[i] = follows[topic[i], state, choice]
    return (MARKS + topic * words + found).astype(token_dtype(vocabulary))


def token_rows(rows: int, seed: int, *, vocabulary: int, length: int) -> Arrays:
    """One piece of the text after another."""
    return {"tokens": text(rows * length, seed, vocabulary=vocabulary).reshape(rows, length)}


def pairs(rows: int, seed: int, *, vocabulary: int, length: int) -> Arrays:
    """Two pieces a row, masked, as `mpiflow data pack text --pairs` makes them of a real text."""
    piece = length - PairRows.MARKS
    words = text(rows * piece, seed, vocabulary=vocabulary)
    marks = Marks(start=1, end=2, mask=3, words=np.arange(MARKS, vocabulary))
    pieces = TokenRows(words, piece * np.arange(rows), piece)
    return PairRows(pieces, marks, seed).take(slice(0, rows))


# -- faces.py -------------------------------------------------------------------------------------

FACE = 28
"""Pixels of the side of a generated face."""


def faces(rows: int, seed: int, *, classes: int) -> Arrays:
    """Views of each identity: a smooth pattern, moved, in another light, with noise."""
    coarse = np.random.default_rng(0).standard_normal((classes, 8, 8))
    at = np.linspace(0, 6.999, FACE)
    low, part = at.astype(int), at % 1
    lines = coarse[:, low] * (1 - part)[:, None] + coarse[:, low + 1] * part[:, None]
    patterns = lines[:, :, low] * (1 - part) + lines[:, :, low + 1] * part
    draw = np.random.default_rng(seed)
    label = draw.permutation(np.arange(rows) % classes)
    image = patterns[label]
    for i, (down, right) in enumerate(draw.integers(-1, 2, (rows, 2))):
        image[i] = np.roll(image[i], (down, right), (0, 1))
    light, shade = draw.uniform(0.6, 1.4, (2, rows, 1, 1))
    image = 128 * shade + 50 * light * image + 15 * draw.standard_normal(image.shape)
    image = np.clip(image, 0, 255).astype(np.uint8)
    return {"image": image[:, None], "label": label.astype(np.uint16)}


# -- widedeep.py ----------------------------------------------------------------------------------

NUMBERS = 3
"""Numbers in a row of clicks."""


def tables_of(table: int) -> tuple[int, ...]:
    """The rows of each table of ids: one is large, as those of users or items are."""
    return (table, 100, 60, 30, 20, 10)


def clicks(rows: int, seed: int, *, table: int) -> Arrays:
    """An id a table, numbers, and whether there was a click."""
    fields, probability = clicks_and_truth(rows, seed, table=table)
    print(f"  the truth has an AUC of {exact_auc(probability, fields['click']):.4f} in {rows} rows")
    return fields


def clicks_and_truth(rows: int, seed: int, *, table: int) -> tuple[Arrays, np.ndarray]:
    """Clicks, and the probability of each.

    That is the sigmoid of a weight for each id and number, and of what ids of two of the tables
    make of each other.
    """
    truth, draw = np.random.default_rng(0), np.random.default_rng(seed)
    fields, logit = {}, np.full(rows, -1.0)
    vectors = []
    for i, size in enumerate(tables_of(table)):
        ids = (size * draw.random(rows) ** 2).astype(np.int64)  # low ids are frequent
        fields[f"id{i}"] = ids
        logit += 0.5 * truth.standard_normal(size)[ids]
        vectors.append(truth.standard_normal((size, 2))[ids])
    logit += 0.7 * (vectors[3] * vectors[4]).sum(1)
    numbers = draw.standard_normal((rows, NUMBERS)).astype(np.float32)
    logit += numbers @ np.array([0.8, -0.4, 0.2])
    probability = 1 / (1 + np.exp(-logit))
    click = draw.random(rows) < probability
    return fields | {"numbers": numbers, "click": click.astype(np.uint8)}, probability


def exact_auc(score: np.ndarray, click: np.ndarray) -> float:
    """The share of pairs (a click, another row) in which the click has the higher score."""
    rank = np.empty(len(score))
    rank[np.argsort(score)] = np.arange(len(score))
    hits = int(click.sum())
    above = rank[click == 1].sum() - hits * (hits - 1) / 2
    return above / (hits * (len(click) - hits))


# -- field.py -------------------------------------------------------------------------------------

CAUSES = 2
"""The numbers that a field follows from: slope and amplitude, each between -1 and 1."""


def fields(rows: int, seed: int, *, size: int) -> Arrays:
    """Noise whose waves of length l have the strength l^slope, times an amplitude."""
    draw = np.random.default_rng(seed)
    wave = np.fft.fftfreq(size) * size
    length = np.sqrt(sum(np.meshgrid(wave**2, wave**2, wave[: size // 2 + 1] ** 2)))
    length[0, 0, 0] = 1
    numbers = draw.uniform(-1, 1, (rows, CAUSES))
    volume = np.empty((rows, 1, size, size, size), np.float32)
    for row, (slope, amplitude) in enumerate(numbers):
        noise = np.fft.rfftn(draw.standard_normal((size,) * 3))
        field = np.fft.irfftn(noise * length ** -(1.5 + slope), s=(size,) * 3, axes=(0, 1, 2))
        volume[row, 0] = field / field.std() * (1 + amplitude / 2)
    return {"volume": volume, "numbers": numbers.astype(np.float32)}
