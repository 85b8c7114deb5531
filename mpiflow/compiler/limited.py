"""The cheapest choice of each variable under a memory limit: Lagrangian relaxation, then HiGHS.

Where the cheapest of all fits, that is it. Otherwise memory gets a price (`prices.py`), so that
`minimise` still solves the problem; at the prices of the best lower bound, several assignments are
equally cheap, some too large and some smaller than they need be. The choices seen on the way there
are few, and HiGHS finds the best mixture that fits, one part after another. Small problems, those
that `minimise` cannot prove, and those where a wide gap is left, go to HiGHS as a whole. Work is
limited in steps and nodes, never by the clock, so that the same problem always has the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiflow.compiler import highs
from mpiflow.compiler.assignments import (
    EXACT,
    FORBIDDEN,
    Limited,
    Listed,
    Live,
    Problem,
    Seen,
    among,
)
from mpiflow.compiler.bounds import Table
from mpiflow.compiler.elimination import Indices, Pairs, Solution
from mpiflow.compiler.highs import Scope
from mpiflow.compiler.prices import Mixture, minimise_priced, search
from mpiflow.errors import CompileError

_SMALL, _LARGE = 2_000, 500_000
"""Entries of all tables of a problem that HiGHS solves as a whole, and at most if it has to."""
_NODES, _NODES_OF_PART = 500, 40
"""Nodes that HiGHS visits at most, and for one of several parts."""
_NEAR = 1e-3
"""The share of the sum at which the search among few choices ends."""
_WEAK = 1e-2
"""The gap from which HiGHS takes a problem as a whole, if it is not too large."""
_ROUNDS = 3
"""How often the parts are gone through, since one may take memory of another."""
_TIGHTER = (0.0, 1e-6, 1e-4)
"""Shares by which the limit is lowered while HiGHS exceeds it within its tolerance."""


class NotFound(CompileError):
    """The work that is allowed does not tell whether anything fits."""

    def __init__(self, limit: float) -> None:
        super().__init__(
            f"no layouts were found that fit {limit:,.0f} bytes, though there may be some; raise"
            " the limit, or give hints"
        )


def minimise_within(
    costs: Sequence[Table],
    pairs: Pairs,
    memory: Sequence[Table],
    live: Live | Sequence[Sequence[int]],
    limit: float,
    scopes: Sequence[Scope] | None = None,
) -> Limited:
    """The cheapest choices where the memory of the members of each live set is `limit` at most.

    A member is a table of `memory`, in bytes and not negative: that of the variable of its number,
    or by the choices of the one or two variables (a < b, which are a pair) that `scopes` names.
    Costs, and the tables of pairs (a < b), may be infinite: these are never chosen. Raises
    DoesNotFit where nothing fits, and CompileError where nothing avoids infinite costs, or where
    neither is found out with the work that is allowed.
    """
    problem = Problem(
        [np.asarray(c, np.float64) for c in costs],
        {pair: np.asarray(pairs[pair], np.float64) for pair in sorted(pairs)},
        [np.asarray(m, np.float64) for m in memory],
        [(v,) for v in range(len(memory))] if scopes is None else scopes,
        Listed(live, len(memory)) if isinstance(live, Sequence) else live,
        float(limit),
    )
    problem.check_each_set()
    free = minimise_priced(problem, np.zeros(len(live)))
    if free is not None and free.total == np.inf:
        raise CompileError(FORBIDDEN)
    seen = Seen(problem)
    if free is not None and seen.add(free.choice, free.lower) and _is_proven(free):
        return seen.limited(0)
    if free is None or not _may_go_on(problem, free) or problem.entries <= _SMALL:
        return _solve_whole(problem, seen)
    mixtures = search(problem, seen, lambda found: _may_go_on(problem, found))
    if mixtures:
        _mix_parts(problem, seen, mixtures)
    best = seen.best()
    if best is None or (best.gap > _WEAK and problem.entries <= _LARGE):
        return _solve_whole(problem, seen)
    return best


def _may_go_on(problem: Problem, solution: Solution) -> bool:
    """Whether prices are worth a search: what is not proven is left to HiGHS where it can be."""
    return _is_proven(solution) or problem.entries > _LARGE


def _is_proven(solution: Solution) -> bool:
    return solution.lower >= solution.total


def _mix_parts(problem: Problem, seen: Seen, mixtures: list[Mixture]) -> None:
    """Add the best mixture of the choices that were seen: of several parts, one after another.

    Of each part the choices are those that its last mixture has; if they do not do, all that were
    seen. Other parts keep what they have meanwhile.
    """
    count, sets, parts = problem.parts
    choices = np.array(seen.choices, np.intp)
    every = [np.unique(column) for column in choices.T]
    if count == 1:
        _solve(problem, seen, every, _NEAR, [0])
        return
    few = [np.unique(choices[mixtures[part].used, v]) for v, part in enumerate(parts.tolist())]
    now = tuple(int(choices[mixtures[part].used[0], v]) for v, part in enumerate(parts.tolist()))
    mixed = [part for part in range(count) if len(mixtures[part].used) > 1]
    for kept in (few, every):
        for _ in range(_ROUNDS):
            over = sets[problem.memory_of(now) > problem.limit]
            for part in sorted({*mixed, *over.tolist()}):
                mine = [k if parts[v] == part else np.array([now[v]]) for v, k in enumerate(kept)]
                now = _solve(problem, seen, mine, _NEAR, [part])[0] or now
            best = seen.best()
            if best is not None:
                break
        if best is not None:
            return


def _solve_whole(problem: Problem, seen: Seen) -> Limited:
    """The best of all choices, or at least one that fits; raises DoesNotFit where none does."""
    if problem.entries > _LARGE:
        raise NotFound(problem.limit)
    everything = [np.arange(len(c)) for c in problem.costs]
    parts = range(problem.parts[0])
    seen.lower = max(seen.lower, _solve(problem, seen, everything, EXACT, parts)[1])
    best = seen.best()
    if best is not None:
        return best
    every = among(problem, everything)
    limits = every.limits(range(len(problem.live)))
    least = highs.least_limit(every.costs, every.pairs, limits, nodes=_NODES)
    if least.lower == np.inf:
        raise CompileError(FORBIDDEN)
    limit, choice = problem.limit, least.choice and every.choice(least.choice)
    if choice is not None and seen.add(choice):
        return seen.limited(-1)
    if choice is None or least.lower <= limit * (1 + EXACT):
        raise NotFound(limit)
    raise problem.does_not_fit(problem.memory_of(choice), least.lower)


def _solve(
    problem: Problem, seen: Seen, kept: list[Indices], gap: float, parts: Sequence[int]
) -> tuple[tuple[int, ...] | None, float]:
    """Let HiGHS choose, and add what it finds: the last of that, and the bound that is proven.

    It is told of the live sets of some parts that were exceeded until it exceeds no other there;
    `kept` says among which choices it chooses.
    """
    few, (_, sets, _) = among(problem, kept), problem.parts
    mine, choice, lower = np.isin(sets, parts), None, -np.inf
    nodes = _NODES if len(parts) == problem.parts[0] else _NODES_OF_PART
    if not few.open:
        choice = few.choice(())
        seen.add(choice)
        return choice, few.fixed
    for share in _TIGHTER:
        told = -1
        while told < len(seen.exceeded):
            told = len(seen.exceeded)
            limits = few.limits([i for i in sorted(seen.exceeded) if mine[i]], 1 - share)
            answer = highs.solve(
                few.costs, few.pairs, limits, near=seen.magnitude(), gap=gap, nodes=nodes
            )
            lower = lower if share else answer.lower + few.fixed
            if answer.choice is None:
                return choice, lower
            choice = few.choice(answer.choice)
            if seen.add(choice) or not (seen.memory[-1][mine] > problem.limit).any():
                return choice, lower
    return choice, lower
