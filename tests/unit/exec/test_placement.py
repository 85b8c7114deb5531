"""Which GPU a rank takes, under every launcher, and what it says where there are too few."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from gpu_stand_in import StandIn, World

from mpiflow.errors import LaunchError
from mpiflow.exec.cuda_driver import Gpu
from mpiflow.exec.local import LocalWorld
from mpiflow.exec.placement import Placement, check_placements, local_rank, take_gpu

STEP = {"SLURM_STEP_ID": "0"}
BATCH = {"SLURM_STEP_ID": str(0xFFFFFFFB)}


@pytest.mark.parametrize(
    ("environment", "local"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "PMIX_RANK": "11"}, 3),
        ({"MPI_LOCALRANKID": "2", "PMI_RANK": "6"}, 2),
        ({"PALS_LOCAL_RANKID": "1"}, 1),
        ({"PMI_LOCAL_RANK": "5"}, 5),
        ({**STEP, "SLURM_LOCALID": "4"}, 4),
        ({**BATCH, "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({**STEP, "SLURM_LOCALID": "0", "MPI_LOCALRANKID": "2"}, 2),
    ],
)
def test_the_launcher_says_the_number_on_the_host(environment, local):
    found = local_rank(environment)
    assert found is not None
    assert found[0] == local
    assert found[1].endswith(f"={local}")


@pytest.mark.parametrize(
    "environment", [{}, {"MPI_LOCALRANKID": ""}, {**BATCH, "SLURM_LOCALID": "0"}, {"PMI_RANK": "3"}]
)
def test_nothing_else_does(environment):
    assert local_rank(environment) is None


class Seeing(StandIn):
    """Sees the GPUs of these UUIDs."""

    def __init__(self, *uuids):
        super().__init__(World(len(uuids)))
        self._uuids = uuids

    def gpu(self, index):
        return Gpu("H200", self._uuids[index], 1 << 30)


def take(drivers, environments=None, hosts=None, **options):
    """What the ranks take; they are threads."""
    world = LocalWorld(len(drivers))

    def run(rank):
        transport = world.transports[rank]
        transport.host = (hosts or ["a"] * len(drivers))[rank]
        environment = (environments or [{}] * len(drivers))[rank]
        return take_gpu(transport, drivers[rank], environment, **options)

    with ThreadPoolExecutor(len(drivers)) as pool:
        found = list(pool.map(run, range(len(drivers))))
    assert all(each == found[0] for each in found)
    return found[0]


def test_ranks_of_a_host_take_its_gpus_in_turn():
    drivers = [Seeing("u0", "u1") for _ in range(4)]
    placements = take(drivers, hosts=["a", "b", "a", "b"])
    assert [p.index for p in placements] == [0, 0, 1, 1]
    assert [d.calls for d in drivers] == [["use 0"], ["use 0"], ["use 1"], ["use 1"]]


def test_a_rank_that_is_shown_one_gpu_takes_it_whatever_its_number():
    environments = [{**STEP, "SLURM_LOCALID": str(i), "CUDA_VISIBLE_DEVICES": "0"} for i in (0, 3)]
    placements = take([Seeing("u0"), Seeing("u3")], environments)
    assert [(p.index, p.uuid) for p in placements] == [(0, "u0"), (0, "u3")]


def test_ranks_that_are_shown_two_each_take_one_of_their_own():
    placements = take([Seeing("u0", "u1"), Seeing("u2", "u3")])
    assert [p.uuid for p in placements] == ["u0", "u3"]


def test_two_ranks_on_one_gpu_are_refused_with_what_each_saw():
    message = (
        r"2 ranks took the same GPU; a has 3 ranks, and rank 0 sees 2 GPUs there.*--share-gpus.*"
        r"rank 0 on a, there number 0 \(counted by host\): GPU 0 of 2 that it sees, H200 u0.*rank 2"
    )
    with pytest.raises(LaunchError, match=rf"(?s){message}"):
        take([Seeing("u0", "u1") for _ in range(3)])


def test_they_may_share_it_where_asked():
    placements = take([Seeing("u0") for _ in range(2)], share=True)
    assert [p.uuid for p in placements] == ["u0", "u0"]


def test_equal_uuids_on_two_hosts_are_two_gpus():
    assert len(take([Seeing("u0"), Seeing("u0")], hosts=["a", "b"])) == 2


def test_a_rank_that_sees_no_gpu_stops_all_with_the_variable_that_hid_it():
    environments = [{}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}]
    with pytest.raises(LaunchError, match=r"1 rank sees no GPU(?s:.*)=NoDevFiles\): GPU 0 of 0"):
        take([Seeing("u0"), Seeing()], environments)


def test_a_long_list_of_ranks_is_cut():
    placements = [Placement(i, "a", i, "x", 1, 0, "H200", "u0") for i in range(20)]
    with pytest.raises(LaunchError, match=r"20 ranks took(?s:.*)\n  and 12 more$"):
        check_placements(placements, share=False)
