from itertools import pairwise

import pytest

from mpiflow.errors import SbpError
from mpiflow.graph import sbp
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, P, Partial, S


@pytest.mark.parametrize("parts", range(1, 8))
def test_spans_partition_a_dim_and_differ_by_at_most_one_unit(parts):
    for unit in (1, 3):
        for size in range(0, 22 * unit, unit):
            spans = [sbp.unit_span(size, unit, parts, i) for i in range(parts)]
            assert spans[0][0] == 0
            assert spans[-1][1] == size
            assert all(a[1] == b[0] for a, b in pairwise(spans))
            lengths = [stop - start for start, stop in spans]
            assert lengths == sorted(lengths, reverse=True)  # the largest comes first
            assert max(lengths) - min(lengths) <= unit
            assert all(n % unit == 0 for n in lengths)


def test_a_dim_smaller_than_its_parts_leaves_the_last_ones_empty():
    assert [sbp.span(2, 4, i) for i in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_a_dim_that_its_unit_does_not_divide_is_refused():
    with pytest.raises(SbpError, match="a dim of 10 cannot be split in units of 4"):
        sbp.unit_span(10, 4, 2, 0)


@pytest.mark.parametrize("layout", [(B, B), (S(0), S(1)), (S(1), S(1)), (P, S(0)), (S(0, 2), B)])
def test_shards_cover_the_tensor_as_often_as_ranks_hold_replicas(layout):
    shape, sizes = (10, 5), (2, 3)
    counts = {}
    for rank in range(6):
        box = sbp.shard_box(shape, layout, sizes, divmod(rank, 3))
        for i in range(*box[0]):
            for j in range(*box[1]):
                counts[i, j] = counts.get((i, j), 0) + 1
    copies = 1
    for part, size in zip(layout, sizes, strict=True):
        copies *= 1 if isinstance(part, S) else size
    assert counts == {(i, j): copies for i in range(10) for j in range(5)}


def test_the_inner_axis_splits_the_span_that_the_outer_one_left():
    assert [sbp.shard_box((5,), (S(0), S(0)), (2, 2), (i, j)) for i in (0, 1) for j in (0, 1)] == [
        ((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),)
    ]  # fmt: skip


@pytest.mark.parametrize("value", [B, P, Partial("max"), S(0), S(3), S(1, 4)])
def test_text_of_an_sbp_is_read_back(value):
    assert sbp.parse(str(value)) == value
    assert sbp.parse_layout(sbp.layout_text((value, B))) == (value, B)


@pytest.mark.parametrize("text", ["", "S", "S(-1)", "S(a)", "P(min)", "b", "S(1,unit=)"])
def test_other_text_is_no_sbp(text):
    with pytest.raises(SbpError, match="is no SBP"):
        sbp.parse(text)


def test_ranks_lie_in_row_major_order_on_a_mesh():
    mesh = Mesh((("data", 2), ("model", 3), ("x", 2)))
    assert mesh.size == 12
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(12)] == list(range(12))
    assert mesh.coordinates(7) == (1, 0, 1)


def test_the_groups_of_an_axis_divide_the_ranks():
    mesh = Mesh((("data", 2), ("model", 3)))
    assert mesh.group((0,), 4) == (1, 4)
    assert mesh.group((1,), 4) == (3, 4, 5)
    for axis in (0, 1):
        groups = {mesh.group((axis,), rank) for rank in range(6)}
        assert sorted(rank for group in groups for rank in group) == list(range(6))
        assert all(mesh.group((axis,), member) == group for group in groups for member in group)
