"""A problem of choices under a memory limit, and the assignments that were found for it.

Its variables are in *parts*: the live sets of a part hold variables of its own, but for a few.
Pipeline stages are such parts; any other problem is one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from mpiflow.compiler import highs
from mpiflow.compiler.bounds import Table
from mpiflow.compiler.deadends import DeadEnds
from mpiflow.compiler.elimination import Indices, Pairs
from mpiflow.compiler.highs import Scope
from mpiflow.compiler.tables import Tables
from mpiflow.errors import CompileError

FORBIDDEN = "no layouts avoid all conversions that are impossible; give fewer hints"
EXACT = 1e-9
"""The share of a sum that is rounding."""
_APART, _MANY = 16, 4
"""Of the sets of a part that an assignment exceeds, so many are told, which are at least this part
of these sets apart: those in between are much like them."""


class DoesNotFit(CompileError):
    """No assignment keeps the limit: no limit below `least` can be kept, for the set `live`."""

    def __init__(self, live: int, size: int, least: float, limit: float) -> None:
        super().__init__(
            f"live set {live}, of {size} members, needs {least:,.0f} bytes or more,"
            f" {least - limit:,.0f} above the limit of {limit:,.0f}; raise the limit, or allow"
            " choices that need less"
        )
        self.live, self.least, self.limit = live, least, limit


class Live(Protocol):
    """Sets of members that are alive at once, in the order of time: neighbours are much alike."""

    def __len__(self) -> int: ...

    def members(self, index: int) -> Indices:
        """The numbers of the members of a set."""

    def used(self, each: Table) -> Table:
        """The sum over the members of each set, given that of each member."""

    def parts(self) -> tuple[Indices, Indices]:
        """The part, counted from 0, of each set, and of each member."""


class Listed:
    """Live sets that are given one by one, all of one part."""

    def __init__(self, live: Sequence[Sequence[int]], members: int) -> None:
        self.sets = [np.asarray(members, np.intp) for members in live]
        self.joined = np.concatenate([np.zeros(0, np.intp), *self.sets])
        self.owner = np.repeat(np.arange(len(live)), [len(members) for members in live])
        self.count = members

    def __len__(self) -> int:
        return len(self.sets)

    def members(self, index: int) -> Indices:
        return self.sets[index]

    def used(self, each: Table) -> Table:
        used = np.bincount(self.owner, each[self.joined], len(self.sets))
        return used.astype(np.float64, copy=False)

    def parts(self) -> tuple[Indices, Indices]:
        return np.zeros(len(self.sets), np.intp), np.zeros(self.count, np.intp)


@dataclass(frozen=True, slots=True)
class Limited:
    """A choice for each variable, the sum of their costs, and the memory of the largest live set.

    No assignment that fits has a sum below `lower`.
    """

    choice: tuple[int, ...]
    total: float
    lower: float
    memory: float

    @property
    def gap(self) -> float:
        """The share of the sum that a better assignment could save at most."""
        return (self.total - self.lower) / abs(self.total) if self.total > self.lower else 0.0


@dataclass(frozen=True)
class Problem:
    """What is given, see `limited.minimise_within`."""

    costs: list[Table]
    pairs: Pairs
    memory: list[Table]
    scopes: Sequence[Scope]
    live: Live
    limit: float

    @property
    def entries(self) -> int:
        """Of all tables of costs."""
        return sum(map(len, self.costs)) + sum(table.size for table in self.pairs.values())

    @cached_property
    def known(self) -> DeadEnds:
        """What is known of its tables, of which most have no price."""
        return DeadEnds(Tables())

    @cached_property
    def parts(self) -> tuple[int, Indices, Indices]:
        """How many there are, and those of live sets, and of variables: of most of its members."""
        sets, members = self.live.parts()
        count = 1 + int(max(sets.max(initial=0), members.max(initial=0)))
        found = np.zeros((count, len(self.costs)), np.intp)
        for scope, part in zip(self.scopes, members.tolist(), strict=True):
            found[part, list(scope)] += 1
        return count, sets, found.argmax(0)

    def memory_of(self, choice: Sequence[int]) -> Table:
        """The memory of each live set."""
        tables = zip(self.memory, self.scopes, strict=True)
        each = [m[tuple(choice[v] for v in scope)] for m, scope in tables]
        return self.live.used(np.array(each, np.float64))

    def costs_of(self, choice: Sequence[int]) -> Table:
        """What an assignment costs, by part; a pair of two parts costs in that of its second."""
        count, _, parts = self.parts
        owners = [*parts.tolist(), *(parts[b] for _, b in self.pairs)]
        costs = [c[i] for c, i in zip(self.costs, choice, strict=True)]
        costs += [table[choice[a], choice[b]] for (a, b), table in self.pairs.items()]
        sums = np.bincount(np.array(owners, np.intp), np.array(costs, np.float64), count)
        return sums.astype(np.float64, copy=False)

    def check_each_set(self) -> None:
        """Raise where a live set exceeds the limit even with the least memory of each member."""
        possible = [np.flatnonzero(np.isfinite(cost)) for cost in self.costs]
        if not all(map(len, possible)):
            raise CompileError(FORBIDDEN)
        tables = zip(self.memory, self.scopes, strict=True)
        each = [_taken(m, [possible[v] for v in scope]).min() for m, scope in tables]
        least = self.live.used(np.array(each, np.float64))
        if least.max(initial=0.0) > self.limit:
            raise self.does_not_fit(least, float(least.max()))

    def does_not_fit(self, memory: Table, least: float) -> DoesNotFit:
        """The error for the largest live set, by the memory of each."""
        worst = int(memory.argmax())
        return DoesNotFit(worst, len(self.live.members(worst)), least, self.limit)

    def magnitude(self) -> float:
        """About how large a sum is, by the costs."""
        costs = np.concatenate([*self.costs, *(t.ravel() for t in self.pairs.values())])
        costs = np.abs(costs[np.isfinite(costs) & (costs != 0)])
        return float(np.median(costs)) if len(costs) else 1.0


def _taken(table: Table, kept: Sequence[Indices]) -> Table:
    """A table with some of the choices of each dim only."""
    for dim, indices in enumerate(kept):
        table = table.take(indices, dim)
    return table


@dataclass(frozen=True, slots=True)
class Among:
    """The problem with some of the choices, `kept`, of each variable only.

    Its variables are those that have several, `open`; `fixed` is what the others cost.
    """

    problem: Problem
    kept: list[Indices]
    open: list[int]
    costs: list[Table]
    pairs: Pairs
    fixed: float

    def limits(self, sets: Iterable[int], share: float = 1.0) -> highs.Limits:
        """The limit, or a share of it, on some of the live sets."""
        problem, place = self.problem, {v: i for i, v in enumerate(self.open)}
        memory: list[Table] = []
        scopes: list[Scope] = []
        number: dict[int, int] = {}
        live = []
        for index in sets:
            fixed, members = 0.0, []
            for member in problem.live.members(index).tolist():
                scope = problem.scopes[member]
                several = tuple(place[v] for v in scope if v in place)
                if not several:
                    fixed += float(problem.memory[member][tuple(self.kept[v][0] for v in scope)])
                    continue
                if member not in number:
                    number[member] = len(memory)
                    table = _taken(problem.memory[member], [self.kept[v] for v in scope])
                    memory.append(table if len(several) == len(scope) else table.ravel())
                    scopes.append(several)
                members.append(number[member])
            if fixed and self.open:
                members.append(len(memory))
                memory.append(np.full(len(self.costs[0]), fixed))
                scopes.append((0,))
            live.append(np.array(members, np.intp))
        return highs.Limits(memory, live, problem.limit * share, scopes)

    def choice(self, found: Sequence[int]) -> tuple[int, ...]:
        """The choices of all variables, by those of the open ones."""
        chosen = [int(indices[0]) for indices in self.kept]
        for variable, i in zip(self.open, found, strict=True):
            chosen[variable] = int(self.kept[variable][i])
        return tuple(chosen)


def among(problem: Problem, kept: list[Indices]) -> Among:
    """The problem with some of the choices only."""
    several = [v for v, indices in enumerate(kept) if len(indices) > 1]
    place = {v: i for i, v in enumerate(several)}
    costs = [problem.costs[v][kept[v]] for v in several]
    pairs: Pairs = {}
    fixed = sum(float(problem.costs[v][k[0]]) for v, k in enumerate(kept) if len(k) == 1)
    for (a, b), table in problem.pairs.items():
        if a in place and b in place:
            pairs[place[a], place[b]] = _taken(table, (kept[a], kept[b]))
        elif a in place:
            costs[place[a]] = costs[place[a]] + table[kept[a], kept[b][0]]
        elif b in place:
            costs[place[b]] = costs[place[b]] + table[kept[a][0], kept[b]]
        else:
            fixed += float(table[kept[a][0], kept[b][0]])
    return Among(problem, kept, several, costs, pairs, fixed)


@dataclass(slots=True)
class Seen:
    """The assignments that were found, with their costs by part and the memory of each live set.

    `exceeded` are live sets that are too large, the largest of each neighbourhood in any;
    `lower` is the best bound.
    """

    problem: Problem
    choices: list[tuple[int, ...]] = field(default_factory=list)
    costs: list[Table] = field(default_factory=list)
    memory: list[Table] = field(default_factory=list)
    exceeded: dict[int, None] = field(default_factory=dict)
    lower: float = -np.inf

    def add(self, choice: tuple[int, ...], lower: float = -np.inf) -> bool:
        """Add an assignment and a bound; whether it fits."""
        memory = self.problem.memory_of(choice)
        self.choices.append(choice)
        self.costs.append(self.problem.costs_of(choice))
        self.memory.append(memory)
        self.lower = max(self.lower, lower)
        over = np.flatnonzero(memory > self.problem.limit)
        count, parts, _ = self.problem.parts
        for part in range(count if len(over) else 0):
            mine = np.flatnonzero(parts == part)
            self.exceeded.update(dict.fromkeys(_worst(memory, over[parts[over] == part], mine)))
        return not len(over)

    def best(self) -> Limited | None:
        """The cheapest that fits."""
        limit = self.problem.limit
        fitting = [i for i, m in enumerate(self.memory) if m.max(initial=0.0) <= limit]
        if not fitting:
            return None
        return self.limited(min(fitting, key=lambda i: float(self.costs[i].sum())))

    def limited(self, number: int) -> Limited:
        """An assignment as a result; a bound that differs from its sum by rounding is the sum."""
        total, lower = float(self.costs[number].sum()), self.lower
        if total - lower <= EXACT * abs(total):
            lower = total
        return Limited(
            self.choices[number], total, lower, float(self.memory[number].max(initial=0.0))
        )

    def magnitude(self) -> float:
        """About how large a sum is."""
        last = abs(float(self.costs[-1].sum())) if self.costs else 0.0
        return last or self.problem.magnitude()


def _worst(memory: Table, over: Indices, mine: Indices) -> list[int]:
    """The largest of these sets, and the next ones that are not near to larger ones.

    What is near depends on how many sets the part has: these are `mine`.
    """
    apart, found = len(mine) // _APART, list[int]()
    for index in over[np.argsort(-memory[over], kind="stable")].tolist():
        if all(abs(index - other) > apart for other in found):
            found.append(index)
            if len(found) == _MANY:
                break
    return found
