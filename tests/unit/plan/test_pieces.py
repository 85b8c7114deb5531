"""What travels between stages of different ranks makes up what each receiver is to hold."""

from collections import Counter

import numpy as np
import pytest

from mpiflow.graph.mesh import Mesh, parse_mesh
from mpiflow.graph.sbp import B, S, parse_layout, shard_box
from mpiflow.plan.pieces import Piece, pieces_between


def boxes(shape, layout, mesh):
    places = map(mesh.coordinates, range(mesh.size))
    return [shard_box(shape, layout, mesh.sizes, where) for where in places]


def at(box):
    return tuple(slice(*each) for each in box)


@pytest.mark.parametrize("seed", range(60))
def test_every_element_comes_once_and_from_a_rank_that_has_it(seed):
    draw = np.random.default_rng(seed)
    shape = tuple(draw.integers(0, 8, draw.integers(0, 4)).tolist())
    meshes = [Mesh(tuple((n, int(draw.integers(1, 5))) for n in ("a", "b"))) for _ in range(2)]
    choices = [B, *(S(dim) for dim in range(len(shape)))]
    layouts = [tuple(choices[i] for i in draw.integers(len(choices), size=2)) for _ in range(2)]
    held, wanted = (boxes(shape, x, m) for x, m in zip(layouts, meshes, strict=True))
    came = [np.zeros(shape, int) for _ in wanted]
    for piece in pieces_between(shape, layouts[0], meshes[0], layouts[1], meshes[1]):
        owned = np.zeros(shape, bool)
        owned[at(held[piece.sender])] = True
        assert owned[at(piece.box)].all()
        came[piece.receiver][at(piece.box)] += 1
    for box, count in zip(wanted, came, strict=True):
        expected = np.zeros(shape, int)
        expected[at(box)] = 1
        np.testing.assert_array_equal(count, expected)


@pytest.mark.parametrize("layout", ["S(0) B", "B S(1)", "B B", "S(0) S(1)", "S(1) S(1)"])
def test_between_equal_layouts_each_rank_sends_its_shard_to_its_own_place(layout):
    mesh, layout = parse_mesh("data=2,model=3"), parse_layout(layout)
    found = pieces_between((6, 12), layout, mesh, layout, mesh)
    expected = [Piece(i, i, box) for i, box in enumerate(boxes((6, 12), layout, mesh))]
    assert list(found) == expected


def test_ranks_that_hold_the_same_send_in_turn():
    found = pieces_between((4,), (B,), parse_mesh("data=2"), (B,), parse_mesh("data=6"))
    assert Counter(piece.sender for piece in found) == {0: 3, 1: 3}
