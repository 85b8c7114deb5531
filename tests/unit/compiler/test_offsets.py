"""Offsets of buffers: apart where they live at once, and as few bytes as the largest live set."""

import csv
import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from mpiflow.compiler.memory import Packed
from mpiflow.compiler.pack import Buffer, align, lower_bound, pack
from mpiflow.compiler.tightfit import NODE, Boxes, fit

INSTANCES = Path(__file__).resolve().parents[4] / "shared" / "data" / "minimalloc"
MEBIBYTE = 1 << 20


def meet(x, y):
    return x.start <= y.stop and y.start <= x.stop


def check(buffers, packing):
    """Independent of the packer: every pair that lives at once lies apart, below the end."""
    assert len(packing.offsets) == len(buffers)
    for place, buffer in zip(packing.offsets, buffers, strict=True):
        assert place >= 0
        assert place % 64 == 0
        assert place + buffer.nbytes <= packing.nbytes
    for (a, x), (b, y) in combinations(zip(packing.offsets, buffers, strict=True), 2):
        assert not meet(x, y) or a + x.nbytes <= b or b + y.nbytes <= a
    assert lower_bound(buffers) == packing.lower_bound <= packing.nbytes


def random_buffers(seed, most=60, times=50):
    draw = random.Random(seed)
    buffers = []
    for _ in range(draw.randint(1, most)):
        start = draw.randint(-1, times)
        nbytes = draw.choice([1, 64, 100, 4096, 5000])
        buffers.append(Buffer(nbytes, start, start + draw.choice([0, 1, 5, 20])))
    return buffers


def cut_square(seed, pieces):
    """Buffers that fill a memory of 64 pages over 1000 times with no byte to spare."""
    draw = random.Random(seed)
    whole = [(0, 1000, 0, 64)]
    while len(whole) < pieces:
        first, last, low, high = whole.pop(draw.randrange(len(whole)))
        if draw.random() < 0.5 and last - first > 1:
            cut = draw.randint(first + 1, last - 1)
            whole += [(first, cut, low, high), (cut, last, low, high)]
        elif high - low > 1:
            cut = draw.randint(low + 1, high - 1)
            whole += [(first, last, low, cut), (first, last, cut, high)]
        else:
            whole.append((first, last, low, high))
    return [Buffer(4096 * (high - low), first, last - 1) for first, last, low, high in whole]


def full_sections(seed, most):
    """Buffers of a few pages that fill each of six times to the last page, if they have places."""
    draw = random.Random(seed)
    pages = draw.randint(4, 9)
    live, buffers = [0] * 6, []
    for start in range(6):
        while live[start] < pages:
            size = draw.randint(1, min(4, pages - live[start]))
            stop = min(5, start + draw.choice([0, 1, 1, 2, 2, 3]))
            buffers.append(Buffer(64 * size, start, stop))
            for time in range(start, stop + 1):
                live[time] += size
    draw.shuffle(buffers)
    return buffers[:most]


def there_is_a_place(buffers, nbytes, placed=()):
    """By trying every offset of every buffer, one after another."""
    if len(placed) == len(buffers):
        return True
    buffer = buffers[len(placed)]
    for place in range(0, nbytes - buffer.nbytes + 1, 64):
        apart = all(
            not meet(buffer, other) or place + buffer.nbytes <= low or low + other.nbytes <= place
            for low, other in zip(placed, buffers, strict=False)
        )
        if apart and there_is_a_place(buffers, nbytes, (*placed, place)):
            return True
    return False


def boxes(buffers):
    """With a section for each time."""
    first = min(b.start for b in buffers)
    return Boxes(
        *(
            np.array(numbers)
            for numbers in zip(*((b.nbytes, b.start - first, b.stop - first) for b in buffers),
                               strict=True)
        )
    )  # fmt: skip


@pytest.mark.parametrize("seeds", [range(150)], ids=str)
def test_buffers_that_live_at_once_never_overlap(seeds):
    ratios = []
    for seed in seeds:
        buffers = random_buffers(seed)
        packing = pack(buffers)
        check(buffers, packing)
        ratios.append(packing.nbytes / packing.lower_bound)
    assert max(ratios) < 1.25
    assert sum(ratios) / len(ratios) < 1.02


