"""Collectives of route mpi, made of messages: sums by rank, and waits for the device."""

import numpy as np
import pytest
from transport_contract import content, counts_of, everyone

from mpiflow.errors import TaskError
from mpiflow.exec.direct import DirectGroup, HostSide
from mpiflow.exec.fake import FakeSide
from mpiflow.exec.local import run_local
from mpiflow.exec.transport import DONE, Request
from mpiflow.plan.volume import sent_elements

on_ranks = pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3, 5)]
)


def direct(transport):
    return DirectGroup(everyone(transport), HostSide())


def room(elements):
    return np.full(4 * elements, 0xFF, np.uint8)


@on_ranks
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("n", [7, 1, 0])
@pytest.mark.parametrize("side", [HostSide, FakeSide])
def test_reductions_and_what_they_send(size, reduce, n, side):
    def work(transport):
        host = everyone(transport)
        group, rank = DirectGroup(host, side()), transport.rank
        all_of_it = [content(r, n) for r in range(size)]
        total = np.sum(all_of_it, 0) if reduce == "sum" else np.max(all_of_it, 0)
        buffer = all_of_it[rank].copy()
        start = group.bind_all_reduce(buffer, reduce, room(n * size))
        for _ in range(2):
            buffer[:] = all_of_it[rank]
            start().wait()
            np.testing.assert_array_equal(buffer, total)
        assert host.sent == 2 * 4 * sent_elements("all_reduce", (n,), size, rank)
        counts = counts_of(n, size)
        part = np.zeros(counts[rank], np.float32)
        group.bind_reduce_scatter(all_of_it[rank], part, counts, reduce, room(n * size))().wait()
        first = sum(counts[:rank])
        np.testing.assert_array_equal(part, total[first : first + counts[rank]])

    run_local(size, work)


@on_ranks
def test_what_is_gathered_and_exchanged(size):
    def work(transport):
        group, rank = direct(transport), transport.rank
        counts = counts_of(7, size)
        receive = np.zeros(7, np.float32)
        group.bind_all_gather(content(rank, counts[rank]), receive, counts)().wait()
        parts = [content(r, counts[r]) for r in range(size)]
        np.testing.assert_array_equal(receive, np.concatenate(parts))
        leaving = np.repeat(np.arange(size) + 10 * rank, counts[rank])
        coming = np.zeros(sum(counts), leaving.dtype)
        own = (counts[rank],) * size
        group.bind_all_to_all(leaving, own, coming, counts)().wait()
        expected = [np.full(counts[r], rank + 10 * r) for r in range(size)]
        np.testing.assert_array_equal(coming, np.concatenate(expected))

    run_local(size, work)


def test_sums_are_added_in_rank_order():
    def work(transport):
        buffer = np.array([[1e8, 1.0, -1e8][transport.rank]] * 4, np.float32)
        direct(transport).bind_all_reduce(buffer, "sum", room(8))().wait()
        return set(buffer.tolist())

    expected = {float(np.float32(1e8) + np.float32(1) - np.float32(1e8))}
    assert run_local(3, work) == [expected] * 3


class Late(HostSide):
    """A device that comes to a mark when `reached` says so."""

    def __init__(self):
        self.pending, self.marks, self.reached = False, 0, 0

    def copy(self, target, source):
        super().copy(target, source)
        self.pending = True

    def combine(self, ufunc, x, y, out):
        super().combine(ufunc, x, y, out)
        self.pending = True

    def mark(self):
        self.pending, side = False, self
        self.marks = mine = self.marks + 1

        class Marked(Request):
            def test(self):
                return side.reached >= mine

        return Marked()


def test_a_message_starts_when_the_device_has_packed_it_and_ends_when_it_has_unpacked_it():
    def work(transport):
        side, host = Late(), everyone(transport)
        group = DirectGroup(host, side)
        send, receive = np.zeros(2, np.float32), np.zeros(4, np.float32)
        start = group.bind_all_gather(send, receive, (2, 2))
        group.copy(send, content(transport.rank, 2))
        request = start()
        assert not request.test()
        assert host.sent == 0
        side.reached = 1
        request.test()
        assert host.sent == 8
        transport.barrier().wait()
        assert not request.test()
        side.reached = 2
        assert request.test()
        assert group.settled() is DONE
        return receive.tolist()

    expected = [*content(0, 2), *content(1, 2)]
    assert run_local(2, work) == [expected] * 2


def test_parts_of_arrays_are_refused():
    def work(transport):
        with pytest.raises(TaskError, match="MPI is given contiguous memory of devices"):
            direct(transport).bind_send(np.zeros((4, 4))[:, :2], 0, 0)

    run_local(1, work)
