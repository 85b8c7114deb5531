"""Offsets of buffers: apart where they live at once, and as few bytes as the largest live set."""

import csv
import random
from itertools import combinations, permutations
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


def fewest_bytes(buffers):
    """By trying all orders, each buffer at the lowest place: one of these is optimal."""
    best = sum(align(b.nbytes) for b in buffers)
    for order in permutations(buffers):
        placed = []
        for buffer in order:
            ends = [0, *sorted(stop for other, _, stop in placed if meet(buffer, other))]
            size = align(buffer.nbytes)
            place = next(
                end for end in ends
                if all(end + size <= start or stop <= end
                       for other, start, stop in placed if meet(buffer, other))
            )  # fmt: skip
            placed.append((buffer, place, place + size))
        best = min(best, max(stop for *_, stop in placed))
    return best


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


def test_a_search_gives_the_fewest_bytes_that_any_order_gives():
    for seed in range(40):
        draw = random.Random(seed)
        buffers = []
        for _ in range(draw.randint(4, 6)):
            start = draw.randint(0, 8)
            buffers.append(Buffer(64 * draw.randint(1, 6), start, start + draw.randint(0, 4)))
        packing = pack(buffers, worth=0)
        check(buffers, packing)
        assert packing.nbytes == fewest_bytes(buffers)


def test_a_search_proves_that_the_largest_live_set_is_not_enough():
    buffers = [
        Buffer(64 * size, start, stop)
        for size, start, stop in [(2, 0, 1), (2, 0, 2), (1, 2, 4), (1, 2, 3), (1, 3, 4),
                                  (1, 3, 3), (2, 4, 5), (2, 5, 5)]
    ]  # fmt: skip
    offsets, spent = fit(boxes(buffers), 4 * 64, 10**9)
    assert offsets is None
    assert spent < 10**6
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
    buffers = [*cut_square(3, 60), Buffer(4096, 0, 0)]
    (a, spent), (b, again) = (fit(boxes(buffers), 66 * 4096, 10**8) for _ in range(2))
    assert a is not None
    assert (a == b).all()
    assert spent == again
    offsets, spent = fit(boxes(buffers), 65 * 4096, 10**6)
    assert offsets is None
    assert 10**6 <= spent < 10**6 + NODE + 61 * 1000


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


@pytest.mark.parametrize("name", ["B", "D", "E"])
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
