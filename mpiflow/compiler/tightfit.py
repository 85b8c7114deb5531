"""Offsets within a given capacity, by search: for buffers that no simple order places well.

A life is a span of sections (times, in order), a size a height; the search builds upwards from 0.
Each buffer that is left has a least offset, the highest end of what is placed below it. These
offsets are the whole state, and the lowest in a section is the section's floor:

    capacity    ----------------------------
                                               A is left, its least offset is the end of C: its
                          A                    sections have two floors, it is not flush. D is
                  ------------------           flush, in a section whose floor is the end of B.
                   D     +---------+
                 +-----+ |    C    |
                 |  B  | |         |
    0           -+-----+-+---------+--------

Where all buffers at the floor of a section are flush, one of them lies on the floor, or nothing
does, up to the next offset that is possible there: these are the branches. The section with the
fewest is taken, so that a section with nothing to spare decides first (as in exact cover). A branch
ends where the buffers of a section, stacked by their least offsets, pass the capacity. What made it
end is known as a span of sections, and decisions elsewhere are not tried anew (backjumping).

That buffers need only lie on others or on 0 is the canonical form of MiniMalloc (Moffitt, ASPLOS
2023); the rules of branching here are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PLACED = np.iinfo(np.int64).max // 4
"""The least offset of a buffer that is not left."""

NODE = 10_000
"""The work of a node beside that of the entries of its matrices."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Buffers by their height and the first and last section of their life, both included."""

    sizes: Ints
    first: Ints
    last: Ints

    @property
    def least_work(self) -> int:
        """What placing every buffer takes, if no branch ends."""
        count = len(self.sizes)
        return count * (NODE + (count // 2) * (int(self.last.max()) + 1))

    def preferences(self) -> tuple[Ints, ...]:
        """Three orders in which to try the buffers that may lie on a floor, lowest rank first."""
        length = self.last - self.first + 1
        keys = ((-self.sizes, -length), (-length, -self.sizes), (-self.sizes * length,))
        return tuple(np.lexsort(key).argsort() for key in keys)


def fit(boxes: Boxes, capacity: int, work: int) -> tuple[Ints | None, int]:
    """Offsets that keep the boxes below the capacity, or None, and the work that was done.

    Rounds begin anew with another preference, and grow. After the first three they learn which
    sections fail how often, and decide these early. Most are not thorough: they leave out what
    rarely helps. None where work ends first, or where a thorough round ends: no offsets exist.
    """
    search = _Search(boxes, capacity)
    preferences = boxes.preferences()
    share, number = boxes.least_work, 0
    while search.work < work:
        search.preference = preferences[number % 3]
        search.learns, search.thorough = number >= 3, number % 4 == 3
        budget = search.work + (share if search.learns else 3 * share)
        offsets, ended = search.attempt(min(budget, work))
        if offsets is not None or (ended and search.thorough):
            return offsets, search.work
        number += 1
        if number % 6 == 0:
            share += share // 2
    return None, search.work


@dataclass(slots=True, eq=False)
class _Node:
    """Sections that a state depends on, if it fails; the branches, and what the last one changed.

    All spans have their first and last section.
    """

    low: int = 0
    high: int = -1
    changed: tuple[int, int] = (0, -1)
    branches: Iterator[Ints] = field(default_factory=lambda: iter(()))

    def because(self, low: int, high: int) -> None:
        """Let a failure depend on these sections too."""
        if self.low > self.high:
            self.low, self.high = low, high
        self.low, self.high = min(self.low, low), max(self.high, high)

    def concerns(self, low: int, high: int) -> bool:
        """Whether the branch at work changed anything in these sections."""
        return self.changed[0] <= high and self.changed[1] >= low


class _Search:
    """Attempts at one capacity. `failures` of sections are counted over all of them."""

    def __init__(self, boxes: Boxes, capacity: int) -> None:
        self.sizes, self.first, self.last = boxes.sizes, boxes.first, boxes.last
        self.capacity = capacity
        sections = np.arange(int(boxes.last.max()) + 1)
        self.sections = sections
        self.member = (self.first[:, None] <= sections) & (sections <= self.last[:, None])
        self.heights = self.member * self.sizes[:, None]
        self.failures = np.ones(len(sections))
        self.work = 0
        self.learns = self.thorough = False
        self.preference = self.offsets = np.zeros(len(self.sizes), np.int64)

    def attempt(self, budget: int) -> tuple[Ints | None, bool]:
        """Offsets if they are found, and whether the search came to its end before the budget."""
        self.offsets = np.zeros_like(self.sizes)
        path = [self._node(np.zeros_like(self.sizes))]
        while path and self.work < budget:
            least = next(path[-1].branches, None)
            if least is None:
                self._backjump(path)
            elif (least == PLACED).all():
                return self.offsets, True
            else:
                path.append(self._node(least))
        return None, not path

    def _backjump(self, path: list[_Node]) -> None:
        """Drop the last node, which failed, and those before it that its failure is not due to."""
        failed = path.pop()
        while path and not path[-1].concerns(failed.low, failed.high):
            path.pop()
        if path:
            path[-1].because(failed.low, failed.high)

    def _node(self, least: Ints) -> _Node:
        node = _Node()
        node.branches = self._branches(least, node)
        return node

    def _branches(self, least: Ints, node: _Node) -> Iterator[Ints]:
        """The states that follow, by their least offsets: none where this one fails."""
        left = np.flatnonzero(least < PLACED)
        left = left[least[left].argsort(kind="stable")]
        low, member, heights = least[left], self.member[left], self.heights[left]
        self.work += NODE + member.size
        above = heights[::-1].cumsum(0)[::-1]
        short = (above + low[:, None]).max(0) > self.capacity
        if short.any():
            self.failures[short] += self.learns
            section = int(short.argmax())
            node.because(*self._span(left[member[:, section]]))
            return
        floor = low[member.argmax(0)]
        sits = member & (low[:, None] == floor)
        steps = np.concatenate(([0], (floor[1:] != floor[:-1]).cumsum()))
        flush = steps[self.last[left]] == steps[self.first[left]]
        following = self._following(member & ~sits, low)
        able = (above[0] > 0) & ~(sits & ~flush[:, None]).any(0)
        spare = self.capacity - above[0]
        section = self._choose(
            able, sits.sum(0) + (np.minimum(following, floor + self.sizes[left].min()) <= spare),
            spare - floor,
        )  # fmt: skip
        sitting = left[sits[:, section]]
        begin, end = self._span(sitting)
        near = (self.first[left] <= end) & (self.last[left] >= begin)
        node.because(*self._span(left[near]))
        yield from self._placements(least, node, sitting, int(floor[section]))
        # A buffer at the floor can only rise by one below it, which is not in the section; as a
        # rule that one lies on the same floor.
        beside = near & ~member[:, section]
        if not self.thorough:
            beside &= flush & (low == floor[section])
        ends = low[beside] + self.sizes[left[beside]]
        next_floor = min(int(following[section]), int(ends.min(initial=PLACED)))
        if next_floor <= spare[section]:
            node.changed = section, section
            yield np.where(self.member[:, section], np.maximum(least, next_floor), least)
        self.failures[section] += self.learns

    def _placements(self, least: Ints, node: _Node, sitting: Ints, height: int) -> Iterator[Ints]:
        """The states after each of these buffers is placed; of equal ones, one."""
        tried = set()
        for i in sitting[self.preference[sitting].argsort()].tolist():
            first, last, size = int(self.first[i]), int(self.last[i]), int(self.sizes[i])
            if (first, last, size) not in tried:
                tried.add((first, last, size))
                meets = (self.first <= last) & (self.last >= first)
                after = np.where(meets, np.maximum(least, height + size), least)
                after[i] = PLACED
                self.offsets[i] = height
                node.changed = first, last
                yield after

    def _choose(self, able: NDArray[np.bool_], branches: Ints, spare: Ints) -> int:
        """The open section with the fewest branches for its failures, then with least to spare."""
        score = np.where(able, branches / self.failures, np.inf)
        return int(np.where(score <= score.min() * (1 + 1e-9), spare, PLACED).argmin())

    def _following(self, waits: NDArray[np.bool_], low: Ints) -> Ints:
        """The least offset in each section of those that wait, PLACED where none does."""
        rows = waits.argmax(0)
        return np.where(waits[rows, self.sections], low[rows], PLACED)

    def _span(self, buffers: Ints) -> tuple[int, int]:
        return int(self.first[buffers].min()), int(self.last[buffers].max())
