"""What every transport must do: functions of one rank's transport, run by the tests of each.

`run_local` calls them on threads, `mpiexec` in processes. Every rank checks its own part.
"""

import numpy as np
import pytest

from mpiflow.errors import DataError, LaunchError, TaskError
from mpiflow.graph.sbp import span

try:
    import ml_dtypes  # noqa: F401  (gives NumPy bfloat16)

    NARROW = ("float16", "bfloat16")
except ImportError:
    NARROW = ("float16",)

DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
          "float32", "float64")  # fmt: skip


def everyone(transport, label="data"):
    return transport.group(tuple(range(transport.size)), label)


def counts_of(n, parts):
    spans = [span(n, parts, i) for i in range(parts)]
    return tuple(stop - start for start, stop in spans)


def content(rank, n, dtype="float32"):
    """Small whole numbers that differ by rank and place, so that sums are exact."""
    return ((np.arange(n) + 3 * rank) % 11).astype(dtype)


def all_reduce_sums_every_dtype(transport):
    group = everyone(transport)
    for dtype in DTYPES:
        buffer = content(transport.rank, 7, dtype)
        group.bind_all_reduce(buffer)().wait()
        expected = sum(content(r, 7, dtype) for r in range(transport.size)).astype(dtype)
        np.testing.assert_array_equal(buffer, expected)


def all_reduce_takes_the_maximum(transport):
    buffer = content(transport.rank, 13) - 5
    everyone(transport).bind_all_reduce(buffer, "max")().wait()
    expected = np.max([content(r, 13) - 5 for r in range(transport.size)], axis=0)
    np.testing.assert_array_equal(buffer, expected)


def a_bound_all_reduce_reads_its_buffer_at_each_start(transport):
    buffer = np.zeros(5, np.float64)
    start = everyone(transport).bind_all_reduce(buffer)
    for step in range(4):
        buffer[:] = step + transport.rank
        start().wait()
        expected = sum(step + r for r in range(transport.size))
        np.testing.assert_array_equal(buffer, np.full(5, float(expected)))


def all_gather_joins_uneven_and_empty_parts(transport):
    group = everyone(transport)
    for n in (5, 1, 0):
        for dtype in ("float32", *NARROW, "bool"):
            counts = counts_of(n, transport.size)
            receive = np.zeros(n, dtype)
            send = content(transport.rank, counts[transport.rank], dtype)
            group.bind_all_gather(send, receive, counts)().wait()
            parts = [content(r, counts[r], dtype) for r in range(transport.size)]
            np.testing.assert_array_equal(receive, np.concatenate(parts))


def reduce_scatter_gives_each_its_uneven_part_of_the_sum(transport):
    group = everyone(transport)
    for n in (5, 1, 0):
        for reduce, fold in (("sum", np.sum), ("max", np.max)):
            counts = counts_of(n, transport.size)
            send = content(transport.rank, n)
            # In an arena what is empty may lie anywhere, as where another buffer begins.
            own = counts[transport.rank]
            receive = np.zeros(own, np.float32) if own else send[:0]
            group.bind_reduce_scatter(send, receive, counts, reduce)().wait()
            start, stop = span(n, transport.size, transport.rank)
            whole = fold([content(r, n) for r in range(transport.size)], axis=0)
            np.testing.assert_array_equal(receive, whole[start:stop])
            np.testing.assert_array_equal(send, content(transport.rank, n))


def all_to_all_moves_each_part_to_its_member(transport):
    group, rank, size = everyone(transport), transport.rank, transport.size

    def sent(i, j):
        return (2 * i + j) % 4

    for dtype in ("int64", *NARROW, "bool"):
        send_counts = tuple(sent(rank, j) for j in range(size))
        receive_counts = tuple(sent(i, rank) for i in range(size))
        receive = np.zeros(sum(receive_counts), dtype)
        send = content(rank, sum(send_counts), dtype)
        group.bind_all_to_all(send, send_counts, receive, receive_counts)().wait()
        parts = []
        for i in range(size):
            before = sum(sent(i, j) for j in range(rank))
            whole = content(i, sum(sent(i, j) for j in range(size)), dtype)
            parts.append(whole[before : before + sent(i, rank)])
        np.testing.assert_array_equal(receive, np.concatenate(parts))


