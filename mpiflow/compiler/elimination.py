"""Exact min-sum by variable elimination (bucket elimination, Dechter 1999).

Given choices with a cost each, and pairs of choices with a table of costs, find the assignment
with the smallest sum. The cost is exponential only in the width of the graph, and training
graphs are ladders of small width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import CompileError

Table = NDArray[np.float64]
_LIMIT = 3e8


@dataclass(frozen=True, slots=True)
class _Factor:
    scope: tuple[int, ...]
    table: Table


def minimise(
    unary: list[Table], pairs: dict[tuple[int, int], Table]
) -> tuple[tuple[int, ...], float]:
    """The best choice for each variable, and the sum; ties go to the earlier choice."""
    factors = [_Factor((i,), np.asarray(costs, np.float64)) for i, costs in enumerate(unary)]
    factors += [_Factor(scope, np.asarray(t, np.float64)) for scope, t in sorted(pairs.items())]
    sizes = [len(costs) for costs in unary]
    remaining = set(range(len(unary)))
    eliminated: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    while remaining:
        variable = _cheapest(remaining, factors, sizes)
        touching = [f for f in factors if variable in f.scope]
        neighbours = tuple(sorted({v for f in touching for v in f.scope} - {variable}))
        scope = (*neighbours, variable)
        if float(np.prod([sizes[v] for v in scope], dtype=np.float64)) > _LIMIT:
            raise CompileError("the choice of layouts is too wide; give hints or fewer axes")
        joint = sum((_spread(f, scope) for f in touching), np.zeros((1,) * len(scope)))
        joint = np.broadcast_to(joint, [sizes[v] for v in scope])
        eliminated.append((variable, neighbours, joint.argmin(-1)))
        factors = [f for f in factors if variable not in f.scope]
        factors.append(_Factor(neighbours, joint.min(-1)))
        remaining.remove(variable)
    choice: dict[int, int] = {}
    for variable, neighbours, best in reversed(eliminated):
        choice[variable] = int(best[tuple(choice[v] for v in neighbours)])
    total = float(sum(float(f.table) for f in factors))
    return tuple(choice[i] for i in range(len(unary))), total


def _cheapest(remaining: set[int], factors: list[_Factor], sizes: list[int]) -> int:
    """The variable whose elimination makes the smallest table; ties by position."""
    around: dict[int, set[int]] = {v: {v} for v in remaining}
    for factor in factors:
        for v in factor.scope:
            around[v].update(factor.scope)
    return min(sorted(remaining), key=lambda v: np.prod([sizes[n] for n in around[v]], dtype=float))


def _spread(factor: _Factor, scope: tuple[int, ...]) -> Table:
    """The factor's table with the dims of `scope`, ones where it does not depend on one."""
    order = sorted(range(len(factor.scope)), key=lambda i: scope.index(factor.scope[i]))
    table = factor.table.transpose(order)
    present = {factor.scope[i] for i in order}
    shape = iter(table.shape)
    return table.reshape([next(shape) if v in present else 1 for v in scope])
