"""The problem of layouts as it was not posed: with a choice that is forced, or without a hint."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from mpiflow.compiler.domains import Choice, Domains
from mpiflow.compiler.elimination import Solution, minimise
from mpiflow.compiler.fit import Limit, cheapest_within
from mpiflow.compiler.signature import Problem, pose
from mpiflow.graph.graph import Variable
from mpiflow.graph.tensor import Tensor


def forced(problem: Problem, index: int, choice: int, limit: Limit | None = None) -> Solution:
    """The best solution in which a domain has one choice; its total may be infinite.

    Under a memory `limit`, of those that keep it; CompileError where none does.
    """
    unary = list(problem.unary)
    unary[index] = np.full_like(unary[index], inf)
    unary[index][choice] = problem.unary[index][choice]
    if limit is None:
        return minimise(unary, problem.pairs)
    held = limit.budget(problem)
    return cheapest_within(replace(problem, unary=unary), held, limit.nbytes)


def without_hint(problem: Problem, tensor: Tensor) -> Problem:
    """The problem as if nothing had been asked for a variable, or for what a node makes.

    What the hint asks for is among the choices, and the order of those that it leaves alone is the
    same.
    """
    return pose(_Freed(problem.choices, tensor), problem.machine)


class _Freed(Domains):
    """The choices without the hint on a tensor; what it asks for is still among them.

    What the optimizer keeps for a variable has the hint from it, and loses it too.
    """

    def __init__(self, given: Domains, tensor: Tensor) -> None:
        graph, self.given = given.graph, given
        hint = graph.variables[tensor.name].hint if tensor.name in graph.variables else None
        variables = {
            name: replace(v, hint=None)
            if v.hint is not None
            and v.hint is hint
            and (name == tensor.name or name.startswith(f"{tensor.name}."))
            else v
            for name, v in graph.variables.items()
        }
        hints = {name: hint for name, hint in graph.hints.items() if name != tensor.name}
        free = replace(graph, variables=variables, hints=hints)
        super().__init__(
            free, given.mesh, given.fixed, given.timing, given.split, given.free
        )  # fmt: skip
        self.hinted = given.hinted

    def of_variable(self, variable: Variable) -> list[Choice]:
        """How a variable may be stored, with and without its hint."""
        found, before = super().of_variable(variable), self.given.graph.variables[variable.name]
        if before is not variable:
            found += [choice for choice in self.given.of_variable(before) if choice not in found]
        return found