def test_the_bound_is_the_largest_live_set():
    for seed in range(50):
        buffers = random_buffers(seed, times=9)
        live = [
            sum(align(b.nbytes) for b in buffers if b.start <= time <= b.stop)
            for time in range(-1, 30)
        ]
        assert lower_bound(buffers) == max(live)
    assert lower_bound([]) == 0
    assert pack([]).offsets == ()


@pytest.mark.parametrize("seeds", [(*range(30), 17760, 44241, 60794, 77862)], ids=["34"])
def test_a_search_finds_offsets_exactly_where_there_are_any(seeds):
    more = 0
    for seed in seeds:
        buffers = full_sections(seed, most=9)
        buffers.sort(key=lambda b: b.start)
        least = lower_bound(buffers)
        while not there_is_a_place(buffers, least):
            assert fit(boxes(buffers), least, 10**9)[0] is None
            least += 64
            more += 1
        packing = pack(buffers, worth=0)
        check(buffers, packing)
        assert packing.nbytes == least
        offsets, spent = fit(boxes(buffers), least, 10**9)
        assert offsets is not None
        assert spent < 10**8
    assert more, "no instance needs more than its largest live set"


def test_a_search_proves_that_the_largest_live_set_is_not_enough():
    buffers = [
        Buffer(64 * size, start, stop)
        for size, start, stop in [(2, 0, 1), (2, 0, 2), (1, 2, 4), (1, 2, 3), (1, 3, 4),
                                  (1, 3, 3), (2, 4, 5), (2, 5, 5)]
    ]  # fmt: skip
    offsets, spent = fit(boxes(buffers), 4 * 64, 10**9)
    assert offsets is None
    assert spent < 10**7
    packing = pack(buffers, worth=0)
    check(buffers, packing)
    assert (packing.nbytes, packing.lower_bound) == (5 * 64, 4 * 64)


def test_a_search_fills_memory_without_a_gap_where_no_order_does():
    searched = 0
    for seed, pieces in [(0, 40), (1, 40), (2, 60), (3, 60)]:
        buffers = cut_square(seed, pieces)
        packing = pack(buffers, worth=0, work=100_000_000)
        check(buffers, packing)
        assert packing.nbytes == packing.lower_bound == 64 * 4096
        searched += pack(buffers, work=0).nbytes > packing.nbytes
    assert searched


def test_what_is_enough_is_not_improved():
    buffers = cut_square(2, 60)
    by_orders = pack(buffers, work=0)
    assert pack(buffers, enough=by_orders.nbytes).nbytes == by_orders.nbytes
    assert pack(buffers, worth=by_orders.nbytes).nbytes == by_orders.nbytes
    assert pack(buffers, worth=0, work=100_000_000).nbytes < by_orders.nbytes


def test_a_search_is_the_same_each_time_and_ends_by_its_work():
    buffers = cut_square(3, 60)
    (a, spent), (b, again) = (fit(boxes(buffers), 64 * 4096, 10**7) for _ in range(2))
    assert (a is None) == (b is None)
    assert a is None or (a == b).all()
    assert spent == again
    offsets, spent = fit(boxes(buffers), 64 * 4096, 10**6)
    assert offsets is None
    assert 10**6 <= spent < 10**6 + NODE + 60 * 1000


def test_buffers_beyond_the_reach_of_a_search_are_placed_by_orders():
    buffers = [Buffer(64 + i % 7 * 640, i, i + 37 * i % 101) for i in range(800)]
    packing = pack(buffers, worth=0)
    check(buffers, packing)
    assert packing.nbytes < 1.2 * packing.lower_bound


@pytest.mark.parametrize(
    ("over", "notes"),
    [(-60, []), (60_000, []), (140_000, ["the arena is 1.4% above the largest live set"])],
)
def test_a_plan_says_how_far_its_arena_is_above_the_largest_live_set(over, notes):
    assert Packed((), (), 10_000_000 + over, 10_000_000).notes == notes


@pytest.mark.parametrize("name", ["B", "C", "F"])
def test_hard_public_instances_fit_their_memory(name):
    path = INSTANCES / f"{name}.1048576.csv"
    if not path.exists():
        pytest.skip(f"the instances of google/minimalloc are not in {INSTANCES}")
    with path.open() as file:
        buffers = [
            Buffer(int(row["size"]), int(row["lower"]), int(row["upper"]) - 1)
            for row in csv.DictReader(file)
        ]
    packing = pack(buffers, enough=MEBIBYTE, work=400_000_000, worth=0)
    check(buffers, packing)
    assert packing.nbytes <= MEBIBYTE
