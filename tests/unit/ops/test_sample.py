"""Samples of classes: the labels are among them, the others are random."""

import numpy as np
import pytest
from op_harness import whole

import mpiflow as mf
from mpiflow import nn
from mpiflow.errors import GraphError
from mpiflow.graph.graph import Graph, building
from mpiflow.ops import block_count, sample_rows
from mpiflow.ops.sample import SampleClasses, SampledColumn

BLOCKS, SIZE, COUNT = 4, 50, 12


def sample(labels, step, seed=5):
    op = SampleClasses(BLOCKS, SIZE, COUNT, (seed, 9))
    (chosen,) = whole(op, [np.asarray(labels), np.asarray(step)])
    return chosen


def labels(seed, count=12):
    return np.random.default_rng(seed).integers(0, BLOCKS * SIZE, count)


@pytest.mark.parametrize("crowded", [False, True])
def test_all_labels_are_sampled_and_each_class_once_in_its_block(crowded):
    for step in range(20):
        label = labels(step) // BLOCKS if crowded else labels(step)
        chosen = sample(label, step)
        assert set(label) <= set(chosen.reshape(-1))
        assert (np.diff(chosen, axis=1) > 0).all()
        assert (chosen // SIZE == np.arange(BLOCKS)[:, None]).all()


def test_columns_say_where_the_labels_are():
    label = labels(3)
    chosen = sample(label, 0)
    (column,) = whole(SampledColumn(), [chosen, label.astype("int32")])
    np.testing.assert_array_equal(chosen.reshape(-1)[column], label)


def test_other_classes_are_drawn_evenly_and_anew_in_each_step():
    steps = 400
    counts = np.zeros(BLOCKS * SIZE)
    for step in range(steps):
        np.add.at(counts, sample([0], step).reshape(-1), 1)
    assert counts[0] == steps
    share = COUNT / SIZE
    assert abs(counts[SIZE:] - steps * share).max() < 5 * np.sqrt(steps * share * (1 - share))
    assert not np.array_equal(sample([0], 1), sample([0], 2))
    assert not np.array_equal(sample([0], 1), sample([0], 1, seed=6))
    np.testing.assert_array_equal(sample([0], 2**33), sample([0], 2**33))
    assert not np.array_equal(sample([0], 2**33), sample([0], 0))


def sampled(classes, rows, share, blocks):
    with building(Graph("train")) as graph:
        weight = nn.variable("w", (classes, 3), nn.normal(1.0))
        label = graph.input("label", (rows,), "int32")
        return sample_rows(weight, label, share, blocks=blocks)


def test_a_sample_has_the_share_of_each_block_or_as_many_as_there_may_be_labels():
    for share, count in ((0.25, 25), (0.251, 26), (0.05, 20)):
        rows, column = sampled(400, 20, share, 4)
        assert rows.shape == (4, count, 3)
        assert column.shape == (20,)


def test_blocks_are_as_many_as_the_share_allows():
    assert block_count(1_000_000, 1024, 0.1) == 64
    assert block_count(1024, 64, 0.25) == 4
    assert block_count(1024, 64, 0.1) == 1
    assert block_count(1_000_003, 64, 0.1) == 1


@pytest.mark.parametrize(
    ("classes", "rows", "share", "blocks", "message"),
    [
        (400, 20, 1.5, 4, "a share of the classes between 0 and 1, not 1.5"),
        (401, 20, 0.1, 4, "401 classes are not 4 equal blocks"),
        (40, 20, 0.1, 4, "0.1 of 40 classes leaves none out: in each of 4 blocks there are 10"),
    ],
)
def test_samples_that_make_no_sense_are_refused(classes, rows, share, blocks, message):
    with pytest.raises(GraphError, match=message):
        sampled(classes, rows, share, blocks)


def test_labels_beyond_the_classes_are_refused_where_they_are_read():
    op = SampleClasses(BLOCKS, SIZE, COUNT, (1, 2))
    assert op.limits(((5,), (), (BLOCKS, COUNT))) == ((0, 200),)


def test_only_training_samples():
    from mpiflow.models.faces import Faces

    for training, classes in ((True, 200), (False, 400)):
        with building(Graph("model", training=training)) as graph:
            features = graph.input("features", (5, 8), "float32")
            label = graph.input("label", (5,), "int32")
            faces = Faces(None, 400, 8, sampled=0.5)
            cosines, column = faces.compared(features, label)
            assert cosines.shape == (5, classes)
            assert (column is label) == (not training)
            assert mf.pick(cosines, column).shape == (5,)
