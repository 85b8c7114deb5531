"""Micro-batches: which nodes of a training step fire once for each, and which once a step.

Time is one more axis. The inputs are S(0) on it and the variables B; what a node makes of that
follows from the signatures that its op has for any axis:

    S   one micro-batch's part         made in the loop
    P   its contribution to a sum      made in the loop, and added up there: P -> B
    B   what all micro-batches share   made once, before the loop or after it

The loop can use what is made of all micro-batches (a count of valid labels, say) only if that
depends on the inputs alone. It is then made in a loop of its own that comes first, in which the
nodes that lead to it fire as well; loops are numbered from 1, and the last is the main one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mpiflow.errors import CompileError
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.rule import Signature
from mpiflow.graph.sbp import B, Partial, S, Sbp
from mpiflow.graph.tensor import Tensor, is_narrow


@dataclass(frozen=True, slots=True)
class Timing:
    """The step of a graph in time.

    `sources` and `signatures` say what inputs, variables and nodes are on the axis of time;
    `loops` names the loops in which a node fires, and is empty for one that fires once a step.
    `made` is the loop in which a tensor that is S or P is turned to B, for those that use it so;
    `before` how many loops are over when the whole of a tensor is there, if any node takes that.
    """

    micro_batches: int
    sources: dict[Tensor, Sbp]
    signatures: dict[Node, Signature]
    loops: dict[Node, tuple[int, ...]]
    made: dict[Tensor, int]
    before: dict[Tensor, int]
    count: int

    def needed(self, nodes: list[Node], wanted: Iterable[tuple[Tensor, int]]) -> Timing:
        """Of some nodes only, in no more loops than it takes for what is wanted of them.

        That is tensors in a loop, or the whole of them where that is 0.
        """
        loops = {}
        needed = {(tensor, loop or self.made.get(tensor, 0)) for tensor, loop in wanted}
        for node in reversed(nodes):
            if self.loops[node]:
                loops[node] = tuple(
                    n for n in self.loops[node] if any((t, n) in needed for t in node.outputs)
                )
            for tensor, taken in zip(node.inputs, self.signatures[node].inputs, strict=True):
                whole = self.made.get(tensor, 0)
                needed.update(
                    (tensor, whole if taken == B else loop) for loop in loops.get(node, (0,))
                )
        return replace(self, loops={**self.loops, **loops})

    def __str__(self) -> str:
        loops = f"{self.count} loop{'s' * (self.count > 1)}"
        lines = [f"{self.micro_batches} micro-batches, {loops}"]
        for node, signature in self.signatures.items():
            turns = ", ".join(f"loop {loop}" for loop in self.loops[node]) or "once"
            lines.append(f"  {node.name:34} {signature}  {turns}")
        return "\n".join(lines)


def divide(graph: Graph, micro_batches: int) -> Timing:
    """The step of a graph in so many micro-batches, which must divide its batch.

    CompileError where a micro-batch needs what only all of them together give.
    """
    nodes = graph.live()
    signatures = _Chooser(graph, nodes, micro_batches).choose()
    sources: dict[Tensor, Sbp] = dict.fromkeys(graph.inputs.values(), S(0))
    sources.update((v.tensor, B) for v in graph.variables.values())
    return _Loops(graph, nodes, signatures, sources).timing(micro_batches)


@dataclass
class _Chooser:
    """Goes through the nodes in order; what each takes of its inputs decides what it gives.

    A node that reads only shared values, and sums, but can give any part of its output (a constant,
    a scalar expanded) is left open, and gives what its consumers take: the parts, if all agree.
    """

    graph: Graph
    nodes: list[Node]
    parts: int
    sbps: dict[Tensor, Sbp] = field(default_factory=dict)
    open: dict[Tensor, Node] = field(default_factory=dict)
    wanted: dict[Tensor, list[Sbp]] = field(default_factory=dict)
    known: dict[Any, list[Signature]] = field(default_factory=dict)

    def choose(self) -> dict[Node, Signature]:
        self.sbps.update(dict.fromkeys(self.graph.inputs.values(), S(0)))
        self.sbps.update((v.tensor, B) for v in self.graph.variables.values())
        chosen: dict[Node, Signature] = {}
        undecided = []
        for node in self.nodes:
            options = self._signatures(node)
            if self._is_whole(node):
                if any(self._opens(node, option) for option in options):
                    undecided.append(node)
                    self.open.update(dict.fromkeys(node.outputs, node))
                    continue
                signature = options[0]
            else:
                signature = self._cheapest(node, options)
            self._take(node, signature, chosen)
        for name, tensor in (*self.graph.outputs.items(), *self.graph.assigns.items()):
            self.wanted.setdefault(tensor, []).append(B)
            if self._is_rounded(tensor):
                raise _narrow_sum(name, tensor, tensor.where)
        for node in reversed(undecided):
            self._take(node, self._asked_for(node), chosen)
        return {node: chosen[node] for node in self.nodes}

    def _signatures(self, node: Node) -> list[Signature]:
        shapes, dtypes = tuple(t.shape for t in node.inputs), tuple(t.dtype for t in node.inputs)
        key = node.op, shapes, dtypes
        if key not in self.known:
            tensors = (*node.inputs, *node.outputs)
            self.known[key] = [
                _without_units(signature)
                for signature in node.op.signatures(shapes, dtypes)
                if all(map(self._divides, tensors, signature.inputs + signature.outputs))
                and (_is_shared(signature) or B not in signature.outputs)
            ]
        return self.known[key]

    def _divides(self, tensor: Tensor, sbp: Sbp) -> bool:
        return not isinstance(sbp, S) or not tensor.shape[sbp.dim] % (sbp.unit * self.parts)

    def _opens(self, node: Node, signature: Signature) -> bool:
        """Whether a signature gives parts of the output and takes parts of open inputs only."""
        whole = all(
            sbp == B or t in self.open for t, sbp in zip(node.inputs, signature.inputs, strict=True)
        )
        return whole and all(isinstance(sbp, S) for sbp in signature.outputs)

    def _is_whole(self, node: Node) -> bool:
        """Whether a node takes only what is shared, and sums, for whose ends it had best wait."""
        return all(t in self.open or self.sbps[t] == B or self._is_sum(t) for t in node.inputs)

    def _is_sum(self, tensor: Tensor) -> bool:
        return isinstance(self.sbps.get(tensor), Partial) and not is_narrow(tensor.dtype)

    def _is_rounded(self, tensor: Tensor) -> bool:
        """A sum of 16-bit floats would be rounded once a micro-batch: its cast is added up."""
        return isinstance(self.sbps.get(tensor), Partial) and is_narrow(tensor.dtype)

    def _cheapest(self, node: Node, options: list[Signature]) -> Signature:
        def price(option: Signature) -> tuple[int, int]:
            taken = zip(node.inputs, option.inputs, strict=True)
            sums = sum(isinstance(sbp, Partial) for sbp in option.outputs)
            return sum(self._price(tensor, sbp) for tensor, sbp in taken), sums

        best = min(options, key=price)
        if price(best)[0] >= _NEVER:
            raise _narrow_sum(node.name, next(filter(self._is_rounded, node.inputs)), node.where)
        return best

    def _price(self, tensor: Tensor, wanted: Sbp) -> int:
        """How much it is to be avoided that a node takes a tensor so."""
        if tensor in self.open:
            return _NEVER if isinstance(wanted, Partial) else 0
        match self.sbps[tensor], wanted:
            case given, _ if given == wanted:
                return 0
            case S(), _:
                return _COLLECTED if wanted == B else _NEVER
            case Partial(), _:
                return _NEVER if wanted != B or is_narrow(tensor.dtype) else _SUMMED
            case _, S():
                return _CUT
        return _NEVER

    def _take(self, node: Node, signature: Signature, chosen: dict[Node, Signature]) -> None:
        chosen[node] = signature
        self.sbps.update(zip(node.outputs, signature.outputs, strict=True))
        for tensor, sbp in zip(node.inputs, signature.inputs, strict=True):
            self.wanted.setdefault(tensor, []).append(sbp)

    def _asked_for(self, node: Node) -> Signature:
        """The signature of an open node by which all its consumers get what they take."""
        options = self._signatures(node)
        for option in options:
            if self._opens(node, option) and all(
                sbp == wanted
                for tensor, sbp in zip(node.outputs, option.outputs, strict=True)
                for wanted in self.wanted.get(tensor, ())
            ):
                return option
        return options[0]


_CUT, _SUMMED, _COLLECTED, _NEVER = 1, 10, 1000, 10**6


def _narrow_sum(user: str, tensor: Tensor, where: str) -> CompileError:
    return CompileError(
        f"micro-batches: {user} needs {tensor.name} in {tensor.dtype} of the whole batch; cast it"
        f" to float32 first\n  {where}"
    )


def _is_shared(signature: Signature) -> bool:
    return all(sbp == B for sbp in signature.inputs)


def _without_units(signature: Signature) -> Signature:
    """Spans of equal micro-batches are whole units anyway."""

    def plain(sbp: Sbp) -> Sbp:
        return S(sbp.dim) if isinstance(sbp, S) else sbp

    return Signature(tuple(map(plain, signature.inputs)), tuple(map(plain, signature.outputs)))


class _Loops:
    """Numbers the loops, and finds in which of them each node fires."""

    def __init__(
        self,
        graph: Graph,
        nodes: list[Node],
        signatures: dict[Node, Signature],
        sources: dict[Tensor, Sbp],
    ) -> None:
        self.graph, self.nodes, self.signatures, self.sources = graph, nodes, signatures, sources
        self.variables = {v.tensor for v in graph.variables.values()}
        self.results = {*graph.outputs.values(), *graph.assigns.values()}
        self.loops: dict[Node, set[int]] = {node: set() for node in nodes}
        self.made: dict[Tensor, int] = {}
        self.level: dict[Tensor, int] = dict.fromkeys(sources, 0)

    def timing(self, micro_batches: int) -> Timing:
        """Loops are those that an early value needs, and the main one."""
        for node in self.nodes:
            self._number(node)
        count = max((self.level[n.outputs[0]] for n in self.nodes if self._in_loop(n)), default=1)
        for node in self.nodes:
            if self._in_loop(node):
                for tensor, taken in self._takes(node):
                    # What all share is made before the loop, even where the loop cuts it.
                    if taken == B or self._sbp(tensor) == B:
                        self._make_early(tensor, node)
        self._fire_in_main(count)
        return Timing(
            micro_batches,
            self.sources,
            self.signatures,
            {node: tuple(sorted(loops)) for node, loops in self.loops.items()},
            self.made,
            self._before(),
            count,
        )

    def _before(self) -> dict[Tensor, int]:
        """How many loops are over when the whole of each tensor is there."""
        found = {t: self.made.get(t, 0) for t in self.sources}
        for node in self.nodes:
            earlier = max((found[tensor] for tensor, _ in self._takes(node)), default=0)
            for tensor in node.outputs:
                found[tensor] = earlier if self._sbp(tensor) == B else self.made.get(tensor, 0)
        return found

    def _sbp(self, tensor: Tensor) -> Sbp:
        """What a tensor is on the axis of time, as it is made."""
        if tensor.node is None:
            return self.sources[tensor]
        return self.signatures[tensor.node].outputs[tensor.index]

    def _takes(self, node: Node) -> list[tuple[Tensor, Sbp]]:
        return list(zip(node.inputs, self.signatures[node].inputs, strict=True))

    def _in_loop(self, node: Node) -> bool:
        """Whether a node has to do with one micro-batch at a time."""
        signature = self.signatures[node]
        return any(sbp != B for sbp in signature.inputs + signature.outputs)

    def _number(self, node: Node) -> None:
        """The first loop that can make a node's outputs; for shared ones, how many come before."""
        before = [0]
        for tensor, taken in self._takes(node):
            level, given = self.level[tensor], self._sbp(tensor)
            if given != B:  # made in a loop, which must have ended, or is this one
                level = max(level, 1) - (taken != B)
            before.append(level)
        self.level.update(dict.fromkeys(node.outputs, max(before) + self._in_loop(node)))

    def _make_early(self, tensor: Tensor, user: Node) -> None:
        """Make a tensor of all micro-batches before the loop in which `user` fires."""
        if self._sbp(tensor) == B:
            if tensor.node is not None and self.level[tensor]:
                for source in tensor.node.inputs:
                    self._make_early(source, user)
        elif tensor not in self.made:
            self.made[tensor] = max(self.level[tensor], 1)
            self._refuse_variables(tensor, user)
            for node in self._ancestors(tensor, loop_only=True):
                self.loops[node].add(self.made[tensor])

    def _refuse_variables(self, tensor: Tensor, user: Node) -> None:
        lines = dict.fromkeys((tensor.where, user.where))
        for node in self._ancestors(tensor, loop_only=False):
            for source in node.inputs:
                if source in self.variables:
                    raise CompileError(
                        f"micro-batches: {user.name} needs {tensor.name} of the whole batch, which"
                        f" depends on variable {source.name}, so it is known only when the last"
                        " micro-batch is done; let it depend on the batch alone, or use one"
                        " micro-batch" + "".join(f"\n  {line}" for line in lines)
                    )

    def _ancestors(self, tensor: Tensor, *, loop_only: bool) -> list[Node]:
        """The nodes that lead to a tensor; `loop_only` stops where a shared value comes in."""
        found: dict[Node, None] = {}
        pending = [tensor]
        while pending:
            node = pending.pop().node
            if node is None or node in found:
                continue
            found[node] = None
            for source, taken in self._takes(node):
                if not loop_only or (taken != B and self._sbp(source) != B):
                    pending.append(source)
        return list(found)

    def _fire_in_main(self, count: int) -> None:
        """The last loop makes everything that is not made early."""
        needed = {t for t in self.results if t not in self.made}
        for node in reversed(self.nodes):
            if needed.isdisjoint(node.outputs):
                continue
            if self._in_loop(node):
                self.loops[node].add(count)
            for tensor, taken in self._takes(node):
                if tensor not in self.made or taken != B:
                    needed.add(tensor)
                if taken == B and self._sbp(tensor) != B:
                    self.made.setdefault(tensor, count)
        for tensor in self.results:
            if self._sbp(tensor) != B:
                self.made.setdefault(tensor, count)
