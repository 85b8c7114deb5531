"""The contract of transports over real MPI, and what only MPI can get wrong."""

import os
import threading

import numpy as np
import pytest
import transport_contract

from mpiflow.errors import TaskError
from mpiflow.exec.direct import DirectGroup, HostSide

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module")
def transport():
    from mpiflow.exec.launch import connect

    transport = connect()
    yield transport
    transport.close()


@pytest.mark.parametrize("claim", transport_contract.CLAIMS, ids=lambda claim: claim.__name__)
def test_mpi_transport(claim, transport):
    claim(transport)


class Elsewhere:
    """An array that has an address and is none of NumPy's, as one of a GPU."""

    def __init__(self, array):
        self.array, self.data = array, self
        self.ptr = array.ctypes.data
        for name in ("dtype", "size", "nbytes", "ndim", "flags", "shape"):
            setattr(self, name, getattr(array, name))

    def __getitem__(self, key):
        return Elsewhere(self.array[key])

    def view(self, dtype):
        return Elsewhere(self.array.view(dtype))


class Side(HostSide):
    def copy(self, target, source):
        super().copy(target.array, source.array)

    def combine(self, ufunc, x, y, out):
        super().combine(ufunc, x.array, y.array, out.array)


@pytest.mark.parametrize("dtype", ["float32", *transport_contract.NARROW, "bool"])
def test_memory_of_another_kind_goes_by_its_address(transport, dtype):
    group = DirectGroup(transport_contract.everyone(transport, "direct"), Side())
    counts = transport_contract.counts_of(7, transport.size)
    receive = Elsewhere(np.zeros(7, dtype))
    content = [transport_contract.content(r, n, dtype) for r, n in enumerate(counts)]
    start = group.bind_all_gather(Elsewhere(content[transport.rank]), receive, counts)
    start().wait()
    np.testing.assert_array_equal(receive.array, np.concatenate(content))
    if dtype == "float32":
        buffer = Elsewhere(np.arange(7, dtype=dtype) + transport.rank)
        work = Elsewhere(np.zeros(4 * 7 * transport.size, np.uint8))
        start = group.bind_all_reduce(buffer, "sum", work)
        for _ in range(2):
            buffer.array[:] = np.arange(7) + transport.rank
            start().wait()
            ranks = range(transport.size)
            np.testing.assert_array_equal(buffer.array, sum(np.arange(7) + r for r in ranks))


def test_an_mpi_that_knows_no_gpus_is_not_given_their_memory(transport):
    said = transport.takes_device_memory()
    assert "does not say that it takes memory of GPUs (MPIX_Query_cuda_support" in said


@pytest.mark.parametrize("n", [9, 10, 11, 21, 35])
def test_what_is_longer_than_the_limit_goes_in_segments(transport, n):
    group = transport_contract.everyone(transport, "segments")
    group.limit = 10
    size, rank = transport.size, transport.rank
    everywhere = [transport_contract.content(r, n) for r in range(size)]
    total = np.sum(everywhere, axis=0)
    counts = transport_contract.counts_of(n, size)
    begin = sum(counts[:rank])
    part = slice(begin, begin + counts[rank])

    reduced = everywhere[rank].copy()
    group.bind_all_reduce(reduced)().wait()
    np.testing.assert_array_equal(reduced, total)

    gathered = np.zeros(n, np.float32)
    group.bind_all_gather(total[part].copy(), gathered, counts)().wait()
    np.testing.assert_array_equal(gathered, total)

    scattered = np.zeros(counts[rank], np.float32)
    start = group.bind_reduce_scatter(everywhere[rank], scattered, counts)
    for _ in range(2):
        scattered[:] = 0
        start().wait()
        np.testing.assert_array_equal(scattered, total[part])

    received = np.zeros(n * size, np.float32)
    group.bind_all_to_all(
        np.tile(everywhere[rank], size), (n,) * size, received, (n,) * size
    )().wait()
    np.testing.assert_array_equal(received, np.concatenate(everywhere))


class BeforeMPI4:
    """A communicator of a library that has no persistent collectives."""

    def __init__(self, communicator):
        self.communicator = communicator

    def __getattr__(self, name):
        if name.endswith("_init") and not name.startswith(("Send", "Recv")):
            raise NotImplementedError
        return getattr(self.communicator, name)


def test_a_library_without_persistent_collectives_will_do(transport):
    group = transport_contract.everyone(transport, "older")
    group._communicator = BeforeMPI4(group._communicator)
    size, rank = transport.size, transport.rank
    whole, own = np.zeros(size), np.zeros(1)
    gather = group.bind_all_gather(own, whole, (1,) * size)
    reduce = group.bind_all_reduce(whole)
    scatter = group.bind_reduce_scatter(whole, own, (1,) * size)
    for step in range(3):
        own[:] = rank + step
        for start in (gather, reduce, scatter):
            start().wait()
        assert own[0] == size**2 * (rank + step)


def test_the_limit_is_that_of_32_bit_counts(transport):
    assert transport_contract.everyone(transport).limit == 2**31 - 1


def test_another_thread_may_not_call(transport):
    start = transport_contract.everyone(transport).bind_all_reduce(np.zeros(3))
    errors = []

    def call():
        try:
            start()
        except TaskError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, name="reader")
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "MPI was called from thread 'reader'" in errors[0]


def test_communicators_are_given_back(transport):
    """MPICH has room for about 2,000; every transport frees what it made."""
    from mpiflow.exec.launch import connect

    for _ in range(150):
        again = connect()
        for label in range(20):
            buffer = np.ones(2)
            transport_contract.everyone(again, str(label)).bind_all_reduce(buffer)
        again.close()


def test_a_rank_that_waits_leaves_the_core(transport):
    """The others wait half a second for rank 0, using a small part of it."""
    group = transport_contract.everyone(transport)
    start = group.bind_all_reduce(np.zeros(3))
    transport.barrier().wait()
    if transport.rank == 0:
        threading.Event().wait(0.5)
    before = os.times()
    start().wait()
    after = os.times()
    if transport.rank:
        used = after.user + after.system - before.user - before.system
        assert used < 0.5 * (after.elapsed - before.elapsed)
