"""Ops on rows of tables: sums over repeated ids, and no memory in proportion to anything."""

import tracemalloc

import numpy as np
import pytest
from op_harness import call, poisoned, whole, workspace
from rows_examples import PADDING

from mpiflow.errors import GraphError
from mpiflow.exec.bind import Shard
from mpiflow.graph.op import OUT, build_op
from mpiflow.ops.rows import SumRows
from mpiflow.ops.rowupdate import by_rows
from mpiflow.ops.update import AdagradUpdate, AdamUpdate, SgdUpdate


@pytest.mark.parametrize("width", [1, 3, 300])
@pytest.mark.parametrize("rows", [1, 2, 50, 100_000])
def test_sums_are_those_of_each_row_whatever_the_length_of_its_run(rows, width):
    draw = np.random.default_rng(rows + width)
    ids = (rows * draw.random(5000) ** 3).astype(np.int32)  # runs of 1 to thousands, over blocks
    ids[::7] = -5
    ids[1::7] = rows
    values = draw.standard_normal((5000, width))
    sums, found = whole(SumRows(rows), [values, ids])
    inside = (ids >= 0) & (ids < rows)
    expected = np.zeros((rows, width))
    np.add.at(expected, ids[inside], values[inside])
    unique = np.unique(ids[inside])
    np.testing.assert_array_equal(found[: len(unique)], unique)
    np.testing.assert_allclose(sums[: len(unique)], expected[unique], rtol=1e-9, atol=1e-12)
    assert (found[len(unique) :] == PADDING).all()
    assert not sums[len(unique) :].any()


def test_sums_do_not_depend_on_ids_of_other_tables_rows():
    draw = np.random.default_rng(0)
    values, ids = draw.standard_normal((60, 2)), draw.integers(0, 9, 60)
    shifted = np.where(ids < 5, ids, ids + 1000)
    (a, rows), (b, others) = (whole(SumRows(5), [values, i]) for i in (ids, shifted))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(rows, others)


def test_more_ids_than_can_be_sorted_with_their_rows_are_refused():
    with pytest.raises(GraphError, match="8 ids of 1152921504606846976 rows are too many to sort"):
        SumRows(2**60).infer(((8, 1), (8,)))


@pytest.mark.parametrize(
    ("update", "scalars", "kept"),
    [
        (SgdUpdate(momentum=0.9, weight_decay=0.1, nesterov=True, clipped=True), 2, 1),
        (AdagradUpdate(weight_decay=0.1), 1, 1),
        (AdamUpdate(weight_decay=0.1, decoupled=True), 3, 2),
    ],
)
@pytest.mark.parametrize("count", [3, 2500])
def test_rows_are_updated_as_the_whole_table_updates_them(update, scalars, kept, count):
    draw = np.random.default_rng(count)
    size, width = 4000, 20
    rows = np.sort(draw.choice(size, count, replace=False))
    tables = [draw.uniform(0.1, 1, (size, width)) for _ in range(1 + kept)]
    values = draw.standard_normal((count, width))
    numbers = [np.asarray(0.1 + i) for i in range(scalars)]
    padded = [np.concatenate([values, np.zeros((5, width))]), np.append(rows, [PADDING] * 5)]
    found = whole(by_rows(update, 0), [tables[0], *padded, *numbers, *tables[1:]])
    some = [tables[0][rows], values, *numbers, *(table[rows] for table in tables[1:])]
    for new, expected, old in zip(found, whole(update, some), tables, strict=True):
        np.testing.assert_array_equal(new[rows], expected)
        others = np.setdiff1d(np.arange(size), rows)
        np.testing.assert_array_equal(new[others], old[others])


def test_no_average_is_kept_of_some_rows():
    op = by_rows(SgdUpdate(ema=0.9), 0)
    with pytest.raises(GraphError, match="SgdRowUpdate keeps no average"):
        op.infer(((5, 2), (3, 2), (3,), (), (5, 2)))


LARGE, ROWS = (60_000, 8), np.arange(0, 60_000, 2)
CASES = [
    ("SumRows", {"rows": 500}, [np.ones(LARGE), np.arange(60_000) % 700]),
    ("EmbeddingGrad", {"rows": 60_000}, [np.ones(LARGE), np.arange(60_000) // 2]),
    ("TakeRows", {"size": 60_000}, [np.ones(LARGE), ROWS[None]]),
    ("TakeRowsGrad", {"size": 60_000}, [np.ones((1, 30_000, 8)), ROWS[None]]),
    ("SampledColumn", {}, [np.arange(60_000)[None], np.arange(60_000)]),
    ("SampleClasses", {"blocks": 1, "size": 60_000, "count": 50_000, "key": (1, 2)},
     [np.arange(40_000), np.asarray(3)]),
    ("SgdRowUpdate", {"momentum": 0.9, "clipped": True},
     [np.ones(LARGE), np.ones((30_000, 8)), ROWS, np.asarray(1.0), np.asarray(1.0),
      np.ones(LARGE)]),
    ("AdamRowUpdate", {"weight_decay": 0.1},
     [np.ones(LARGE), np.ones((30_000, 8)), ROWS, *[np.asarray(1.0)] * 3, np.ones(LARGE),
      np.ones(LARGE)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attributes", "arrays"), CASES, ids=[c[0] for c in CASES])
def test_kernels_allocate_blocks_only(name, attributes, arrays):
    op = build_op(name, attributes)
    shapes = op.infer(tuple(a.shape for a in arrays))
    dtypes = op.dtypes(tuple(a.dtype.name for a in arrays))
    outs = [poisoned(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    for i, j in op.inplace:
        outs[j] = arrays[i]
    work, _ = workspace(op, tuple(a.shape for a in arrays), shapes, dtypes[0])
    starts = {i: (0,) * a.ndim for i, a in enumerate(arrays)} | {OUT: (0,) * len(shapes[0])}
    kernel = op.bind(Shard(np, work, starts, True), outs[0] if len(outs) == 1 else tuple(outs),
                     *arrays)  # fmt: skip
    kernel()
    tracemalloc.start()
    try:
        kernel()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 270_000


def test_an_update_in_place_reads_no_other_row():
    """A table of NaN but for two rows: anything that touches the others would show."""
    op = by_rows(AdamUpdate(), 0)
    tables = [np.full((1000, 2), np.nan) for _ in range(3)]
    rows = np.array([7, 900])
    for table in tables:
        table[rows] = 1
    arrays = [tables[0], np.ones((2, 2)), rows, *map(np.asarray, (0.1, 1.0, 1.0)), *tables[1:]]
    call(op, arrays, [(1000, 2)] * 3, ["float64"] * 3, outs=list(tables))
    for table in tables:
        assert np.isfinite(table[rows]).all()
        assert np.isnan(np.delete(table, rows, axis=0)).all()
