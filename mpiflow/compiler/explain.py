"""Why something has its layout: what else it could have had, and what that would cost.

All prices are the solver's. The kernels and conversions of a candidate are entries of the tables
of `signature.Problem`, and its total is that of the same problem, solved without the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import ceil, floor, inf, prod
from pathlib import Path

import numpy as np

from mpiflow.compiler.arrange import relative_line
from mpiflow.compiler.bounds import Table
from mpiflow.compiler.boxing import local_shape, path
from mpiflow.compiler.build import Builder
from mpiflow.compiler.domains import DATA, Choice
from mpiflow.compiler.explanation import NOT_HINTED, Candidate, Conversion, Explanation, Step
from mpiflow.compiler.fit import TooLarge
from mpiflow.compiler.signature import Edge, Placed, Problem
from mpiflow.compiler.whatif import forced, without_hint
from mpiflow.errors import CompileError, UsageError
from mpiflow.graph.graph import Hint
from mpiflow.graph.sbp import B, Layout, Partial, S
from mpiflow.graph.tensor import Tensor, is_narrow
from mpiflow.plan.records import Register
from mpiflow.plan.slice import itemsize
from mpiflow.plan.text import size_text
from mpiflow.plan.traffic import firing_bytes

SOLVED = 16
"""Candidates whose total is found, those of the least seconds with what the others have chosen."""
_NEAREST = 8
"""Names that are told where one is not found."""


def explain(
    placed: Mapping[str, Placed], name: str, folder: Path, solved: int = SOLVED
) -> Explanation:
    """Explain a node, tensor or variable of the training program, or of another: `evaluate:NAME`.

    `placed` has the programs' graphs by name; `solved` bounds the totals that are found. Lines are
    named relative to `folder`. UsageError where there is no such name.
    """
    program, _, rest = name.partition(":")
    if program not in placed or not rest:
        program, rest = "train", name
    known = _names(placed[program].problem)
    index = _find(known, rest)
    if index is None:
        others = [f"{other}:NAME" for other in placed if other != program]
        more = f"; what other programs have is {', '.join(others)}" if others else ""
        raise UsageError(
            f"--explain {name}: program {program} has no node, tensor or variable of that name;"
            f" {_nearest(known, rest)}. `--after signatures` shows all{more}"
        )
    return _Explainer(placed[program], program, index, folder).explanation(solved)


def _names(problem: Problem) -> dict[str, int]:
    """The domain of every tensor, node, field and output; of two of a name, the first of these."""
    graph, position = problem.graph, problem.position
    names = {tensor.name: index for tensor, (index, _) in position.items()}
    names = {node.name: problem.first + i for i, node in enumerate(problem.nodes)} | names
    names = {field: position[tensor][0] for field, tensor in graph.inputs.items()} | names
    return {name: position[tensor][0] for name, tensor in graph.outputs.items()} | names


def _find(known: dict[str, int], name: str) -> int | None:
    """The domain of a name; what a plan has of x as `x>B`, converted, or `x@1`, early, is x's."""
    made = name.partition(">")[0]
    for candidate in (name, made, made.partition("@")[0]):
        if candidate in known:
            return known[candidate]
    return None


def _nearest(known: dict[str, int], name: str) -> str:
    near = [other for other in known if other.startswith((f"{name}/", f"{name}."))]
    near += [x for x in get_close_matches(name, known, 5, 0.5) if x not in near]
    if not near:
        return "none has a name like it"
    more = f" and {len(near) - _NEAREST} more" if len(near) > _NEAREST else ""
    return f"the nearest are {', '.join(near[:_NEAREST])}{more}"


