"""What layouts keep in memory, by choice: what a memory limit weighs against their seconds.

Time is counted in nodes, in the order in which they run. At each, a rank holds

    sources     inputs in their read slots, variables and their staging for checkpoints, always
    copies      what a node takes of a source in another layout, while it and its fellows need it
    tensors     from the node that makes them to the last that takes them, as the next one takes
                them: conversions are made as soon as they can be
    workspace   of the node that runs

In a step of micro-batches one turn of the loop stands for all; what its turns share is there
throughout. The arena (`memory.py`) counts more: alignment, gaps, buckets, messages that overlap.

Pipeline stages hold a share each. Their times are put one after another, so that the fullest moment
of all is that of the stage that holds most:

    received    what other stages make, from the first node that takes it to the last
    in flight   what the forward pass leaves for the backward pass of each micro-batch on its way
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiflow.compiler.bounds import Table
from mpiflow.compiler.boxing import local_shape
from mpiflow.compiler.domains import Choice
from mpiflow.compiler.zero import is_backward, of_variables
from mpiflow.graph.graph import Node
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Layout
from mpiflow.graph.tensor import Tensor
from mpiflow.plan.slice import itemsize

if TYPE_CHECKING:
    from mpiflow.compiler.signature import Problem

_SLOTS = 2
"""Of an input: one in use, one being filled."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a pipeline stage has of a graph, and how many micro-batches are in flight there."""

    nodes: frozenset[Node]
    variables: frozenset[Tensor]
    in_flight: float


LASTING = ("variable", "staging", "sum", "of variables")
"""What there is once, however many micro-batches are in flight; see `Held.what`."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a tensor on a rank from node `start` to node `stop`, by the choices of `scope`.

    `layouts` are those that it has then, by choice of the last domain of `scope`.
    """

    tensor: Tensor
    what: str
    scope: tuple[int, ...]
    nbytes: Table
    layouts: tuple[Layout, ...]
    start: int
    stop: int

    def layout(self, choice: Sequence[int]) -> Layout:
        """The layout at a choice of each domain."""
        return self.layouts[choice[self.scope[-1]]]

    def bytes_of(self, choice: Sequence[int]) -> float:
        """The bytes at a choice of each domain."""
        return float(self.nbytes[tuple(choice[domain] for domain in self.scope)])


@dataclass(frozen=True, slots=True)
class Budget:
    """All that is held, and at which of the `nodes`, in order, as much as at no other around it.

    `firsts` are where the nodes of each share begin.
    """

    held: tuple[Held, ...]
    nodes: tuple[Node, ...]
    peaks: tuple[int, ...]
    firsts: tuple[int, ...] = (0,)

    def bytes_at(self, choice: Sequence[int]) -> Table:
        """The bytes of all that is held, one by one."""
        return np.array([held.bytes_of(choice) for held in self.held], np.float64)

    def profile(self, choice: Sequence[int]) -> Table:
        """The bytes that are held at each node."""
        change = np.zeros(len(self.nodes) + 1)
        for held in self.held:
            nbytes = held.bytes_of(choice)
            change[held.start] += nbytes
            change[held.stop + 1] -= nbytes
        return np.cumsum(change[:-1])

    def peak(self, choice: Sequence[int]) -> float:
        """The most bytes that are held at once."""
        return float(self.profile(choice).max(initial=0.0))


def budget(
    problem: Problem, *, scatter: bool = False, again: bool = False, shares: Sequence[Share] = ()
) -> Budget:
    """What the choices of a problem hold. The flags are those of `lower` by the level of ZeRO.

    With `scatter`, gradients are split before micro-batches add them up; with `again`, copies of
    weights are let go after the forward pass, unless there is a loop over micro-batches. `shares`
    are those of pipeline stages; where there are none, a rank holds all.
    """
    whole = _Whole(problem)
    return _in_turn([_Collector(whole, scatter, again, s).budget() for s in shares or (None,)])


