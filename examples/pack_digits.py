"""Packs scikit-learn's handwritten digits into sharded HDF5: 1,437 rows to train, 360 to test.

python examples/pack_digits.py [--out digits]
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

from mpiflow.io.pack import pack

SEED = 0
TRAIN_SHARDS = (401, 377, 350, 309)  # unequal on purpose, as real data sets are
TEST_SHARDS = (200, 160)


def split_rows(labels: np.ndarray, test_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffled rows to train on and shuffled rows to test on, every class divided alike."""
    # RandomState, whose numbers NumPy keeps the same in every version.
    random = np.random.RandomState(SEED)
    order = random.permutation(len(labels))
    in_test = np.zeros(len(labels), dtype=bool)
    for digit, quota in enumerate(class_quota(np.bincount(labels), test_rows)):
        in_test[order[labels[order] == digit][:quota]] = True
    # Shuffled anew: the first rows of each class in `order` have all gone to the test.
    order = random.permutation(order)
    return order[~in_test[order]], order[in_test[order]]


def class_quota(counts: np.ndarray, total: int) -> np.ndarray:
    """`total` rows divided over the classes in proportion to `counts` (largest remainders)."""
    whole, remainder = np.divmod(counts * total, counts.sum())
    largest = np.argsort(-remainder, kind="stable")[: total - whole.sum()]
    whole[largest] += 1
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="digits", help="folder to write to (default: digits)")
    out = parser.parse_args().out
    digits = load_digits()
    images = digits.data.astype(np.uint8)  # 8 x 8 pixels of 0 to 16
    labels = digits.target.astype(np.int64)
    train, test = split_rows(labels, sum(TEST_SHARDS))
    for name, rows, shards in (("train", train, TRAIN_SHARDS), ("test", test, TEST_SHARDS)):
        source = {"image": images[rows], "label": labels[rows]}
        pack(source, f"{out}/{name}-*.h5", shards=list(shards), overwrite=True)
        print(f"{out}/{name}-*.h5: {len(rows)} rows in {len(shards)} shards, image (64,) uint8")


if __name__ == "__main__":
    main()
