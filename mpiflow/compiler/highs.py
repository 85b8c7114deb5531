"""Min-sum problems with memory limits as mixed integer programs, which SciPy's HiGHS solves.

A column for each choice of a variable, and one for each pair of choices that is allowed. Equal
marginals, the pairs of a choice add up to that choice, keep the linear relaxation tight, so that
many programs end at the root. Only the choices need to be integers: the pairs then are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.compiler.bounds import Table
from mpiflow.errors import CompileError

Indices = NDArray[np.intp]
Pairs = dict[tuple[int, int], Table]
Scope = tuple[int, ...]
"""The variables, one or two, by whose choices a table is."""
_SCALE = 1e3
"""What the sum and the limit are scaled to, since the tolerances of HiGHS, 1e-6, are absolute."""
_INFEASIBLE, _UNBOUNDED = 2, 3


@dataclass(frozen=True, slots=True)
class Limits:
    """For each of the `live` sets, the memory of its members adds up to `limit` at most.

    A member has the number of a table of `memory`, by the choices of the variables of its scope.
    """

    memory: Sequence[Table]
    live: Sequence[Indices]
    limit: float
    scopes: Sequence[Scope]


@dataclass(frozen=True, slots=True)
class Answer:
    """The best choices that were found, None without any; no allowed assignment is below `lower`.

    `lower` is infinite where it is proven that there is none.
    """

    choice: tuple[int, ...] | None
    lower: float


def solve(
    costs: Sequence[Table], pairs: Pairs, limits: Limits, *, near: float, gap: float, nodes: int
) -> Answer:
    """The best assignment that keeps the limits, to the relative `gap`, within `nodes` nodes.

    `near` says about how large the sum will be. Infinite costs and pairs are never taken.
    """
    program = _Program(costs, pairs)
    program.limit(limits)
    return program.solve(_SCALE / abs(near) if near else 1.0, gap, nodes)


def least_limit(costs: Sequence[Table], pairs: Pairs, limits: Limits, *, nodes: int) -> Answer:
    """An assignment of little memory; as `lower`, a limit that none is below.

    The two meet unless `nodes` nodes are too few.
    """
    zero = [np.where(np.isfinite(cost), 0.0, np.inf) for cost in costs]
    program = _Program(zero, {p: np.where(np.isfinite(t), 0.0, np.inf) for p, t in pairs.items()})
    program.limit(limits, excess=program.column(1.0))
    found = program.solve(1.0, 0.0, nodes)
    return Answer(found.choice, limits.limit + max(found.lower, 0.0) / _limit_scale(limits))


def scipy_optimize() -> Any:
    """SciPy's module of solvers, which nothing needs that plans without a memory limit."""
    try:
        import scipy.optimize
    except ImportError as error:
        raise CompileError(
            "the layouts do not fit the memory limit when each is the fastest, and finding others"
            " needs SciPy, which is not installed\n  pip install scipy, or plan without a limit"
        ) from error
    return scipy.optimize


def _limit_scale(limits: Limits) -> float:
    return _SCALE / limits.limit if limits.limit > 0 else 1.0


@dataclass(slots=True)
class _Rows:
    """The entries of a sparse matrix by row, and between which bounds its rows are."""

    row: list[Indices] = field(default_factory=list)
    column: list[Indices] = field(default_factory=list)
    value: list[Table] = field(default_factory=list)
    lower: list[Table] = field(default_factory=list)
    upper: list[Table] = field(default_factory=list)
    count: int = 0

    def put(self, row: Indices, column: Indices, value: Table) -> None:
        """Put entries in rows that are counted from the first that is not finished."""
        self.row.append(row + self.count)
        self.column.append(column)
        self.value.append(value)

    def finish(self, count: int, lower: float, upper: float) -> None:
        """Finish the next rows."""
        self.lower.append(np.full(count, lower))
        self.upper.append(np.full(count, upper))
        self.count += count


