"""What each choice of a min-sum problem costs at least, whatever is chosen for all others.

Costs are moved between variables and pairs so that no sum changes and the sum of all minima grows;
it is a lower bound of the best sum. How far a choice lies above the minima is its slack: every
assignment that has it costs the bound and the slack, or more. (Sequential reweighted message
passing, Kolmogorov 2015.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiflow.compiler.tables import Pair, Table

_SWEEPS = 30
_ENOUGH = 1e-4
"""The sweeps end with one that raises the bound by a smaller share."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`lower` is a bound of the best sum, `slack` how far above it each choice is, by variable."""

    lower: float
    slack: list[Table]


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """A pair seen from one of its variables: costs by its own choice and the other's.

    `own` and `theirs` are what was moved from the pair to either variable; both ends share them.
    """

    other: int
    table: Table
    own: Table
    theirs: Table


@dataclass(frozen=True, slots=True, eq=False)
class _Variable:
    """The costs of a variable, and the pairs that it has with earlier and with later ones."""

    cost: Table
    earlier: list[_End]
    later: list[_End]

    def pass_on(self, onward: list[_End]) -> None:
        """Collect what all pairs have, and move it on to the pairs of one direction."""
        ends = [*self.earlier, *self.later]
        total = self.cost.copy()
        for end in ends:
            np.min(end.table - end.theirs, axis=1, out=end.own)
            total += end.own
        share = total / max(len(onward), len(ends) - len(onward), 1)
        for end in onward:
            np.subtract(end.own, share, out=end.own)


def bounds(costs: list[Table], pairs: dict[Pair, Table]) -> Bounds:
    """The bounds of variables with a cost by choice, and pairs (a < b) with a table of costs."""
    never = _above_all([*costs, *pairs.values()])
    variables = [_Variable(np.minimum(cost, never), [], []) for cost in costs]
    for (a, b), table in pairs.items():
        table = np.minimum(table, never)
        first, second = (np.zeros(size) for size in table.shape)
        variables[a].later.append(_End(b, table, first, second))
        variables[b].earlier.append(_End(a, np.ascontiguousarray(table.T), second, first))
    lower = -np.inf
    for _ in range(_SWEEPS):
        for variable in variables:
            variable.pass_on(variable.later)
        for variable in reversed(variables):
            variable.pass_on(variable.earlier)
        found = _found(variables)
        if found.lower - lower <= _ENOUGH * abs(found.lower):
            break
        lower = found.lower
    return found


def _found(variables: list[_Variable]) -> Bounds:
    """The sum of the minima, and what choices cost above them in their variable and its pairs."""
    left = [sum((end.own for end in (*v.earlier, *v.later)), v.cost) for v in variables]
    lower = sum(float(cost.min()) for cost in left)
    slack = [cost - cost.min() for cost in left]
    for index, variable in enumerate(variables):
        for end in variable.later:
            table = end.table - end.own[:, None] - end.theirs
            least = float(table.min())
            lower += least
            slack[index] += table.min(1) - least
            slack[end.other] += table.min(0) - least
    return Bounds(lower, slack)


def _above_all(tables: list[Table]) -> float:
    """A number to stand for infinity: more than any sum of finite costs."""
    return 1.0 + sum(float(t[np.isfinite(t)].max(initial=0.0)) for t in tables)
