"""Meshes whose pipeline stages have different numbers of ranks."""

import pytest

from mpiflow.errors import UsageError
from mpiflow.graph.mesh import parse_mesh

UNEQUAL = ["stage=2,data=3+1", "stage=3,data=1+2+1,model=2", "stage=2,data=2+1,model=1+4"]


@pytest.mark.parametrize("text", ["data=2,model=4", "data=3,stage=2", *UNEQUAL])
def test_a_mesh_is_read_as_it_is_printed_and_places_every_rank_on_a_stage(text):
    mesh = parse_mesh(text)
    assert str(mesh) == text
    assert [mesh.rank_in_stage(*mesh.stage_of(rank)) for rank in range(mesh.size)] == list(
        range(mesh.size)
    )
    inside = [mesh.within_stage(stage) for stage in range(mesh.stages)]
    assert sum(one.size for one in inside) == mesh.size
    for rank in range(mesh.size):
        stage, place = mesh.stage_of(rank)
        assert 0 <= place < inside[stage].size


def test_the_ranks_of_unequal_stages_stand_together():
    mesh = parse_mesh("stage=3,data=2+1+3,model=1")
    assert [mesh.stage_of(rank)[0] for rank in range(mesh.size)] == [0, 0, 1, 2, 2, 2]
    assert [str(mesh.within_stage(stage)) for stage in range(3)] == [
        "data=2,model=1", "data=1,model=1", "data=3,model=1",
    ]  # fmt: skip
    assert mesh.described() == {"stage": 3, "data": [2, 1, 3], "model": 1}


def test_sizes_that_are_equal_are_one_size():
    assert parse_mesh("stage=2,data=2+2") == parse_mesh("stage=2,data=2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "stage=2,data=1+2+3",
            "'data' has 3 sizes, 1\\+2\\+3, one for each stage, and there are 2",
        ),
        ("data=3+1", "'data' has 2 sizes, 3\\+1, one for each stage, and there are 1 stages"),
        ("data=3+1,stage=2", "axis 'stage' comes first"),
        ("stage=1+1,data=2", "'stage' has 2 sizes"),
        ("stage=2,data=3+", "'data=3\\+' is not NAME=SIZE"),
        ("stage=2,data=3+0", "is not NAME=SIZE; write .*stage=2,data=3\\+1"),
    ],
)
def test_sizes_by_stage_that_cannot_be_meant_are_usage_errors(text, says):
    with pytest.raises(UsageError, match=says):
        parse_mesh(text)
