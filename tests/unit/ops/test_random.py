import numpy as np
import pytest
from op_harness import sharded, whole

from mpiflow.graph.sbp import B, S
from mpiflow.ops import Normal, Uniform, random_key

LAYOUTS = [(S(0),), (S(1),), (S(2),)]
MESHES = [((n,), layout) for n in (1, 2, 3, 7) for layout in LAYOUTS] + [
    ((2, 3), layout) for layout in [(S(0), S(0)), (S(0), S(1)), (S(2), B), (B, S(1)), (S(1), S(1))]
]


@pytest.mark.parametrize(("sizes", "layout"), MESHES, ids=str)
@pytest.mark.parametrize("kind", [Uniform, Normal])
def test_the_numbers_do_not_depend_on_the_layout(kind, sizes, layout):
    op = kind((5, 4, 3), random_key(0, "w"))
    (joined,) = sharded(op, [], [], [layout], sizes)
    np.testing.assert_array_equal(joined, whole(op, [])[0])


def test_a_second_block_goes_on_where_the_first_ended():
    rows, columns = 700, 111  # more than one block of 65536
    key = random_key(0, "w")
    (large,) = whole(Uniform((rows, columns), key), [])
    assert len(np.unique(large)) > 0.99 * large.size
    (parts,) = sharded(Uniform((rows, columns), key), [], [], [(S(0),)], (3,))
    np.testing.assert_array_equal(parts, large)


def test_uniform_numbers_fill_their_interval_evenly():
    (x,) = whole(Uniform((100_000,), random_key(1, "w"), -0.5, 1.5, "float64"), [])
    assert x.min() > -0.5
    assert x.max() < 1.5
    assert x.mean() == pytest.approx(0.5, abs=0.01)
    assert x.std() == pytest.approx(2 / np.sqrt(12), rel=0.01)
    counts = np.histogram(x, 20, (-0.5, 1.5))[0]
    assert counts.min() > 4_700
    assert counts.max() < 5_300


def test_normal_numbers_have_the_mean_deviation_and_tails_of_a_normal():
    (x,) = whole(Normal((100_000,), random_key(1, "w"), 2.0, 3.0, "float64"), [])
    assert x.mean() == pytest.approx(3.0, abs=0.03)
    assert x.std() == pytest.approx(2.0, rel=0.01)
    z = (x - 3) / 2
    for bound, share in [(1, 0.6827), (2, 0.9545), (3, 0.9973)]:
        assert (abs(z) < bound).mean() == pytest.approx(share, abs=0.005)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01


def test_numbers_differ_by_name_and_by_seed():
    keys = [random_key(0, "a"), random_key(0, "b"), random_key(1, "a")]
    assert len(set(keys)) == 3
    draws = [whole(Normal((1000,), key, dtype="float64"), [])[0] for key in keys]
    for i in range(3):
        for j in range(i):
            assert abs(np.corrcoef(draws[i], draws[j])[0, 1]) < 0.1
    assert random_key(0, "a") == keys[0]


def test_the_dtype_only_rounds():
    key = random_key(0, "w")
    narrow, wide = (whole(Normal((1000,), key, dtype=d), [])[0] for d in ("float32", "float64"))
    np.testing.assert_array_equal(narrow, wide.astype(np.float32))
