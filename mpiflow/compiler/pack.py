"""Offsets for buffers of known life and size: as small a memory as can be found with bounded work.

What lives at one time needs that much: the largest live set is a lower bound of the memory. Buffers
are placed one by one, in several orders and by two rules (a portfolio, as in TFLite and XLA); where
the best of these is still above the bound and the buffers are few, `tightfit.py` searches for less.
Work is counted, never timed, so that the result depends on the buffers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.tightfit import Boxes, fit

ALIGNMENT = 64
"""Bytes: a cache line."""

WORK = 20_000_000
"""Entries of matrices that a search may touch: a second of a CPU, where they are small."""

WORTH = 65_536
"""Bytes: less than this above the bound, and no search is made."""

Ints = NDArray[np.int64]
Gap = Callable[[Ints, Ints, int], int]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are in use from time `start` to time `stop`, both included."""

    nbytes: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Packing:
    """An offset for each buffer, where the last one ends, and the largest live set."""

    offsets: tuple[int, ...]
    nbytes: int
    lower_bound: int


def align(nbytes: int) -> int:
    """The bytes, rounded up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack(
    buffers: Sequence[Buffer], *, enough: int = 0, work: int = WORK, worth: int = WORTH
) -> Packing:
    """Aligned offsets, such that buffers that live at one time share no byte.

    Nothing is tried beyond `enough` bytes, which may be all that the memory has. The figures are
    those of buffers rounded up to whole cache lines.
    """
    if not buffers:
        return Packing((), 0, 0)
    sizes, lives = _arrays(buffers)
    live = _live(sizes, lives)
    bound = int(live.max())
    goal = max(bound, enough)
    best, used = _portfolio(buffers, sizes, lives, live, goal)
    if used - goal >= max(worth, 1):
        best, used = _searched(sizes, lives, best, used, goal, work)
    return Packing(tuple(best.tolist()), used, bound)


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """The bytes of the largest live set: no packing is smaller."""
    return int(_live(*_arrays(buffers)).max()) if buffers else 0


def _arrays(buffers: Sequence[Buffer]) -> tuple[Ints, Ints]:
    """The aligned sizes of buffers, and the first and last times of their lives."""
    sizes = np.array([align(b.nbytes) for b in buffers], np.int64)
    return sizes, np.array([(b.start, b.stop) for b in buffers], np.int64)


def _live(sizes: Ints, lives: Ints) -> Ints:
    """The bytes that live at each time from the first start to the last stop."""
    first = lives.min()
    change = np.zeros(lives.max() - first + 2, np.int64)
    np.add.at(change, lives[:, 0] - first, sizes)
    np.subtract.at(change, lives[:, 1] + 1 - first, sizes)
    return change[:-1].cumsum()


def _portfolio(
    buffers: Sequence[Buffer], sizes: Ints, lives: Ints, live: Ints, goal: int
) -> tuple[Ints, int]:
    """The smallest of what the orders and rules give, at once if it is no more than the goal."""
    best, used = np.zeros(0, np.int64), int(sizes.sum()) + 1
    for order, gap in _ways(buffers, lives, live):
        found = _place(sizes, lives, order, gap, used)
        if found is not None:
            best, used = found
        if used <= goal:
            break
    return best, used


def _ways(buffers: Sequence[Buffer], lives: Ints, live: Ints) -> Iterator[tuple[list[int], Gap]]:
    """Orders of the buffers, each with a rule for the gap that a buffer takes."""
    nbytes = np.array([b.nbytes for b in buffers], np.int64)
    start, length = lives[:, 0], lives[:, 1] - lives[:, 0] + 1
    breadth = _breadth(lives, live)
    by_size, by_area = (-nbytes, start), (-nbytes * length, start)
    by_length, by_start = (-length, -nbytes), (start, -nbytes)
    by_breadth = [(-breadth, *keys) for keys in (by_length, by_size, by_area)]
    for keys in (by_size, by_area, by_length, by_start):
        yield np.lexsort(keys[::-1]).tolist(), _smallest_gap
    yield np.lexsort(by_size[::-1]).tolist(), _first_gap
    for gap in (_smallest_gap, _first_gap):
        for keys in by_breadth:
            yield np.lexsort(keys[::-1]).tolist(), gap
    yield np.lexsort(by_area[::-1]).tolist(), _first_gap


def _breadth(lives: Ints, live: Ints) -> Ints:
    """The largest live set that each buffer is part of."""
    times = lives - lives.min()
    # Tables of maxima over 2^k times: a span is covered by two of them.
    tables = [live]
    while 2 * (width := 1 << len(tables) - 1) <= len(live):
        tables.append(np.maximum(tables[-1][:-width], tables[-1][width:]))
    levels = np.frexp(times[:, 1] - times[:, 0] + 1)[1] - 1
    return np.array(
        [
            max(tables[k][first], tables[k][last + 1 - (1 << k)])
            for k, (first, last) in zip(levels.tolist(), times.tolist(), strict=True)
        ],
        np.int64,
    )


def _place(
    sizes: Ints, lives: Ints, order: list[int], gap: Gap, below: int
) -> tuple[Ints, int] | None:
    """The offset of each buffer, placed one after another in the order, and where the last ends.

    None, as soon as that is known, where it is not `below` what is known already.
    """
    offsets = np.zeros(len(sizes), np.int64)
    # What is placed, by offset: where it begins and ends, the first and last time it lives.
    placed = np.zeros((4, len(sizes)), np.int64)
    spans = lives.tolist()
    for count, (i, size) in enumerate(zip(order, sizes[order].tolist(), strict=True)):
        start, stop = spans[i]
        begins, ends, starts, stops = placed[:, :count]
        near = (starts <= stop) & (stops >= start)
        offsets[i] = place = gap(begins[near], ends[near], size)
        if place + size >= below:
            return None
        row = begins.searchsorted(place)
        placed[:, row + 1 : count + 1] = placed[:, row:count]
        placed[:, row] = place, place + size, start, stop
    return offsets, int(placed[1].max(initial=0))


def _smallest_gap(begins: Ints, ends: Ints, size: int) -> int:
    """The start of the smallest gap that is large enough, else the first free byte above."""
    cursors = np.maximum.accumulate(np.concatenate(([0], ends)))
    gaps = begins - cursors[:-1]
    fitting = np.flatnonzero(gaps >= size)
    return int(cursors[fitting[gaps[fitting].argmin()] if fitting.size else -1])


def _first_gap(begins: Ints, ends: Ints, size: int) -> int:
    """The start of the lowest gap that is large enough, else the first free byte above."""
    cursors = np.maximum.accumulate(np.concatenate(([0], ends)))
    fitting = np.flatnonzero(begins - cursors[:-1] >= size)
    return int(cursors[fitting[0] if fitting.size else -1])


def _searched(
    sizes: Ints, lives: Ints, best: Ints, used: int, goal: int, work: int
) -> tuple[Ints, int]:
    """Smaller than `used`, where a search finds it: first for the goal, then for half the way."""
    boxes = Boxes(sizes // ALIGNMENT, *_sections(lives))
    failed, capacity = goal - ALIGNMENT, goal
    while failed + ALIGNMENT < used and work > boxes.least_work:
        found, spent = fit(boxes, capacity // ALIGNMENT, work // 2)
        work -= spent
        if found is None:
            failed = capacity
        else:
            best = found * ALIGNMENT
            used = int((best + sizes).max())
        capacity = align(failed + (used - failed) // 2)
    return best, used


def _sections(lives: Ints) -> tuple[Ints, Ints]:
    """The first and last section of each life; a section is a start before the next stop.

    These are the times whose live sets are part of no other: two lives meet where they share one.
    """
    events = sorted([(start, False) for start, _ in lives.tolist()]
                    + [(stop, True) for _, stop in lives.tolist()])  # fmt: skip
    times = np.array(
        [time for (time, stops), (_, next_stops) in pairwise(events) if not stops and next_stops]
    )
    return times.searchsorted(lives[:, 0]), times.searchsorted(lives[:, 1], "right") - 1
