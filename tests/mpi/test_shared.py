"""Collectives in memory that the ranks of a host see of one another, over real MPI."""

import os
from itertools import product

import numpy as np
import pytest
from jobs import classifier, compile_for, readers_of
from transport_contract import DTYPES, NARROW, content, counts_of

from mpiflow.exec import collective, pages, shared
from mpiflow.exec.device import host_bytes
from mpiflow.exec.session import Session
from mpiflow.exec.transport import Call, Source, Take

pytestmark = pytest.mark.mpi(min_size=2)
SIZES = (0, 1, 5, 1000, 70_001)


@pytest.fixture
def transport():
    from mpiflow.exec.launch import connect

    transport = connect()
    yield transport
    transport.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks, and several looks, for a few kilobytes."""
    monkeypatch.setattr(shared, "_BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(shared, "_BYTES_A_LOOK", 1 << 14)


class Arena:
    """Memory that is shared but for its first page, and arrays in it one after another."""

    def __init__(self, transport, nbytes=1 << 22, ranges=None):
        self.memory, self.used = host_bytes(nbytes), pages.PAGE
        transport.share(self.memory, ranges or [(pages.PAGE, nbytes)])

    def array(self, values, at=None):
        nbytes = values.nbytes
        start = self.used if at is None else at
        if at is None:
            self.used += nbytes + (-nbytes % 64)
        found = self.memory[start : start + nbytes].view(values.dtype)
        found[:] = values
        return found


def everyone(transport):
    return transport.group(tuple(range(transport.size)), "shared")


def is_shared(start):
    return isinstance(start.__self__, shared.SharedOperation)


@pytest.mark.parametrize("n", SIZES)
def test_sums_and_maxima(transport, n):
    group, arena = everyone(transport), Arena(transport, 1 << 24)
    for dtype, (reduce, fold) in product(DTYPES, [("sum", np.add), ("max", np.maximum)]):
        all_content = [content(r, n, dtype) for r in range(transport.size)]
        whole = arena.array(all_content[transport.rank])
        start = group.bind_all_reduce(whole, reduce)
        expected = fold.reduce(all_content, dtype=dtype)
        for _ in range(2):  # again and again, each time of what is there
            whole[:] = all_content[transport.rank]
            start().wait()
            np.testing.assert_array_equal(whole, expected)
            transport.barrier().wait()
        counts = counts_of(n, transport.size)
        send = arena.array(all_content[transport.rank])
        part = arena.array(np.zeros(counts[transport.rank], dtype))
        scatter = group.bind_reduce_scatter(send, part, counts, reduce)
        scatter().wait()
        first = sum(counts[: transport.rank])
        np.testing.assert_array_equal(part, expected[first : first + part.size])
        assert is_shared(start)
        assert is_shared(scatter)


@pytest.mark.parametrize("n", SIZES)
def test_gathers_and_exchanges(transport, n):
    group, arena, size, rank = everyone(transport), Arena(transport), transport.size, transport.rank
    for dtype in ("float32", *NARROW, "bool"):
        counts = counts_of(n, size)
        parts = [content(r, counts[r], dtype) for r in range(size)]
        receive = arena.array(np.zeros(n, dtype))
        gather = group.bind_all_gather(arena.array(parts[rank]), receive, counts)
        gather().wait()
        np.testing.assert_array_equal(receive, np.concatenate(parts))
        # In place: this rank's part is where it belongs.
        whole = arena.array(np.zeros(n, dtype))
        first = sum(counts[:rank])
        own = whole[first : first + counts[rank]]
        own[:] = parts[rank]
        group.bind_all_gather(own, whole, counts)().wait()
        np.testing.assert_array_equal(whole, np.concatenate(parts))
        # Rank r sends i + r + n % 3 elements to rank i.
        leaving = tuple(i + rank + n % 3 for i in range(size))
        coming = tuple(rank + i + n % 3 for i in range(size))
        back = arena.array(np.zeros(sum(coming), dtype))
        sent = arena.array(content(rank, sum(leaving), dtype))
        exchange = group.bind_all_to_all(sent, leaving, back, coming)
        exchange().wait()
        expected = []
        for peer in range(size):
            theirs = [i + peer + n % 3 for i in range(size)]
            start = sum(theirs[:rank])
            expected.append(content(peer, sum(theirs), dtype)[start : start + theirs[rank]])
        np.testing.assert_array_equal(back, np.concatenate(expected))
        assert is_shared(gather)
        assert is_shared(exchange)


def test_sums_have_the_order_of_the_ranks_and_are_alike_on_all(transport):
    group, arena = everyone(transport), Arena(transport)
    values = [np.random.default_rng(r).standard_normal(5000, "f4") for r in range(transport.size)]
    whole = arena.array(values[transport.rank])
    group.bind_all_reduce(whole)().wait()
    expected = values[0]
    for other in values[1:]:
        expected = expected + other
    np.testing.assert_array_equal(whole, expected)


def test_several_are_under_way_at_once_in_any_order(transport):
    group, arena = everyone(transport), Arena(transport)
    arrays = [arena.array(np.zeros(3000 + i, np.float32)) for i in range(4)]
    starts = [group.bind_all_reduce(array) for array in arrays]
    order = np.random.default_rng(transport.rank).permutation(4)
    for step in range(20):
        for i, array in enumerate(arrays):
            array[:] = step + i
        requests = [starts[i]() for i in order]
        while not all([request.test() for request in requests]):
            pass
        for i, array in enumerate(arrays):
            np.testing.assert_array_equal(array, (step + i) * transport.size)


def test_what_is_not_shared_goes_by_messages(transport):
    group, arena = everyone(transport), Arena(transport)
    outside = arena.array(np.full(10, 1.0), at=0)  # on the page that is not shared
    crossing = arena.array(np.full(10, 1.0), at=pages.PAGE - 40)
    alone = np.full(10, 1.0)
    inside = arena.array(np.full(10, 1.0))
    one_has_it = inside if transport.rank else alone
    for buffer in (outside, crossing, alone, one_has_it):
        buffer[:] = 1.0
        start = group.bind_all_reduce(buffer)
        start().wait()
        assert not is_shared(start)
        np.testing.assert_array_equal(buffer, transport.size)


def test_parts_of_a_host_have_collectives_of_their_own(transport):
    arena, half = Arena(transport), (transport.size + 1) // 2
    members = range(half) if transport.rank < half else range(half, transport.size)
    group = transport.group(tuple(members), "half")
    whole = arena.array(np.full(5000, 1.0 + transport.rank))
    start = group.bind_all_reduce(whole)
    start().wait()
    np.testing.assert_array_equal(whole, sum(1.0 + r for r in members))
    assert is_shared(start) == (len(members) > 1)


def test_more_than_there_are_counters_goes_by_messages(transport):
    group, arena = everyone(transport), Arena(transport)
    del transport.neighbours._unused[1 + transport.rank :]
    whole = arena.array(np.full(100, 1.0))
    starts = [group.bind_all_reduce(whole) for _ in range(2)]
    assert [is_shared(start) for start in starts] == [True, False]  # the first rank has no more
    assert f"more than {shared._COUNTERS} collectives are bound" in transport.remark
    starts[1]().wait()
    np.testing.assert_array_equal(whole, transport.size)


@pytest.mark.parametrize("who", ["one cannot open", "one has none", "another process", "no room"])
def test_one_that_cannot_see_the_others_makes_all_use_messages(transport, monkeypatch, who):
    last, files = transport.rank == transport.size - 1, len(os.listdir("/proc/self/fd"))
    if last and who == "one cannot open":
        monkeypatch.setattr(os, "open", _refusing)
    if last and who == "one has none":
        monkeypatch.delattr(os, "memfd_create")
    if last and who == "another process":
        monkeypatch.setattr(pages, "TOKEN_BYTES", 8)  # its token is another one
    if last and who == "no room":
        monkeypatch.setattr(os, "ftruncate", _full)
    arena = Arena(transport)
    monkeypatch.undo()
    whole = arena.array(np.full(5000, 1.0))
    start = everyone(transport).bind_all_reduce(whole)
    start().wait()
    assert not is_shared(start)
    np.testing.assert_array_equal(whole, transport.size)
    assert "go by messages and not in memory that its ranks share: " in transport.remark
    reasons = {
        "one cannot open": f"rank {transport.size - 1}: memory of rank 0: [Errno 13] Permission",
        "one has none": f"rank {transport.size - 1}: the system has no files in memory",
        "another process": "is another one here",
        "no room": f"rank {transport.size - 1}: [Errno 28] No space",
    }
    assert reasons[who] in transport.remark
    assert len(os.listdir("/proc/self/fd")) == files
    Arena(transport)  # a later success does not make it untrue
    assert reasons[who] in transport.remark


def _full(*_):
    raise OSError(28, "No space left on device")


def _refusing(*_):
    raise PermissionError(13, "Permission denied")


def test_memory_keeps_what_is_beside_the_shared_pages(transport):
    ranges = [(3 * pages.PAGE + 5, 3 * pages.PAGE + 6), (9 * pages.PAGE, 11 * pages.PAGE)]
    arena = Arena(transport, 16 * pages.PAGE, ranges)
    everything = arena.memory
    everything[:] = np.arange(everything.size) % 251
    np.testing.assert_array_equal(everything, np.arange(everything.size) % 251)
    group = everyone(transport)
    for start, is_there in ((3, True), (4, False), (9, True), (10, True), (11, False)):
        buffer = everything[start * pages.PAGE : (start + 1) * pages.PAGE].view(np.float32)
        assert is_shared(group.bind_all_reduce(buffer)) == is_there
    assert not transport.remark


def test_memory_of_others_that_was_touched_is_known(transport):
    arena = Arena(transport, 1 << 22)
    arena.memory[:] = 1
    assert transport.seen_bytes() < 1 << 16
    whole = arena.memory[pages.PAGE :].view(np.float32)
    everyone(transport).bind_all_reduce(whole)().wait()
    others = transport.size - 1
    expected = others / transport.size * whole.nbytes
    around = others * 2 * (1 << 16)  # Linux maps up to 16 pages with one that is touched
    assert expected * 0.95 < transport.seen_bytes() < expected + around


def test_memory_that_was_let_go_is_forgotten_and_not_taken_for_what_follows(transport):
    files, counters = len(os.listdir("/proc/self/fd")), len(transport.neighbours._unused)
    group = everyone(transport)
    for step in range(20):
        memory = host_bytes(1 << 20)  # at the same address, as a rule
        if step % 3 == transport.rank % 3:
            kept = host_bytes(1 << 20)  # not on all ranks
        if step % 2:
            transport.share(memory, [(0, memory.nbytes)])
        whole = memory.view(np.float32)
        whole[:] = step
        start = group.bind_all_reduce(whole)
        for _ in range(1 + step % 4):  # counters that were used before have counted
            whole[:] = step
            start().wait()
            np.testing.assert_array_equal(whole, step * transport.size)
        assert is_shared(start) == (step % 2 == 1)
        transport.unshare(memory)
        del memory, whole, start
    assert len(transport.neighbours._unused) == counters
    assert len(os.listdir("/proc/self/fd")) == files
    assert transport.seen_bytes() == 0
    assert kept is not None


def test_nothing_to_share_is_no_fault(transport):
    transport.share(host_bytes(100), [])
    transport.share(Elsewhere(), [])
    ranges = [(0, 100)] if transport.rank else []  # what one has, nobody needs of another
    transport.share(host_bytes(100), ranges)
    assert not transport.remark


class Elsewhere:
    """Memory of a device."""


def test_what_would_be_read_while_it_is_written_goes_by_messages(transport):
    group, arena = everyone(transport), Arena(transport)
    n = transport.size
    send = arena.array(np.zeros(2 * n, np.float32))
    apart = arena.array(np.zeros(2, np.float32))
    for receive, expected in ((apart, True), (send[1:3], False)):
        assert is_shared(group.bind_reduce_scatter(send, receive, [2] * n)) == expected


def some_takes(draw, size, rank):
    """What every rank shows, by rank, and what this one takes: random boxes of random members."""
    shapes = [(), (7,), (40, 33), (3, 50, 20)]
    shown = [[draw.integers(0, 99, shape).astype("f4") for shape in shapes] for _ in range(size)]
    wanted = []
    for number, shape in enumerate(shapes):
        for _ in range(4):
            starts = [int(draw.integers(0, n)) for n in shape]
            where = tuple(
                slice(a, int(draw.integers(a, n + 1))) for a, n in zip(starts, shape, strict=True)
            )
            members = draw.permutation(size)[: draw.integers(1, size + 1)].tolist()
            wanted.append((number, shape, (*where, ...), members, int(draw.integers(size))))
    return shown, [each[:-1] for each in wanted if each[-1] == rank]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("reduce", "fold"), [("sum", np.add), ("max", np.maximum)])
def test_parts_of_any_shape_are_taken_from_where_they_lie(transport, seed, reduce, fold):
    group, arena, rank = everyone(transport), Arena(transport), transport.rank
    shown, wanted = some_takes(np.random.default_rng(seed), transport.size, rank)
    own = [arena.array(array.reshape(-1)).reshape(array.shape) for array in shown[rank]]
    takes, expected = [], []
    for number, shape, where, members in wanted:
        parts = [shown[member][number][where] for member in members]
        target = np.full((3, *parts[0].shape), -1.0, "f4")[1]
        # Some are places in larger arrays.
        target = target if number % 2 else np.full((*target.shape, 2), -1.0, "f4")[..., 0]
        takes.append(Take(target, tuple(Source(m, number, shape, where) for m in members)))
        expected.append(fold.reduce(parts))
    call = Call("take", own[0].reshape(-1), own[0].reshape(-1), (1,), (1,), reduce)
    start = group.bind_take(call, own, takes, 0)
    assert is_shared(start)
    for _ in range(2):
        start().wait()
        for take, values in zip(takes, expected, strict=True):
            np.testing.assert_array_equal(take.target, values)
            take.target[...] = -1
        transport.barrier().wait()


def test_what_is_taken_may_not_lie_in_what_is_shown_but_for_what_is_there(transport):
    group, arena, rank = everyone(transport), Arena(transport), transport.rank
    whole = arena.array(np.zeros(3 * transport.size, "f4")).reshape(-1, 3)
    call = Call("take", whole[0], whole[0], (3,), (3,))

    def gathered(shown):
        sources = [Source(r, 0, (3,), (...,)) for r in range(transport.size)]
        takes = [Take(whole[r], (source,)) for r, source in enumerate(sources)]
        return group.bind_take(call, [shown], takes, 0)

    start = gathered(whole[rank])
    whole[rank] = rank
    start().wait()
    np.testing.assert_array_equal(whole, np.repeat(range(transport.size), 3).reshape(-1, 3))
    # The last rank alone shows what it would overwrite: all are refused.
    behind = whole.reshape(-1)[1:4] if rank == transport.size - 1 else whole[rank]
    assert gathered(behind) is None


def test_nothing_is_packed_within_a_host(transport, monkeypatch):
    plan = compile_for(f"data={transport.size}", classifier(), zero=1)
    packed = [
        task.op
        for task in plan.program("train").tasks
        if task.kind == "collective" and len(task.inputs) > 1 and task.workspace[1]
    ]
    assert packed == ["reduce_scatter", "all_gather"]
    monkeypatch.delattr(collective.packed, "bind")
    losses = [session_of(plan, transport) for _ in range(2)]
    monkeypatch.undo()
    # By messages, from what is packed.
    monkeypatch.setattr(type(transport), "share", lambda *_: None)
    np.testing.assert_allclose(losses, [session_of(plan, transport)] * 2, rtol=1e-5)


def session_of(plan, transport):
    """The losses of some steps."""
    session = Session(plan, transport, readers_of(plan))
    session.run("initialise")
    session.expect("train", range(5))
    losses = [session.run("train", step)["loss"] for step in range(5)]
    session.close()
    return losses


def test_who_shows_nothing_keeps_a_counter_of_the_newest_memory(transport):
    group, rank = everyone(transport), transport.rank
    old = Arena(transport)
    counters = len(transport.neighbours._unused)
    new = Arena(transport)
    whole = new.array(np.zeros(3, "f4"))
    part = new.array(np.full(0 if rank else 3, 7.0, "f4"))
    counts = [3] + [0] * (transport.size - 1)
    start = group.bind_all_gather(part, whole, counts)
    transport.unshare(old.memory)
    assert len(transport.neighbours._unused) == counters - 1
    sums = new.array(np.full(5, 1.0, "f4"))
    added = group.bind_all_reduce(sums)
    for request in (start(), added()):
        request.wait()
    np.testing.assert_array_equal(whole, 7.0)
    np.testing.assert_array_equal(sums, transport.size)
    transport.unshare(new.memory)
    assert len(transport.neighbours._unused) == counters


@pytest.mark.parametrize(
    ("shape", "where"),
    [
        ((1 << 16,), (slice(None),)),
        ((1 << 8, 1 << 8), (slice(None), slice(0, 1 << 7))),
        ((2, 1 << 14), (slice(None), slice(0, 1 << 13))),  # a row is longer than a block
        ((2, 3, 1 << 12), (slice(None), slice(0, 2), slice(1, None))),
    ],
)
def test_looks_come_by_bytes(shape, where):
    source, target = np.zeros(shape, "f4")[where], np.ones(shape, "f4")[where]
    work = shared._taken(target, [source], "")
    assert sum(nbytes for nbytes, _ in work) == 2 * target.nbytes
    assert max(nbytes for nbytes, _ in work) <= 2 * shared._BLOCK_BYTES
    for _, do in work:
        do()
    np.testing.assert_array_equal(target, 0)


@pytest.mark.parametrize(("tensors", "looks"), [(100, 1), (1000, 5)])
def test_many_small_tensors_are_taken_in_few_looks(transport, tensors, looks):
    group, arena, rank = everyone(transport), Arena(transport), transport.rank
    shown = [arena.array(np.full(10, rank, "f4")) for _ in range(tensors)]
    targets = [np.zeros(10, "f4") for _ in range(tensors)]
    other = (rank + 1) % transport.size
    takes = [
        Take(target, (Source(other, number, (10,), (...,)),))
        for number, target in enumerate(targets)
    ]
    start = group.bind_take(Call("take", shown[0], targets[0], (10,), (10,)), shown, takes, 0)
    operation, counts = start.__self__, 1
    steps = operation._steps()
    next(steps)  # the meeting
    transport.barrier().wait()
    while isinstance(next(steps), shared._Later):
        counts += 1
    assert counts == -(-tensors * 80 // shared._BYTES_A_LOOK) <= looks
    np.testing.assert_array_equal(targets, other)


def test_what_one_rank_alone_remarks_is_known_to_all(transport, monkeypatch):
    remark = property(lambda self: "of rank 1" if self.rank == 1 else "")
    monkeypatch.setattr(type(transport), "remark", remark)
    session = Session(compile_for(f"data={transport.size}", classifier()), transport)
    assert session.remark == "of rank 1"
    session.close()