def an_exchange_may_have_counts_of_its_own_each_time(transport):
    group, rank, size = everyone(transport), transport.rank, transport.size
    for step in (0, 1, 4):
        counts = [[(i + 2 * j) * step % 5 for j in range(size)] for i in range(size)]
        came = [counts[i][rank] for i in range(size)]
        send = np.concatenate([np.full(n, 10 * rank + j) for j, n in enumerate(counts[rank])])
        receive, before = np.zeros(sum(came), send.dtype), group.sent
        group.all_to_all_once(send, counts[rank], receive, came).wait()
        expected = np.concatenate([np.full(n, 10 * i + rank) for i, n in enumerate(came)])
        np.testing.assert_array_equal(receive, expected)
        assert group.sent - before == 8 * (sum(counts[rank]) - counts[rank][rank])


def several_collectives_may_be_under_way(transport):
    group = everyone(transport)
    buffers = [np.full(3 + i, float(transport.rank + i)) for i in range(4)]
    requests = [start() for start in [group.bind_all_reduce(b) for b in buffers]]
    for request in reversed(requests):
        request.wait()
    for i, buffer in enumerate(buffers):
        assert set(buffer) == {float(sum(r + i for r in range(transport.size)))}


def sent_is_the_volume_of_the_standard_algorithms(transport):
    group, size, rank = everyone(transport), transport.size, transport.rank
    counts = counts_of(5, size)
    whole, own = np.zeros(5, np.float64), np.zeros(counts[rank], np.float64)
    start = group.bind_all_reduce(whole)
    assert group.sent == 0
    start().wait()
    start().wait()
    assert group.sent == 2 * 8 * (5 - counts[rank] + (size - 1) * counts[rank])
    before = group.sent
    group.bind_all_gather(own, whole, counts)().wait()
    assert group.sent - before == 8 * (size - 1) * counts[rank]
    before = group.sent
    group.bind_reduce_scatter(whole, own, counts)().wait()
    assert group.sent - before == 8 * (5 - counts[rank])
    before = group.sent
    ones = (1,) * size
    group.bind_all_to_all(np.zeros(size), ones, np.zeros(size), ones)().wait()
    assert group.sent - before == 8 * (size - 1)
    transport.all_gather(b"control messages are not counted")
    assert group.sent - before == 8 * (size - 1)


def groups_of_one_partition_are_apart(transport):
    parity = tuple(range(transport.rank % 2, transport.size, 2))
    group = transport.group(parity, "parity")
    assert (group.size, group.index) == (len(parity), parity.index(transport.rank))
    buffer = np.array([transport.rank + 1.0])
    group.bind_all_reduce(buffer)().wait()
    assert buffer[0] == sum(r + 1 for r in parity)


def group_members_keep_the_order_in_which_they_are_named(transport):
    members = tuple(reversed(range(transport.size)))
    group = transport.group(members, "reversed")
    assert group.index == members.index(transport.rank)
    receive = np.zeros(transport.size, np.int64)
    own = np.array([transport.rank])
    group.bind_all_gather(own, receive, (1,) * transport.size)().wait()
    assert tuple(receive) == members


def control_messages_reach_their_ranks(transport):
    rank, size = transport.rank, transport.size
    for data in (b"", b"x" * 100_001, "plän".encode()):
        assert transport.broadcast(data if rank == 0 else None) == data
    mine = bytes([rank]) * rank
    expected = [bytes([r]) * r for r in range(size)]
    assert transport.all_gather(mine) == expected
    assert transport.gather(mine) == (expected if rank == 0 else None)
    barrier = transport.barrier()
    barrier.wait()
    assert barrier.test()


def on_root_runs_on_rank_0_and_answers_everyone(transport):
    ran = []
    answer = transport.on_root(lambda: ran.append(1) or {"steps": [1, 2], "name": "ä"})
    assert answer == {"steps": [1, 2], "name": "ä"}
    assert len(ran) == (transport.rank == 0)


