"""Example inputs for the ops that work on some rows of a table; see op_examples.py."""

import numpy as np

from mpiflow.graph.op import REGISTRY

PADDING = 2**63 - 1


def made(name, *arrays, **attributes):
    return REGISTRY[name](**attributes), arrays


def f(*shape, seed=0, low=-1.0, dtype="float64"):
    return np.random.default_rng([seed, *shape]).uniform(low, 1.0, shape).astype(dtype)


def ids(count, rows, dtype="int64"):
    """Row numbers with repetitions, some of them below and some beyond the rows."""
    low = 0 if dtype.startswith("u") else -1
    return np.random.default_rng(count).integers(low, rows + 2, count).astype(dtype)


def ascending(rows, *found, padding=0):
    return np.array([*found, *[PADDING] * padding], np.int64)


def blocks(count, rows, k):
    """For each of `count` equal blocks of rows, k of them in order."""
    draw, size = np.random.default_rng(k), rows // count
    chosen = [np.sort(draw.choice(size, k, replace=False)) + i * size for i in range(count)]
    return np.array(chosen, np.int64).reshape(count, k)


def update(name, scalars, kept, rows, *, width=3, table=7, dtype="float64", **attributes):
    """An update of the given rows of a table, with so many scalars and tables kept."""
    arrays = [f(table, width, dtype=dtype), f(*rows.shape, width, seed=1, dtype=dtype), rows]
    arrays += [np.asarray(0.1 + i, dtype) for i in range(scalars)]
    arrays += [f(table, width, seed=3 + i, low=0.1, dtype=dtype) for i in range(kept)]
    return made(name, *arrays, **attributes)


def sample(blocks, size, labels, count, dtype="int64"):
    draw = np.random.default_rng(labels)
    label = draw.integers(0, blocks * size, labels).astype(dtype)
    return made("SampleClasses", label, np.asarray(7), blocks=blocks, size=size, count=count,
                key=(3, 4))  # fmt: skip


def found(classes, labels):
    return np.random.default_rng(labels).choice(classes.reshape(-1), labels)


CHOSEN = blocks(5, 30, 3)
SOME, ALL = ascending(7, 0, 2, 3, 6, padding=2), ascending(7, *range(7))
NONE = ascending(7, padding=3)
SKIPPED = np.full(4, -1)

EXAMPLES = {
    "SumRows": [made("SumRows", f(5, 3), ids(5, 7), rows=7),
                made("SumRows", f(40, 2), ids(40, 3, "int32"), rows=3),
                made("SumRows", f(9, 1, dtype="float32"), ids(9, 5, "uint8"), rows=5),
                made("SumRows", f(4, 3), SKIPPED, rows=5)],
    "TakeRows": [made("TakeRows", f(12, 3), blocks(3, 12, 2), size=4),
                 made("TakeRows", f(10, 2), blocks(5, 10, 1).astype("int32"), size=2),
                 made("TakeRows", f(7, 1), blocks(1, 7, 7), size=7)],
    "TakeRowsGrad": [made("TakeRowsGrad", f(3, 2, 3), blocks(3, 12, 2), size=4),
                     made("TakeRowsGrad", f(1, 7, 2), blocks(1, 7, 7), size=7)],
    "SampleClasses": [sample(5, 6, 7, 3), sample(2, 40, 5, 9), sample(3, 1, 1, 1, "uint8")],
    "SampledColumn": [made("SampledColumn", CHOSEN, found(CHOSEN, 5)),
                      made("SampledColumn", blocks(1, 40, 30), found(blocks(1, 40, 30), 7))],
    "SgdRowUpdate": [
        update("SgdRowUpdate", 1, 0, SOME), update("SgdRowUpdate", 1, 0, NONE),
        update("SgdRowUpdate", 2, 1, blocks(3, 12, 2), table=12, block=4, momentum=0.9,
               weight_decay=0.1, clipped=True, nesterov=True),
        update("SgdRowUpdate", 1, 1, SKIPPED, momentum=0.9, dtype="float32")],
    "AdagradRowUpdate": [update("AdagradRowUpdate", 1, 1, SOME),
                         update("AdagradRowUpdate", 2, 1, ALL, weight_decay=0.1, clipped=True)],
    "AdamRowUpdate": [update("AdamRowUpdate", 3, 2, SOME),
                      update("AdamRowUpdate", 3, 2, ALL, width=1, weight_decay=0.1),
                      update("AdamRowUpdate", 4, 2, blocks(5, 10, 1), table=10, block=2,
                             decoupled=True, weight_decay=0.1, clipped=True, dtype="float32")],
}  # fmt: skip

NO_GRADIENT = set(EXAMPLES) - {"TakeRows"}
