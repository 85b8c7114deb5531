from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from mpiflow.graph.sbp import span
from mpiflow.io.sampler import Sampler, batch_rows, steps_per_block, steps_per_epoch
from mpiflow.plan.records import DataSet, Field, Shard


def dataset(sizes=(100, 33, 1, 0, 7, 250), chunk=8, batch=13, lanes=3, window=2, **change):
    shards = tuple(Shard(f"s{i}.h5", rows, chunk) for i, rows in enumerate(sizes))
    record = DataSet(
        "train", "s*.h5", (Field("x", (), "float32"),), shards, sum(sizes), batch,
        True, 7, lanes, window, "",
    )  # fmt: skip
    return replace(record, **change)


def epoch_rows(data, epoch=0, ranks=1):
    """The rows of an epoch, one row of the result a batch, as `ranks` ranks read them."""
    parts = [rank_rows(data, epoch, *span(data.batch, ranks, rank)) for rank in range(ranks)]
    return np.concatenate(parts, axis=1)


def rank_rows(data, epoch, start, stop):
    """Rows [start, stop) of each batch of an epoch."""
    if start == stop:
        return np.empty((steps_per_epoch(data), 0), np.int64)
    sampler, parts = Sampler(data), []
    for step in range(0, steps_per_epoch(data), steps_per_block(data)):
        block = sampler.block(epoch, step, start, stop)
        parts.append(block.numbers()[:, start - block.low : stop - block.low])
    return np.concatenate(parts)


SHAPES = [
    {},
    {"lanes": 1},
    {"lanes": 13},
    {"window": 1},
    {"window": 1000},
    {"chunk": 1},
    {"chunk": 1000},
    {"batch": 391, "lanes": 5},
    {"batch": 1, "lanes": 1},
    {"sizes": (5,), "batch": 2, "lanes": 2},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_occurs_at_most_once_in_an_epoch_of_whole_batches(shape):
    data = dataset(**shape)
    rows = epoch_rows(data)
    assert rows.shape == (data.rows // data.batch, data.batch)
    assert len(np.unique(rows)) == rows.size
    assert rows.min() >= 0
    assert rows.max() < data.rows


@pytest.mark.parametrize("ranks", [2, 3, 4, 13, 20])
def test_rows_do_not_depend_on_how_ranks_cut_the_batch(ranks):
    data = dataset()
    assert np.array_equal(epoch_rows(data), epoch_rows(data, ranks=ranks))


def test_any_step_is_found_without_the_steps_before_it():
    data = dataset()
    assert np.array_equal(batch_rows(data, 2, 17, 3, 11), epoch_rows(data, 2)[17, 3:11])


def test_order_differs_between_epochs_and_seeds():
    data = dataset()
    orders = [epoch_rows(data), epoch_rows(data, 1), epoch_rows(replace(data, seed=8))]
    orders.append(epoch_rows(replace(data, seed=7 + (1 << 32))))
    assert len({order.tobytes() for order in orders}) == 4


def test_all_rows_are_drawn_over_epochs_though_each_epoch_drops_some():
    data = dataset(sizes=(17, 14), batch=7, lanes=2, chunk=3)
    seen = {int(row) for epoch in range(12) for row in epoch_rows(data, epoch).flat}
    assert seen == set(range(31))


def test_without_shuffling_rows_come_as_stored():
    data = dataset(shuffle=False)
    assert np.array_equal(epoch_rows(data).reshape(-1), np.arange(30 * 13))
    assert batch_rows(data, 0, 30, 0, 1).tolist() == [390]


def test_a_rank_of_whole_lanes_shares_only_boundary_chunks():
    data = dataset(sizes=(640, 960, 320), chunk=16, batch=48, lanes=6, window=3)
    touched = Counter()
    for rank in range(3):
        rows = rank_rows(data, 0, *span(data.batch, 3, rank)).reshape(-1)
        touched.update(set((rows // 16).tolist()))
    assert sum(touched.values()) <= 120 + 3 - 1


def test_a_lane_needs_no_more_chunks_at_a_time_than_its_window():
    data = dataset(sizes=(640, 960), chunk=16, batch=8, lanes=1, window=4)
    rows = epoch_rows(data).reshape(-1)
    for block in range(0, len(rows), 64):
        assert len(set((rows[block : block + 64] // 16).tolist())) <= 4


def test_rows_are_mixed_within_the_window():
    rows = epoch_rows(dataset(sizes=(4096,), chunk=64, batch=64, lanes=1, window=64)).reshape(-1)
    assert len(set((rows[:64] // 64).tolist())) > 30
    assert abs(np.corrcoef(np.arange(len(rows)), rows)[0, 1]) < 0.1


def test_the_parts_of_a_block_hold_each_of_its_rows_once():
    sampler = Sampler(dataset())
    block = sampler.block(1, 4, 2, 9)
    parts = [np.arange(*part) for part in zip(block.start, block.stop, strict=True)]
    assert sorted(block.order.reshape(-1)) == list(range(block.order.size))
    assert np.array_equal(block.numbers(), np.concatenate(parts)[block.order])
    assert (sampler.first[block.chunk] <= block.start).all()
    assert (block.start < block.stop).all()
    assert (block.stop <= sampler.last[block.chunk]).all()


def test_the_order_is_pinned():
    """A change of this order breaks the resumption of every run that there is."""
    data = dataset(sizes=(9, 6), chunk=3, batch=4, lanes=2, window=2)
    assert epoch_rows(data).tolist() == [[10, 11, 7, 14], [5, 4, 6, 8], [3, 9, 13, 12]]