class _Program:
    """The columns and rows of one program: choices first, then pairs of choices."""

    def __init__(self, costs: Sequence[Table], pairs: Pairs) -> None:
        self.first = np.concatenate([[0], np.cumsum([len(cost) for cost in costs])])
        self.objective = [np.where(np.isfinite(cost), cost, 0.0) for cost in costs]
        self.most = [np.where(np.isfinite(cost), 1.0, 0.0) for cost in costs]
        self.columns = int(self.first[-1])
        self.paired: dict[Scope, tuple[tuple[Indices, ...], Indices]] = {}
        self.rows = _Rows()
        for variable in range(len(costs)):
            columns = self._choices(variable)
            self.rows.put(np.zeros_like(columns), columns, np.ones(len(columns)))
            self.rows.finish(1, 1.0, 1.0)
        for (a, b), table in pairs.items():
            self._pair(a, b, table)

    def _choices(self, variable: int) -> Indices:
        """The columns of a variable's choices."""
        return np.arange(self.first[variable], self.first[variable + 1])

    def column(self, cost: float) -> int:
        """A further column, which is not negative."""
        self.objective.append(np.array([cost]))
        self.most.append(np.array([np.inf]))
        self.columns += 1
        return self.columns - 1

    def _pair(self, a: int, b: int, table: Table) -> None:
        """Columns for the pairs that are allowed, and that they add up to either's choices.

        Where one of the two has a single choice, the other's choices are the pairs.
        """
        if 1 in table.shape:
            variable, costs = a if len(table) > 1 else b, table.ravel()
            self.paired[a, b] = (
                np.divmod(np.arange(len(costs)), table.shape[1]),
                self._choices(variable),
            )
            self.objective[variable] = self.objective[variable] + np.where(
                np.isfinite(costs), costs, 0.0
            )
            self.most[variable] = np.where(np.isfinite(costs), self.most[variable], 0.0)
            return
        at = np.nonzero(np.isfinite(table))
        columns = self.columns + np.arange(len(at[0]))
        self.columns += len(columns)
        self.paired[a, b] = at, columns
        self.objective.append(table[at])
        # Choices bound pairs too, but without this the presolve of HiGHS 1.12 may never end.
        self.most.append(np.ones(len(columns)))
        for variable, index in zip((a, b), at, strict=True):
            choices = self._choices(variable)
            self.rows.put(index, columns, np.ones(len(columns)))
            self.rows.put(np.arange(len(choices)), choices, np.full(len(choices), -1.0))
            self.rows.finish(len(choices), 0.0, 0.0)

    def limit(self, limits: Limits, excess: int | None = None) -> None:
        """A row for each live set, which a column may let exceed the limit."""
        scale = _limit_scale(limits)
        for live in limits.live:
            for member in live.tolist():
                scope, memory = limits.scopes[member], limits.memory[member] * scale
                if len(scope) == 1:
                    columns = self._choices(scope[0])
                else:
                    at, columns = self.paired[scope]
                    memory = memory[at]
                self.rows.put(np.zeros_like(columns), columns, memory)
            if excess is not None:
                self.rows.put(np.zeros(1, np.intp), np.array([excess]), np.array([-1.0]))
            self.rows.finish(1, -np.inf, limits.limit * scale)

    def solve(self, scale: float, gap: float, nodes: int) -> Answer:
        """What HiGHS answers when all costs are multiplied by `scale`; the bound is not."""
        optimize = scipy_optimize()
        from scipy.sparse import csr_array

        rows = self.rows
        entries = (np.concatenate(rows.row), np.concatenate(rows.column))
        matrix = csr_array((np.concatenate(rows.value), entries), shape=(rows.count, self.columns))
        found = optimize.milp(
            np.concatenate(self.objective) * scale,
            integrality=np.arange(self.columns) < self.first[-1],
            bounds=optimize.Bounds(0.0, np.concatenate(self.most)),
            constraints=optimize.LinearConstraint(
                matrix, np.concatenate(rows.lower), np.concatenate(rows.upper)
            ),
            options={"mip_rel_gap": gap, "node_limit": nodes},
        )
        return self._answer(found, scale)

    def _answer(self, found: Any, scale: float) -> Answer:
        if found.status == _INFEASIBLE:
            return Answer(None, np.inf)
        if found.status == _UNBOUNDED:
            raise CompileError(f"HiGHS could not choose layouts: {found.message}")
        bound = found.mip_dual_bound
        lower = -np.inf if bound is None or not np.isfinite(bound) else bound / scale
        if found.x is None:
            return Answer(None, lower)
        first = self.first
        choice = tuple(int(found.x[a:b].argmax()) for a, b in pairwise(first))
        return Answer(choice, lower)