def _in_turn(budgets: Sequence[Budget]) -> Budget:
    """Budgets of ranks that hold nothing together, as if their times followed one another."""
    held: list[Held] = []
    nodes: list[Node] = []
    peaks: list[int] = []
    firsts: list[int] = []
    for each in budgets:
        first = len(nodes)
        firsts.append(first)
        held += [replace(h, start=first + h.start, stop=first + h.stop) for h in each.held]
        peaks += [first + peak for peak in each.peaks]
        nodes += each.nodes
    return Budget(tuple(held), tuple(nodes), tuple(peaks), tuple(firsts))


class _Whole:
    """What all shares of a problem have in common: the order of its nodes, and tables of sizes."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.timing = problem, problem.choices.timing
        self.order = self._order()
        self.domain = {n: problem.first + i for i, n in enumerate(problem.nodes)}
        self.kept = {*problem.graph.outputs.values(), *problem.graph.assigns.values()}
        self.lasting = of_variables(problem.graph)
        self.tables: dict[Any, tuple[Table, tuple[Layout, ...]]] = {}

    def _order(self) -> list[Node]:
        """About as they run: what fires once counts before the loop if it can be there, else after.

        What only updates take comes behind it (`lower.in_phases`): no less counts than is held.
        """
        nodes = list(self.problem.nodes)
        if self.timing is None:
            return nodes
        phase: dict[Tensor, int] = {}
        phases: dict[Node, int] = {}
        for node in nodes:
            before = max((phase.get(tensor, 0) for tensor in node.inputs), default=0)
            phases[node] = 1 if self.loops(node) else before + before % 2
            phase.update(dict.fromkeys(node.outputs, phases[node]))
        return sorted(nodes, key=phases.__getitem__)

    def loops(self, node: Node) -> bool:
        """Whether a node fires once for each micro-batch."""
        return self.timing is not None and bool(self.timing.loops[node])


class _Collector:
    def __init__(self, whole: _Whole, scatter: bool, again: bool, share: Share | None) -> None:
        self.problem, self.scatter, self.share = whole.problem, scatter, share
        self.graph, self.mesh = self.problem.graph, self.problem.choices.mesh
        self.timing, self._loops = whole.timing, whole.loops
        self.again = again and self.timing is None
        self.nodes = tuple(n for n in whole.order if share is None or n in share.nodes)
        self.domain, self.kept, self.lasting = whole.domain, whole.kept, whole.lasting
        self.tables = whole.tables
        looping = [at for at, node in enumerate(self.nodes) if self._loops(node)]
        self.loop = (looping[0], looping[-1]) if looping else (0, -1)
        self.turn = next((at for at in looping if is_backward(self.nodes[at])), len(self.nodes))
        self.readers: dict[Tensor, list[tuple[int, int]]] = {}
        for at, node in enumerate(self.nodes):
            for operand, tensor in enumerate(node.inputs):
                found = self.readers.setdefault(tensor, [])
                if not found or found[-1][0] != at:
                    found.append((at, operand))
        self.held: list[Held] = []

    def budget(self) -> Budget:
        last = len(self.nodes) - 1
        if last < 0:
            return Budget((), (), ())
        for tensor in self.graph.inputs.values():
            if tensor in self.readers:
                self._hold(tensor, "read slots", 0, last, times=_SLOTS * self._turns_read())
                self._copies(tensor)
        for tensor in self.readers if self.share else ():
            self._received(tensor)
        for variable in self.graph.variables.values():
            if self.share and variable.tensor not in self.share.variables:
                continue
            self._hold(variable.tensor, "variable", 0, last)
            self._stage(variable.tensor, last)
            self._copies(variable.tensor)
        for at, node in enumerate(self.nodes):
            self._workspace(at, node)
            for index, tensor in enumerate(node.outputs):
                self._made(at, node, index, tensor)
        held = tuple(h for h in self.held if h.start <= h.stop and h.nbytes.any())
        return Budget(held, self.nodes, _peaks(held))

    def _turns_read(self) -> int:
        """Where several loops use what is read, that is all micro-batches."""
        return self.timing.micro_batches if self.timing and self.timing.count > 1 else 1

    def _add(
        self, tensor: Tensor, what: str, scope: tuple[int, ...],
        table: tuple[Table, tuple[Layout, ...]], start: int, stop: int,
    ) -> None:  # fmt: skip
        self.held.append(Held(tensor, what, scope, *table, start, stop))
        first, last = self.loop
        stays = first <= start < self.turn <= stop <= last and what in ("tensor", "received")
        if self.share and self.share.in_flight > 1 and stays:
            nbytes, layouts = table
            others = (self.share.in_flight - 1) * nbytes
            self.held.append(Held(tensor, "in flight", scope, others, layouts, first, last))

    def _hold(self, tensor: Tensor, what: str, start: int, stop: int, times: int = 1) -> None:
        """As it is made."""
        domain, _ = self.problem.position[tensor]
        nbytes, layouts = self._given(tensor)
        self._add(tensor, what, (domain,), (nbytes * times, layouts), start, stop)

    def _stage(self, tensor: Tensor, last: int) -> None:
        """What checkpoints take of a variable: of what several ranks hold, each takes a part."""
        domain, _ = self.problem.position[tensor]
        nbytes, layouts = self._given(tensor)
        sizes = self.mesh.sizes[self.mesh.timed :]
        shared = [
            prod(n for sbp, n in zip(x[self.mesh.timed :], sizes, strict=True) if sbp == B)
            if tensor.shape
            else 1
            for x in layouts
        ]
        self._add(tensor, "staging", (domain,), (np.ceil(nbytes / shared), layouts), 0, last)

    def _copies(self, tensor: Tensor) -> None:
        """What is taken of a source in another layout, from the first that takes it to the last."""
        producer, _ = self.problem.position[tensor]
        _, layouts = self._given(tensor)
        before: dict[bool, int] = {}
        for at, operand in self.readers.get(tensor, ()):
            node = self.nodes[at]
            taken, wanted = self._taken(tensor, node, operand)
            other = np.array([[a != b for b in wanted] for a in layouts])
            group = self.again and is_backward(node)
            start, stop = before.get(group, at - 1) + 1, at
            if self._loops(node) and all(layout[0] == B for layout in wanted):
                start, stop = 0, self.loop[1]
            before[group] = at
            scope = (producer, self.domain[node])
            self._add(tensor, "copy", scope, (other * taken, wanted), start, stop)

    def _made(self, at: int, node: Node, index: int, tensor: Tensor) -> None:
        """A node's output: as it is made, then as each reader in turn takes it."""
        updated = node in self.graph.updates and any(j == index for _, j in node.op.inplace)
        if updated and tensor in self.graph.assigns.values():
            return  # the variable itself
        readers = self.readers.get(tensor, [])
        end = len(self.nodes) - 1 if tensor in self.kept else at
        if tensor in self.lasting:
            self._hold(tensor, "of variables", at, max([end, *(at for at, _ in readers)]))
            self._copies(tensor)
            return
        self._hold(tensor, "tensor", at, end)
        before = at
        for place, operand in readers:
            reader = self.nodes[place]
            stop = place - (place == readers[-1][0] and _takes_over(reader, operand))
            self._taken_later(tensor, node, reader, operand, before + 1, stop)
            before = place

    def _received(self, tensor: Tensor) -> None:
        """What another stage makes, as it is made there; of sums, the whole."""
        if tensor.node is None or tensor.node in self.share.nodes:  # type: ignore[union-attr]
            return
        places = [at for at, _ in self.readers[tensor]]
        whole = self._loops(tensor.node) and not self._loops(self.nodes[places[0]])
        domain, _ = self.problem.position[tensor]
        given = self._given(tensor, whole)
        self._add(tensor, "received", (domain,), given, places[0], places[-1])

    def _taken_later(
        self, tensor: Tensor, maker: Node, reader: Node, operand: int, start: int, stop: int
    ) -> None:
        """What a reader takes of a tensor; of one made in turns, the whole is there throughout."""
        taken = self._taken(tensor, reader, operand)
        if self._loops(maker) and self._loops(reader) != self._loops(maker):
            first, last = self.loop
            if self.scatter:
                start = first
            else:
                domain, _ = self.problem.position[tensor]
                summed = self._given(tensor, whole=True)
                self._add(tensor, "sum", (domain,), summed, first, last)
                # It may be reduced while the last turn of a pipeline, which is as any other, ends.
                start = first if self.share else max(start, last + 1)
        elif self._loops(reader) and not self._loops(maker):
            stop = max(stop, self.loop[1])
        self._add(tensor, "tensor", (self.domain[reader],), taken, start, stop)

    def _given(self, tensor: Tensor, whole: bool = False) -> tuple[Table, tuple[Layout, ...]]:
        """Bytes and layouts by choice of what makes a tensor; `whole` of all micro-batches."""
        domain, index = self.problem.position[tensor]
        choices = self.problem.domains[domain]
        key = (id(choices), index, None, whole, tensor.shape, tensor.dtype)
        if key not in self.tables:
            layouts = [choice.outputs[index] for choice in choices]
            if whole:
                layouts = [(B, *layout[1:]) for layout in layouts]
            self.tables[key] = self._sized(tensor, layouts)
        return self.tables[key]

    def _taken(
        self, tensor: Tensor, reader: Node, operand: int
    ) -> tuple[Table, tuple[Layout, ...]]:
        """Bytes and layouts of what a node takes of a tensor, by its choice."""
        choices = self.problem.domains[self.domain[reader]]
        key = (id(choices), operand, tensor.shape, tensor.dtype)
        if key not in self.tables:
            self.tables[key] = self._sized(tensor, [c.inputs[operand] for c in choices])
        return self.tables[key]

    def _sized(self, tensor: Tensor, layouts: list[Layout]) -> tuple[Table, tuple[Layout, ...]]:
        sizes = [_nbytes(tensor.shape, tensor.dtype, x, self.mesh) for x in layouts]
        return np.array(sizes, np.float64), tuple(layouts)

    def _workspace(self, at: int, node: Node) -> None:
        choices = self.problem.domains[self.domain[node]]
        key = (id(choices), node.op)
        if key not in self.tables:
            sizes = [self._scratch(node, choice) for choice in choices]
            layouts = tuple(choice.outputs[0] for choice in choices)
            self.tables[key] = np.array(sizes, np.float64), layouts
        scope = (self.domain[node],)
        self._add(node.outputs[0], "workspace", scope, self.tables[key], at, at)

    def _scratch(self, node: Node, choice: Choice) -> int:
        inputs, outputs = (
            tuple(
                local_shape(t.shape, layout, self.mesh)
                for t, layout in zip(tensors, layouts, strict=True)
            )
            for tensors, layouts in ((node.inputs, choice.inputs), (node.outputs, choice.outputs))
        )
        return node.op.workspace(inputs, outputs, node.outputs[0].dtype)


@cache
def _nbytes(shape: tuple[int, ...], dtype: str, layout: Layout, mesh: Mesh) -> int:
    return prod(local_shape(shape, layout, mesh)) * itemsize(dtype)


def _takes_over(reader: Node, operand: int) -> bool:
    """Whether an output of a node takes the memory of an input that nobody needs any more."""
    given, op = reader.inputs[operand], reader.op
    outputs = [reader.outputs[j] for i, j in op.inplace if i == operand]
    return any((op.view or y.shape == given.shape) and y.dtype == given.dtype for y in outputs)


def _peaks(held: Sequence[Held]) -> tuple[int, ...]:
    """The nodes at which something begins to be held before anything ends."""
    starts, stops = {h.start for h in held}, sorted({h.stop for h in held})
    found, after = [], -1
    for stop in stops:
        if any(at in starts for at in range(after + 1, stop + 1)):
            found.append(stop)
        after = stop
    return tuple(found)
