"""Packs a generated log of clicks for examples/widedeep.py, whose truth is known.

python examples/pack_clicks.py [--table 200] [--data FOLDER]

Each row has an id a table, three numbers, and whether there was a click. The probability of a click
is the sigmoid of a weight for each id and number, and of what ids of two of the tables make of
each other. The example does the same where there are no files.
"""

import argparse
from pathlib import Path

import numpy as np

from mpiflow.io.pack import pack

NUMBERS = 3
ROWS, TEST_ROWS = 40_000, 5_000


def tables_of(table: int) -> tuple[int, ...]:
    """The rows of each table: one is large, as those of users or items are."""
    return (table, 100, 60, 30, 20, 10)


def folder_of(table: int) -> str:
    return f"clicks/{table}"


def draw_clicks(table: int, rows: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Rows, and the true probability of a click in each."""
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
    clicks = int(click.sum())
    above = rank[click == 1].sum() - clicks * (clicks - 1) / 2
    return above / (clicks * (len(click) - clicks))


def generate(data: Path, table: int) -> None:
    """Packs a generated log, where there is no other."""
    print(f"{data / folder_of(table)} has no files: packing generated clicks")
    write(data, table)


def write(data: Path, table: int) -> None:
    out = data / folder_of(table)
    for seed, (name, count) in enumerate((("train", ROWS), ("test", TEST_ROWS))):
        rows, probability = draw_clicks(table, count, seed + 1)
        pack(rows, out / f"{name}-*.h5", shards=4 if name == "train" else 1, overwrite=True)
        best = exact_auc(probability, rows["click"])
        print(f"{out}/{name}-*.h5: {count} rows; the truth has an AUC of {best:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=int, default=200, help="rows of the largest (default: 200)")
    parser.add_argument("--data", default=".", help="the data folder (default: here)")
    given = parser.parse_args()
    write(Path(given.data), given.table)


if __name__ == "__main__":
    main()
