"""Conversions between layouts on several mesh axes, for micro-batches, and of spans in units."""

import random

import pytest
from conversions import MAX, check_all, check_groups, layouts

from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import S


@pytest.mark.parametrize(
    ("sizes", "shape", "more", "step"),
    [
        pytest.param((2, 2), (5, 4), (), 1, marks=pytest.mark.ranks(4)),
        pytest.param((2, 3), (3, 7), (MAX,), 1, marks=pytest.mark.ranks(6)),
        pytest.param((2, 3), (12, 5), (S(0, 2),), 3, marks=pytest.mark.ranks(6)),
        pytest.param((1, 3), (5,), (MAX,), 1, marks=pytest.mark.ranks(3)),
        pytest.param((3, 1), (2, 4), (), 3, marks=pytest.mark.ranks(3)),
        pytest.param((2, 2), (0, 3), (), 3, marks=pytest.mark.ranks(4)),
    ],
    ids=str,
)
def test_every_pair_of_layouts_on_two_axes(sizes, shape, more, step):
    """All targets of a source in one plan, which converts to each way station once.

    Units, and sizes of 1 and 0, take a third of the sources; the other meshes have all of them.
    """
    mesh = parse_mesh(f"data={sizes[0]},model={sizes[1]}")
    found = layouts(mesh, shape, more=more)
    check_groups([(source, found) for source in found[::step]], shape, "float64", mesh)


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        pytest.param("data=4,model=4", (3, 18), marks=pytest.mark.ranks(16)),
        pytest.param("pipe=2,data=2,model=3", (13, 5), marks=pytest.mark.ranks(12)),
    ],
)
def test_pairs_of_layouts_on_larger_meshes(mesh, shape):
    """A quarter of the sources of two axes to all targets; of three axes eight to six each."""
    mesh = parse_mesh(mesh)
    draw = random.Random(1)
    found = layouts(mesh, shape)
    groups = [(source, found) for source in found[::4]]
    if len(mesh.axes) > 2:
        groups = [(draw.choice(found), draw.sample(found, 6)) for _ in range(8)]
    check_groups(groups, shape, "float64", mesh)


@pytest.mark.ranks(4)
def test_pairs_of_layouts_are_converted_for_each_micro_batch():
    mesh = parse_mesh("data=2,model=2")
    found = [(S(0), *layout) for layout in layouts(mesh, (10, 3), more=())]
    groups = [(source, found) for source in found[::3]]
    check_groups(groups, (10, 3), "float64", mesh.in_time(2))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shape", [(12, 4), (20, 2), (4, 4)], ids=str)
def test_spans_in_units_convert_to_and_from_every_layout(shape):
    mesh = parse_mesh("data=3")
    found = layouts(mesh, shape, more=(S(0, 4), S(0, 2), S(1, 2)))
    check_all(found, shape, "float64", mesh)
