"""What each choice of a min-sum problem costs at least, whatever is chosen for all others.

Costs are moved between variables and pairs so that no sum changes and the sum of all minima grows;
it is a lower bound of the best sum. How far a choice lies above the minima is its slack: every
assignment that has it costs the bound and the slack, or more. (Sequential reweighted message
passing, Kolmogorov 2015.)

Variables are passed in the order of their colours: those of one colour share no pairs, so that
all of them move their costs at once. Graphs of networks take few colours, however deep they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np

from mpiflow.compiler.tables import Indices, Pair, Table

_SWEEPS = 60
_ENOUGH = 3e-6
"""The sweeps end with one that raises the bound by a smaller share."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`lower` is a bound of the best sum, `slack` how far above it each choice is, by variable."""

    lower: float
    slack: list[Table]


def bounds(costs: list[Table], pairs: dict[Pair, Table]) -> Bounds:
    """The bounds of variables with a cost by choice, and pairs (a < b) with a table of costs."""
    colours = _colours(len(costs), pairs)
    order = np.argsort(colours, kind="stable")
    place = np.argsort(order)
    messages = _messages([costs[v] for v in order], _by_place(pairs, place), colours[order])
    lower = -np.inf
    for _ in range(_SWEEPS):
        messages.sweep()
        found = messages.lower()
        if found - lower <= _ENOUGH * abs(found):
            break
        lower = found
    slack = np.split(messages.slack(), messages.first[1:])
    return Bounds(found, [slack[p] for p in place])


def _colours(variables: int, pairs: Iterable[Pair]) -> Indices:
    """A colour for each variable that none of its neighbours has; those with many are first."""
    around: list[list[int]] = [[] for _ in range(variables)]
    for a, b in pairs:
        around[a].append(b)
        around[b].append(a)
    colours = [-1] * variables
    for v in sorted(range(variables), key=lambda v: -len(around[v])):
        taken = {colours[other] for other in around[v]}
        colours[v] = next(colour for colour in count() if colour not in taken)
    return np.array(colours, np.intp)


def _by_place(pairs: dict[Pair, Table], place: Indices) -> dict[Pair, Table]:
    """The pairs of the places of their variables, the lower first again."""
    placed = [(int(place[a]), int(place[b]), table) for (a, b), table in pairs.items()]
    return {(a, b) if a < b else (b, a): t if a < b else t.T for a, b, t in placed}


@dataclass(frozen=True, slots=True, eq=False)
class _Colour:
    """Variables that share no pairs, and the ends of their pairs.

    An end has a message for each choice of its variable: what the row of its choice in the pair's
    table has at least. `rows` says where each begins in `entries`, `theirs` which message of the
    pair's other end belongs to each entry, and `about` which of the choices of the colour each
    message is about. Of what a choice has, the shares `later` and `earlier` go to the messages of
    one direction, and the share `kept` is left after it went to the earlier ones.
    """

    choices: slice
    messages: slice
    cost: Table
    entries: Table
    rows: Indices
    theirs: Indices
    about: Indices
    later: Table
    earlier: Table
    kept: Table


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """What was moved from pairs to either variable, by end and choice of its variable.

    `left` is what variables have after a sweep, and `first` where the choices of each begin in it.
    """

    colours: list[_Colour]
    first: Indices
    left: Table
    moved: Table

    def sweep(self) -> None:
        """Pass costs on from all variables to later ones, and back."""
        for colour in self.colours:
            self._pass_on(colour, colour.later)
        for colour in reversed(self.colours):
            self.left[colour.choices] = self._pass_on(colour, colour.earlier) * colour.kept

    def _pass_on(self, colour: _Colour, share: Table) -> Table:
        """Collect what all pairs have, give it, and move shares of it on to pairs."""
        least = self._least(colour)
        total = colour.cost + np.bincount(colour.about, least, len(colour.cost))
        self.moved[colour.messages] = least - total[colour.about] * share
        return total

    def _least(self, colour: _Colour) -> Table:
        """What pairs have at least, by message, with what was moved to the colour added again."""
        return np.minimum.reduceat(colour.entries - self.moved[colour.theirs], colour.rows)

    def lower(self) -> float:
        """The sum of the minima after a sweep: nothing is left in pairs, as all was collected."""
        return float(np.minimum.reduceat(self.left, self.first).sum())

    def slack(self) -> Table:
        """What choices cost above the minima, in their variable and its pairs, after a sweep."""
        sizes = np.diff(self.first, append=len(self.left))
        slack = self.left - np.repeat(np.minimum.reduceat(self.left, self.first), sizes)
        for colour in self.colours:
            above = self._least(colour) - self.moved[colour.messages]
            slack[colour.choices] += np.bincount(colour.about, above, len(colour.cost))
        return slack