def on_root_raises_its_error_on_every_rank(transport):
    def fail():
        raise DataError("train-0.h5 is truncated: 7 of 9 rows")

    with pytest.raises(DataError, match="7 of 9 rows"):
        transport.on_root(fail)
    assert transport.on_root(lambda: 3) == 3


def check_same_names_the_ranks_that_differ(transport):
    transport.check_same("plan", "abc")
    if transport.size == 1:
        return
    odd = transport.rank == transport.size - 1
    with pytest.raises(LaunchError) as caught:
        transport.check_same("plan", "def" if odd else "abc")
    message = str(caught.value)
    assert "do not have the same plan" in message
    assert f"def: rank {transport.size - 1} on {transport.host}" in message
    assert f"abc: rank 0 on {transport.host}" in message
    with pytest.raises(LaunchError, match="sha256"):
        transport.check_same("plan", "x" * 99 + str(transport.rank))


def what_cannot_be_reduced_is_refused(transport):
    group = everyone(transport)
    for dtype in (*NARROW, "bool"):
        with pytest.raises(TaskError, match=f"cannot reduce {dtype}; cast to float32"):
            group.bind_all_reduce(np.zeros(3, dtype))
    with pytest.raises(TaskError, match="one of sum, max"):
        group.bind_all_reduce(np.zeros(3), "min")


def buffers_that_do_not_fit_their_counts_are_refused(transport):
    group, size = everyone(transport, "model"), transport.size
    with pytest.raises(TaskError, match=r"model: .*flat and contiguous"):
        group.bind_all_reduce(np.zeros((2, 3)))
    with pytest.raises(TaskError, match="flat and contiguous"):
        group.bind_all_reduce(np.zeros(6)[::2])
    with pytest.raises(TaskError, match=f"{size + 1} elements, the counts say {size}"):
        group.bind_all_gather(np.zeros(1), np.zeros(size + 1), (1,) * size)
    with pytest.raises(TaskError, match="receives into float64"):
        group.bind_all_gather(np.zeros(1, np.float32), np.zeros(size), (1,) * size)
    with pytest.raises(TaskError, match=f"counts for {size} members"):
        group.bind_all_to_all(np.zeros(1), (1,) + (0,) * size, np.zeros(1), (1,) + (0,) * size)


def an_exchange_under_way_cannot_be_started_again(transport):
    start = everyone(transport).bind_all_reduce(np.zeros(3))
    request = start()
    with pytest.raises(TaskError, match="started again before its end"):
        start()
    request.wait()
    start().wait()


def a_wait_ends_when_its_check_raises(transport):
    """Rank 0 comes late on purpose: the others wait for it until their check raises."""

    class Elsewhere(Exception):
        pass

    def check():
        raise Elsewhere

    group = everyone(transport)
    start, late = group.bind_all_reduce(np.ones(3)), transport.size > 1 and transport.rank == 0
    request = None if late else start()
    if transport.size > 1 and not late:
        with pytest.raises(Elsewhere):
            request.wait(check)
    transport.barrier().wait()
    (request or start()).wait()


CLAIMS = [
    all_reduce_sums_every_dtype,
    all_reduce_takes_the_maximum,
    a_bound_all_reduce_reads_its_buffer_at_each_start,
    all_gather_joins_uneven_and_empty_parts,
    reduce_scatter_gives_each_its_uneven_part_of_the_sum,
    all_to_all_moves_each_part_to_its_member,
    an_exchange_may_have_counts_of_its_own_each_time,
    several_collectives_may_be_under_way,
    sent_is_the_volume_of_the_standard_algorithms,
    groups_of_one_partition_are_apart,
    group_members_keep_the_order_in_which_they_are_named,
    control_messages_reach_their_ranks,
    on_root_runs_on_rank_0_and_answers_everyone,
    on_root_raises_its_error_on_every_rank,
    check_same_names_the_ranks_that_differ,
    what_cannot_be_reduced_is_refused,
    buffers_that_do_not_fit_their_counts_are_refused,
    an_exchange_under_way_cannot_be_started_again,
    a_wait_ends_when_its_check_raises,
]
