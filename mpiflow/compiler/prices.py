"""Prices of memory, at which the cheapest assignments tell how few seconds any that fits takes.

The prices are found by cutting planes (Kelley 1960), those of each part by itself: of what was seen
of a part, a mixture is made that fits, and the multipliers of the best one are the next prices. The
bound is that of whole assignments, so it holds whatever the parts have to do with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpiflow.compiler import highs
from mpiflow.compiler.assignments import EXACT, Problem, Seen
from mpiflow.compiler.bounds import Table
from mpiflow.compiler.elimination import Indices, Solution, minimise
from mpiflow.errors import CompileError

_STEPS = 24
"""Assignments that a search makes at most."""
_CLOSE = 1e-3
"""The share of the sum at which a search ends."""
_DEAREST = 1e6
"""The factor by which the highest price may grow until the limit is taken to be impossible."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The prices that the assignments seen of a part suggest, and what they cost when mixed.

    `enough` is false where the mixture takes more memory than there is, at the highest price.
    `used` are the numbers of the assignments in it.
    """

    prices: Table
    cost: float
    enough: bool
    used: Indices


def search(problem: Problem, seen: Seen, may_go_on: Callable[[Solution], bool]) -> list[Mixture]:
    """Find assignments at prices that raise the bound; the last mixture of each part.

    Empty where one is not proven to be the cheapest at its prices, so that the bound is weak.
    """
    first = highest = seen.magnitude()
    count, _, _ = problem.parts
    for _ in range(_STEPS):
        mixtures = [mix(seen, part, highest) for part in range(count)]
        prices = sum((m.prices for m in mixtures), np.zeros(len(problem.live)))
        found = minimise_priced(problem, prices)
        if found is None or not may_go_on(found):
            return []
        lower = found.lower - float(prices.sum()) * problem.limit
        seen.add(found.choice, lower)
        above = sum(m.cost for m in mixtures)
        if above - lower <= _CLOSE * abs(above):
            if all(m.enough for m in mixtures) or highest >= _DEAREST * first:
                break
            highest *= 8
    return [mix(seen, part, highest) for part in range(count)]


def mix(seen: Seen, part: int, highest: float) -> Mixture:
    """The cheapest mixture of what was seen of a part that fits.

    It may have more memory, at the highest price for as much as the limit; if it does so, that
    price is too low.
    """
    problem = seen.problem
    costs, scale = np.array([each[part] for each in seen.costs]), problem.limit or 1.0
    cost = float(np.abs(costs).max()) or 1.0
    _, parts, _ = problem.parts
    exceeded = [index for index in sorted(seen.exceeded) if parts[index] == part]
    prices = np.zeros(len(problem.live))
    if not exceeded:
        best = int(costs.argmin())
        return Mixture(prices, float(costs[best]), True, np.array([best]))
    excess = (np.array([m[exceeded] for m in seen.memory]).T - problem.limit) / scale
    found = highs.scipy_optimize().linprog(
        np.append(costs, highest) / cost,
        A_ub=np.hstack([excess, np.full((len(exceeded), 1), -1.0)]),
        b_ub=np.zeros(len(exceeded)),
        A_eq=[[1.0] * len(costs) + [0.0]],
        b_eq=[1.0],
        method="highs-ds",
    )
    prices[exceeded] = np.maximum(-found.ineqlin.marginals, 0.0) * (cost / scale)
    used = np.flatnonzero(found.x[:-1] > EXACT)
    return Mixture(prices, float(found.fun) * cost, bool(found.x[-1] <= EXACT), used)


def minimise_priced(problem: Problem, prices: Table) -> Solution | None:
    """The cheapest choices when the memory of each live set has a price, whatever its amount.

    None if too many are about equally cheap.
    """
    costs, pairs = list(problem.costs), dict(problem.pairs)
    price = np.zeros(len(problem.memory))
    for index in np.flatnonzero(prices).tolist():
        price[problem.live.members(index)] += prices[index]
    for member in np.flatnonzero(price).tolist():
        scope, priced = problem.scopes[member], price[member] * problem.memory[member]
        if len(scope) == 1:
            costs[scope[0]] = costs[scope[0]] + priced
        else:
            a, b = scope
            pairs[a, b] = pairs[a, b] + priced
    try:
        return minimise(costs, pairs, problem.known)
    except CompileError:
        return None  # HiGHS takes the problem as a whole