class _Ends:
    """The ends of all pairs in flat arrays, those of a variable next to each other."""

    def __init__(self, costs: list[Table], pairs: dict[Pair, Table]) -> None:
        a, b = np.array([*pairs], np.intp).reshape(-1, 2).T
        own, other = np.concatenate([a, b]), np.concatenate([b, a])
        order = np.argsort(own, kind="stable")
        self.own, self.other = own[order], other[order]
        self.twin = np.roll(np.argsort(order), len(pairs))[order]
        by_row = [*pairs.values(), *(table.T for table in pairs.values())]
        self.tables = [by_row[end].ravel() for end in order]
        self.never = _above_all([*costs, *self.tables])
        self.costs = np.minimum(np.concatenate(costs), self.never)
        self.sizes = np.array([len(cost) for cost in costs], np.intp)
        self.choices, self.messages = _borders(self.sizes), _borders(self.sizes[self.own])

    def colour(self, start: int, stop: int) -> _Colour:
        """That of some variables which follow one another."""
        e0, e1 = np.searchsorted(self.own, [start, stop]).tolist()
        own, other, lengths = self.own[e0:e1], self.other[e0:e1], self.sizes[self.own[e0:e1]]
        rows = np.repeat(self.sizes[other], lengths)
        later, earlier = (
            np.bincount(own[side] - start, minlength=stop - start)
            for side in (other > own, other < own)
        )
        share = 1.0 / np.maximum(later, earlier).clip(1)
        choices = slice(*self.choices[[start, stop]].tolist())
        return _Colour(
            choices=choices,
            messages=slice(*self.messages[[e0, e1]].tolist()),
            cost=self.costs[choices],
            entries=np.minimum(np.concatenate([np.zeros(0), *self.tables[e0:e1]]), self.never),
            rows=_borders(rows)[:-1],
            theirs=_ranges(np.repeat(self.messages[self.twin[e0:e1]], lengths), rows),
            about=_ranges(self.choices[own] - choices.start, lengths),
            later=np.repeat(np.where(other > own, share[own - start], 0.0), lengths),
            earlier=np.repeat(np.where(other < own, share[own - start], 0.0), lengths),
            kept=np.repeat(1.0 - earlier * share, self.sizes[start:stop]),
        )


def _messages(costs: list[Table], pairs: dict[Pair, Table], colours: Indices) -> _Messages:
    """Nothing moved yet, for variables in the order of their colours and pairs (a < b)."""
    ends = _Ends(costs, pairs)
    borders = _borders(np.bincount(colours)).tolist()
    made = [ends.colour(*span) for span in pairwise(borders)]
    return _Messages(made, ends.choices[:-1], ends.costs.copy(), np.zeros(ends.messages[-1]))


def _borders(lengths: Indices) -> Indices:
    """Where ranges that follow one another begin, and where the last ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _ranges(starts: Indices, lengths: Indices) -> Indices:
    """The numbers of all ranges, one after the other."""
    return np.repeat(starts - _borders(lengths)[:-1], lengths) + np.arange(lengths.sum())


def _above_all(tables: list[Table]) -> float:
    """A number to stand for infinity: more than any sum of finite costs."""
    flat = np.concatenate([table.ravel() for table in tables])
    starts = _borders(np.array([table.size for table in tables]))[:-1]
    finite = np.where(np.isfinite(flat), flat, 0.0)
    return 1.0 + float(np.maximum.reduceat(finite, starts).clip(0.0).sum())
