"""Every conversion between layouts, executed on threads, gives the logical tensor again."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from conversions import MACHINE, MAX, check_all, check_groups, layouts

from mpiflow.compiler import boxing
from mpiflow.compiler.hops import hop_seconds, move
from mpiflow.compiler.machine import find_machine
from mpiflow.graph.mesh import Mesh, parse_mesh
from mpiflow.graph.sbp import B, P, S, shard_box


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3, 4)]
)
@pytest.mark.parametrize("shape", [(5, 4), (1, 7), (6,), (2, 3, 5)], ids=str)
def test_every_pair_of_layouts_on_one_axis(size, shape):
    mesh = parse_mesh(f"data={size}")
    found = layouts(mesh, shape)
    if shape == (5, 4):
        check_all(found, shape, "float64", mesh)
    else:
        check_groups([(source, found) for source in found], shape, "float64", mesh)


@pytest.mark.ranks(3)
def test_integers_convert_exactly():
    mesh = parse_mesh("data=3")
    found = layouts(mesh, (5, 4))
    check_all(found, (5, 4), "int32", mesh)


@pytest.mark.parametrize("name", ["cpu", "nodes"])
def test_no_conversion_costs_more_than_one_or_two_hops(name):
    mesh, shape = parse_mesh("data=2,model=3"), (6, 40)
    machine = MACHINE if name == "cpu" else replace(find_machine("h100"), devices_per_node=3)
    found = layouts(mesh, shape, more=(MAX,))
    seconds = boxing.prices(found, found, shape, "float32", mesh, machine)
    assert np.isfinite(seconds).all()
    one = hop_seconds(tuple(found), shape, "float32", mesh, machine)
    two = (one[:, :, None] + one[None]).min(axis=1)
    assert (seconds <= np.minimum(one, two) + 1e-12).all()
    assert (seconds[:, None, :] <= seconds[:, :, None] + seconds[None] + 1e-12).all()


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (1, 2)], ids=str)
def test_the_price_of_a_conversion_is_that_of_its_hops(sizes):
    mesh, shape = Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes))), (6, 40)
    found = layouts(mesh, shape, more=(MAX, S(1, 4)))
    prices = boxing.prices(found, found, shape, "float32", mesh, MACHINE)
    pairs = list(product(enumerate(found), enumerate(found)))
    for (i, a), (j, b) in pairs[::5]:
        hops = boxing.path(a, b, shape, "float32", mesh, MACHINE)
        assert prices[i, j] == pytest.approx(sum(hop.seconds for hop in hops)), (a, b)


def test_a_sum_of_16_bits_has_no_price_where_its_parts_would_be_added():
    found = [(B,), (P,), (S(0),)]
    prices = boxing.prices(found, found, (6, 8), "bfloat16", parse_mesh("data=2"), MACHINE)
    assert [list(row) for row in np.isinf(prices)] == [[0, 0, 0], [1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (S(0), B, ["all_gather"]),
        (P, B, ["all_reduce"]),
        (MAX, B, ["all_reduce"]),
        (P, S(1), ["reduce_scatter"]),
        (S(0), S(1), ["all_to_all"]),
        (B, S(1), ["slice"]),
        (B, P, ["keep_first"]),
        (B, MAX, ["copy"]),
        (S(0), P, ["all_gather", "keep_first"]),
        (P, MAX, ["all_reduce", "copy"]),
        (P, P, []),
    ],
)
def test_one_axis_takes_the_collective_of_the_table(source, target, kinds):
    hops = boxing.path((source,), (target,), (6, 8), "float32", parse_mesh("data=2"), MACHINE)
    assert [hop.kind for hop in hops] == kinds


def hops_of(source, target, *, mesh="data=4,model=4", shape=(4000, 400), machine=MACHINE):
    mesh = parse_mesh(mesh)
    hops = boxing.path(source, target, shape, "float32", mesh, machine)
    return [(hop.kind, mesh.joined(hop.axes)) for hop in hops]


@pytest.mark.parametrize(
    ("source", "target", "hop"),
    [
        ((P, P), (B, B), ("all_reduce", "data,model")),
        ((MAX, MAX), (B, B), ("all_reduce", "data,model")),
        ((P, P), (S(0), S(0)), ("reduce_scatter", "data,model")),
        ((S(1), S(1)), (B, B), ("all_gather", "data,model")),
        ((B, B), (S(0), S(0)), ("slice", "data,model")),
        ((B, B), (P, P), ("keep_first", "data,model")),
        ((P, S(0)), (B, S(0)), ("all_reduce", "data")),
        ((S(0), P), (S(0), S(0)), ("reduce_scatter", "model")),
        ((S(0), P), (S(0), S(1)), ("reduce_scatter", "model")),
        ((S(0), S(1)), (S(1), S(0)), ("exchange", "data,model")),
        ((S(0), S(0)), (B, S(0)), ("exchange", "data,model")),
        ((S(0), S(0)), (S(1), S(1)), ("exchange", "data,model")),
        ((B, S(0)), (S(0), S(0)), ("exchange", "model")),
        ((P, S(0)), (P, S(1)), ("all_to_all", "model")),
    ],
    ids=str,
)
def test_one_hop_changes_what_it_can_on_both_axes(source, target, hop):
    mesh = parse_mesh("data=4,model=4")
    kind, axes = move(source, target, "float32", mesh)
    assert (kind, mesh.joined(axes)) == hop


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((P, S(0)), (S(0), S(0))),  # the shards would interleave
        ((P, B), (B, S(0))),
        ((P, P), (B, MAX)),
        ((P, P), (B, S(0))),
        ((S(0), S(0)), (P, P)),
        ((S(0), B), (P, B)),
    ],
    ids=str,
)
def test_two_things_at_once_are_no_single_hop(source, target):
    assert move(source, target, "float32", parse_mesh("data=4,model=4")) is None


def test_a_large_sum_is_scattered_before_it_crosses_nodes():
    nodes = replace(find_machine("h100"), devices_per_node=4, hierarchical=False)
    assert hops_of((P, P), (B, B), machine=nodes) == [
        ("reduce_scatter", "model"), ("all_reduce", "data"), ("all_gather", "model")
    ]  # fmt: skip
    assert hops_of((P, P), (B, B), machine=MACHINE) == [("all_reduce", "data,model")]


def test_the_axis_that_stays_outside_or_apart_takes_no_part_in_an_exchange():
    mesh = "pipe=2,data=2,model=2"
    source, target = (S(0), S(0), S(0)), (S(0), B, S(0))
    assert hops_of(source, target, mesh=mesh) == [("exchange", "data,model")]
    source, target = (S(1), S(0), P), (S(0), S(1), P)
    assert hops_of(source, target, mesh=mesh) == [("exchange", "pipe,data")]


@pytest.mark.parametrize(("shape", "sizes", "layout", "expected"), [
    ((12, 5), (2,), (S(0, 3),), (S(0),)),
    ((12, 5), (3,), (S(0, 6),), (S(0, 6),)),  # 2 units over 3 ranks: a span of plain 4 differs
    ((24, 5), (2, 2), (S(0, 6), S(0, 6)), (S(0), S(0))),
    ((12, 5), (2, 2), (S(0, 6), S(0, 6)), (S(0, 6), S(0, 6))),
    ((4, 6), (2, 3), (S(1, 3), B), (S(1), B)),
    ((0, 6), (2,), (S(0, 3),), (S(0),)),
])  # fmt: skip
def test_units_that_change_no_span_are_left_out(shape, sizes, layout, expected):
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
    assert boxing.without_units(layout, shape, mesh) == expected
    for where in product(*map(range, sizes)):
        assert shard_box(shape, layout, sizes, where) == shard_box(shape, expected, sizes, where)