class _Explainer:
    """One domain of a problem that was solved; without the hint on it, if there is one."""

    def __init__(self, placed: Placed, program: str, index: int, folder: Path) -> None:
        self.placed, self.program, self.index, self.folder = placed, program, index, folder
        self.given = placed.problem
        self.graph, self.mesh = self.given.graph, self.given.choices.mesh
        self.tensors = [t for t, (i, _) in self.given.position.items() if i == index]
        first = self.given.first
        self.node = self.given.nodes[index - first] if index >= first else None
        self.inputs = self.node.inputs if self.node else ()
        self.variable = None if self.node else self.graph.variables.get(self.tensors[0].name)
        self.picked = [
            domain[i] for domain, i in zip(self.given.domains, placed.choice, strict=True)
        ]
        self.hint, self.hint_line = self._hint()
        self.problem = self.given
        if self.hint is not None and (self.node or self.variable):
            self.problem = without_hint(self.given, self.tensors[0])

    def explanation(self, solved: int) -> Explanation:
        """All that there is to say."""
        candidates, left_out = self._candidates(solved)
        maker = self.given.position
        tensors = [*self.node.inputs, *self.node.outputs] if self.node else self.tensors
        return Explanation(
            program=self.program,
            kind="node" if self.node else "variable" if self.variable else "input",
            name=self.node.name if self.node else self.tensors[0].name,
            op=self.node.op.name if self.node else "",
            where=relative_line(self.tensors[0].where, self.folder),
            tensors=tuple(str(tensor) for tensor in tensors),
            axes=self.mesh.names,
            total=self.placed.seconds,
            lower=self.placed.lower,
            candidates=candidates,
            left_out=left_out,
            takes=tuple(self._conversion(e) for e in self.given.edges if e.reader == self.index),
            gives=tuple(
                self._conversion(e) for e in self.given.edges if maker[e.tensor][0] == self.index
            ),
            notes=tuple(self._notes()),
        )

    # -- candidates -------------------------------------------------------------------------------

    def _candidates(self, solved: int) -> tuple[tuple[Candidate, ...], int]:
        """Those that are solved, best first, and how many are not."""
        domain, kernels = self.problem.domains[self.index], self.problem.kernels[self.index]
        conversions = self._conversion_seconds()
        unique = list({choice: i for i, choice in reversed(list(enumerate(domain)))}.values())
        chosen = domain.index(self.picked[self.index])
        nearest = sorted(unique, key=lambda i: (i != chosen, kernels[i] + conversions[i], i))
        found = []
        for i in nearest[:solved]:
            total, remark = (self.placed.seconds, "") if i == chosen else self._total(i)
            found.append(
                Candidate(
                    domain[i], float(kernels[i]), float(conversions[i]), self._kept(domain[i]),
                    total, i == chosen, remark or self._refusal(domain[i]),
                )
            )  # fmt: skip
        found.sort(key=lambda c: (_about(c.total), not c.chosen, c.kernels + c.conversions))
        return tuple(found), len(unique) - len(found)

    def _conversion_seconds(self) -> Table:
        """Of each candidate, the seconds of conversions to what the others have chosen."""
        problem, index = self.problem, self.index
        picked = [
            domain.index(choice)
            for domain, choice in zip(problem.domains, self.picked, strict=True)
        ]  # fmt: skip
        seconds = problem.unary[index] - problem.kernels[index]
        for (a, b), table in problem.pairs.items():
            if a == index:
                seconds = seconds + table[:, picked[b]]
            elif b == index:
                seconds = seconds + table[picked[a]]
        return np.maximum(seconds, 0.0)  # what is left of a kernel's last bits is no conversion

    def _total(self, choice: int) -> tuple[float | None, str]:
        """What the whole program takes with a candidate, and why it cannot have it."""
        stuck = self._stuck(choice)
        if stuck:
            return inf, stuck
        try:
            total = forced(self.problem, self.index, choice, self.placed.limit).total
        except TooLarge as error:
            return inf, f"does not fit: layouts hold {size_text(ceil(error.least))} then"
        except CompileError as error:
            return None, f"not solved: {error}"
        return total, "" if total < inf else self._impossible(
            self.problem.domains[self.index][choice]
        )

    def _impossible(self, choice: Choice) -> str:
        """Why no choices of all others go with a candidate."""
        pairs = zip((*self.inputs, *self.tensors), (*choice.inputs, *choice.outputs), strict=True)
        if any(
            is_narrow(t.dtype) and any(isinstance(x, Partial) for x in layout)
            for t, layout in pairs
        ):
            return "parts in 16 bits are not added up, as each sum would be rounded"
        return "nothing that the others can have goes with it"

    def _stuck(self, choice: int) -> str:
        """Why no choice of a neighbour goes with a candidate, if that is so."""
        for (a, b), table in self.problem.pairs.items():
            if self.index in (a, b):
                row = table[choice] if a == self.index else table[:, choice]
                if np.isinf(row).all():
                    other = b if a == self.index else a
                    return f"no conversion to or from what {self._name(other)} can have"
        if np.isinf(self.problem.unary[self.index][choice]):
            return "no conversion gives all of it to every rank"
        return ""

    def _refusal(self, choice: Choice) -> str:
        allowed = self.problem is self.given or choice in self.given.domains[self.index]
        return "" if allowed else NOT_HINTED

    def _kept(self, choice: Choice) -> int:
        """Bytes of a rank's outputs; what is updated in place is the variable's."""
        kept = 0
        for tensor, layout in zip(self.tensors, choice.outputs, strict=True):
            if not self._is_in_place(tensor, layout):
                elements = prod(local_shape(tensor.shape, layout, self.mesh))
                kept += elements * itemsize(tensor.dtype)
        return kept

    def _is_in_place(self, tensor: Tensor, layout: Layout) -> bool:
        position = self.given.position
        return any(
            value is tensor
            and self.picked[position[self.graph.variables[name].tensor][0]].outputs[0] == layout
            for name, value in self.graph.assigns.items()
        )

    # -- conversions ------------------------------------------------------------------------------

    def _conversion(self, edge: Edge) -> Conversion:
        """How the chosen layouts at both ends of an edge meet."""
        maker, output = self.given.position[edge.tensor]
        source = self.picked[maker].outputs[output]
        target: Layout = (B,) * len(self.mesh.axes)
        if edge.reader is not None:
            reader = self.picked[edge.reader]
            target = reader.outputs[0] if edge.operand is None else reader.inputs[edge.operand]
        return Conversion(
            tensor=edge.tensor.name,
            maker=self._name(maker),
            reader="every rank" if edge.reader is None else self._name(edge.reader),
            source=source,
            target=target,
            share=edge.share,
            steps=self._steps(edge.tensor, source, target),
        )

    def _steps(self, tensor: Tensor, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The tasks that lowering makes of a conversion, with the seconds of the hops they do."""
        build = Builder(self.mesh, self.given.machine, loop=1, loops=1)
        held = Register(tensor.name, tensor.shape, tensor.dtype, source, 0, 0)
        build.convert(held, target, tensor.where)
        hops = path(source, target, tensor.shape, tensor.dtype, self.mesh, self.given.machine)
        tensors = {held.name: held, **build.registers}
        steps = []
        for hop, task in zip(hops, build.tasks, strict=True):
            sent = firing_bytes(task, tensors, self.mesh) if task.kind == "collective" else 0
            steps.append(Step(task.op, task.axis, sent * hop.times, hop.seconds * hop.times))
        return tuple(steps)

    def _name(self, domain: int) -> str:
        """The node or source of a domain."""
        if domain >= self.given.first:
            return self.given.nodes[domain - self.given.first].name
        return next(t.name for t, (i, _) in self.given.position.items() if i == domain)

    # -- what limits the candidates ---------------------------------------------------------------

    def _hint(self) -> tuple[Hint | None, str]:
        """The hint on what is explained, and its line."""
        if self.variable:
            hint, line = self.variable.hint, self.variable.tensor.where
        else:
            name = self.tensors[0].name
            hint, line = self.graph.hints.get(name), self.graph.hint_lines.get(name, "")
        return hint, relative_line(line, self.folder)

    def _notes(self) -> list[str]:
        choices, notes = self.given.choices, []
        if self.hint is not None:
            count = len(set(self.given.domains[self.index]))
            notes.append(
                f"the hint {self.hint} at {self.hint_line} leaves {count}"
                f" candidate{'s' * (count != 1)}"
            )
        if self.variable and choices.fixed is not None:
            notes.append("variables have the layouts that training gives them")
        elif self.variable and self.variable.name in choices.split:
            notes.append("--zero splits it over axis data")
        elif self.variable and self.hint is None and not self._splits_over_data(any_dim=True):
            notes.append(
                "over axis data a variable is whole, unless --zero, a hint or a limit splits it"
            )
        if len(self.tensors) > 1 and not self.node:
            names = ", ".join(tensor.name for tensor in self.tensors)
            notes.append(f"read together, so split alike: {names}")
        if self.mesh.timed:
            notes.append("what a step does in micro-batches is settled before layouts are chosen")
        if self.node and not self._splits_over_data(any_dim=False):
            notes.append(
                "over axis data only the first dim is split, unless a hint names that axis"
            )
        if self.placed.limit:
            limit = size_text(floor(self.placed.limit.nbytes))
            notes.append(f"layouts were chosen to hold {limit} at most on a rank")
        return notes

    def _splits_over_data(self, *, any_dim: bool) -> bool:
        """Whether a candidate is split over the axis `data`, by any dim or another than the first.

        True as well where that axis, or another dim, is not there.
        """
        if dict(self.mesh.axes).get(DATA, 1) == 1 or all(
            t.ndim <= (not any_dim) for t in self.tensors
        ):
            return True
        axis = self.mesh.index(DATA)
        return any(
            isinstance(layout[axis], S) and (any_dim or layout[axis] != S(0))
            for choice in self.problem.domains[self.index]
            for layout in choice.outputs
        )


def _about(total: float | None) -> float:
    """A total without its last bits, so that equals stay equal; what is not known comes last."""
    return inf if total is None else float(f"{total:.9e}")
