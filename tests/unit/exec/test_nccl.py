"""What NCCL is asked for by each collective, on ranks that are threads; the sums are right."""

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import pytest
from gpu_stand_in import StandIn, World, device

from mpiflow.errors import LaunchError, TaskError
from mpiflow.exec.local import LocalWorld
from mpiflow.exec.nccl import NcclGroup, NcclStages


def on_ranks(size, work):
    """What `work(group, driver)` gives on each rank, and the calls that its driver got."""
    world, gpus = LocalWorld(size), World(size)

    def run(rank):
        driver, transport = StandIn(gpus), world.transports[rank]
        members = tuple(range(size))
        group = NcclGroup(transport, driver, members, "data")
        driver.calls.clear()
        return work(group), driver.calls

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
    return [found for found, _ in results], [calls for _, calls in results]


def do(start):
    request = start()
    assert request.test()


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_a_reduction_is_one_call(reduce, dtype):
    def work(group):
        buffer = np.arange(5, dtype=dtype) + group.index
        do(group.bind_all_reduce(buffer, reduce))
        return buffer

    found, calls = on_ranks(3, work)
    expected = np.arange(5) * 3 + 3 if reduce == "sum" else np.arange(5) + 2
    assert all(np.array_equal(each, expected) for each in found)
    assert calls[0] == [f"all_reduce {reduce} 5 {dtype} no stream"]


def gather(counts):
    def work(group):
        send = np.full(counts[group.index], group.index, "float32")
        receive = np.empty(sum(counts), "float32")
        do(group.bind_all_gather(send, receive, counts))
        return receive

    return work


def scatter(counts):
    def work(group):
        send = np.arange(sum(counts), dtype="float32") * (group.index + 1)
        receive = np.empty(counts[group.index], "float32")
        do(group.bind_reduce_scatter(send, receive, counts))
        return receive

    return work


@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 0, 2), (0, 0, 1)])
def test_a_gather_is_one_call_if_even_and_a_group_of_broadcasts_if_not(counts):
    found, calls = on_ranks(3, gather(counts))
    expected = np.repeat(np.arange(3), counts)
    assert all(np.array_equal(each, expected) for each in found)
    kinds = [call.split()[0] for call in calls[0]]
    if len(set(counts)) == 1:
        assert kinds == ["all_gather"]
    else:
        assert kinds == ["group", *["broadcast"] * np.count_nonzero(counts), "}"]


@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 0, 2), (0, 0, 1)])
def test_a_scatter_is_one_call_if_even_and_a_group_of_reductions_if_not(counts):
    found, calls = on_ranks(3, scatter(counts))
    whole = np.arange(sum(counts)) * 6
    for part, stop, count in zip(found, accumulate(counts), counts, strict=True):
        assert np.array_equal(part, whole[stop - count : stop])
    kinds = [call.split()[0] for call in calls[1]]
    if len(set(counts)) == 1:
        assert kinds == ["reduce_scatter"]
    else:
        assert kinds == ["group", *["reduce"] * np.count_nonzero(counts), "}"]


def test_an_exchange_is_a_group_of_messages_and_a_copy():
    def work(group):
        counts = [1, 0, 2]  # to each member
        send = device(np.arange(3, dtype="int32") + 10 * group.index)
        receive = device(np.empty(counts[group.index] * 3, "int32"))
        do(group.bind_all_to_all(send, counts, receive, [counts[group.index]] * 3))
        return receive.tolist()

    found, calls = on_ranks(3, work)
    assert found == [[0, 10, 20], [], [1, 2, 11, 12, 21, 22]]
    assert calls[0] == [
        "group {", "receive 1 int32 from 1 no stream", "send 2 int32 to 2 no stream",
        "receive 1 int32 from 2 no stream", "}",
    ]  # fmt: skip


def test_messages_arrive_in_order():
    def work(group):
        buffers = [np.full(4, i, "float32") for i in range(2)]
        if group.index == 0:
            for buffer in buffers:
                do(group.bind_send(buffer, 1, tag=7))
            return None
        received = [np.empty(4, "float32") for _ in buffers]
        for buffer in received:
            do(group.bind_receive(buffer, 0, tag=7))
        return [buffer[0] for buffer in received]

    assert on_ranks(2, work)[0] == [None, [0, 1]]


def test_a_failure_beside_the_thread_ends_what_was_begun():
    def work(group):
        group.driver.failure = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
        with pytest.raises(TaskError, match=r"rank \d of 2 on .*: data: NCCL failed: NCCL_ERROR"):
            group.check()
        return group.driver.calls[-1]

    assert on_ranks(2, work)[0] == ["abort", "abort"]


def test_bool_is_not_reduced():
    def work(group):
        with pytest.raises(TaskError, match="cast to int32"):
            group.bind_all_reduce(np.zeros(2, bool))

    on_ranks(2, work)


def test_parts_of_arrays_are_not_sent():
    def work(group):
        with pytest.raises(TaskError, match="--route staged"):
            group.bind_send(np.zeros((4, 4), "float32")[:, :2], 1, tag=0)

    on_ranks(2, work)


def test_groups_of_an_axis_are_made_in_one_call():
    world, gpus = LocalWorld(4), World(4)

    def run(rank):
        members = (0, 2) if rank % 2 == 0 else (1, 3)
        group = NcclGroup(world.transports[rank], StandIn(gpus), members, "data")
        buffer = np.array([rank], "float32")
        do(group.bind_all_reduce(buffer))
        return buffer[0]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [2, 4, 2, 4]


def test_stages_have_a_communicator_for_each_direction():
    world, gpus = LocalWorld(3), World(3)  # stage 0 has ranks 0 and 1, stage 1 has rank 2

    def run(rank):
        driver = StandIn(gpus)
        stages = NcclStages(world.transports[rank], driver, (0, 0, 1), [(0, 1), (1, 0)])
        assert len([call for call in driver.calls if call.startswith("communicator")]) == 2
        buffer = np.array([rank], "float32")
        if rank < 2:
            do(stages.bind_send(buffer, 2, tag=0))
            do(stages.bind_receive(buffer, 2, tag=1))
            return buffer[0]
        received = [np.empty(1, "float32") for _ in range(2)]
        for peer in range(2):
            do(stages.bind_receive(received[peer], peer, tag=0))
        for peer in range(2):
            do(stages.bind_send(received[peer] * 10, peer, tag=1))
        return stages.sent

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [0, 10, 8]


def test_a_refusal_of_nccl_says_what_to_do():
    class Refusing(StandIn):
        def communicator(self, size, unique_id, index):
            raise RuntimeError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")

    transport = LocalWorld(1).transports[0]
    with pytest.raises(LaunchError, match="Duplicate GPU detected; NCCL_DEBUG=INFO says more"):
        NcclGroup(transport, Refusing(), (0,), "data")
