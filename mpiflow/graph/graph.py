"""Graph: what to compute in one step, for all ranks at once, in the order it was written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op
from mpiflow.graph.sbp import Sbp
from mpiflow.graph.tensor import Tensor

Hint = Sbp | dict[str, Sbp]
Policy = Callable[[Op, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""What a node is given instead of its inputs: the same values in other dtypes."""
_PACKAGE = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One use of an op. `where` is the file and line of the user's program."""

    op: Op
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    where: str


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A value that persists over steps. `init` is an op without inputs that gives its start."""

    tensor: Tensor
    init: Op
    trainable: bool
    hint: Hint | None = None

    @property
    def name(self) -> str:
        """Its name, which is also its name in checkpoints."""
        return self.tensor.name


@dataclass(eq=False)
class Graph:
    """Nodes in topological order, with named inputs, variables, assignments and outputs.

    `updates` are the optimizer's nodes, which come after forward and backward pass. `origins`
    names, for each node of the backward pass, the one that it differentiates; `stages` the pipeline
    stage of the nodes that the user pinned to one, `marks` numbers the parts of the model that the
    user wants computed again. A node in `after` does not fire before that tensor is there.
    The step is done in so many `micro_batches`, which only what is defined on one of them needs to
    know.
    `hint_lines` are the lines that gave the hints, by tensor as these.
    """

    name: str
    training: bool = True
    seed: int = 0
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    assigns: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    totals: set[str] = field(default_factory=set)
    hints: dict[str, Hint] = field(default_factory=dict)
    hint_lines: dict[str, str] = field(default_factory=dict)
    updates: set[Node] = field(default_factory=set)
    origins: dict[Node, Node] = field(default_factory=dict)
    stages: dict[Node, int] = field(default_factory=dict)
    marks: dict[Node, int] = field(default_factory=dict)
    after: dict[Node, Tensor] = field(default_factory=dict)
    policy: Policy | None = None
    micro_batches: int = 1
    _counts: dict[str, int] = field(default_factory=dict)
    _scopes: list[str] = field(default_factory=list)
    _where: list[str] = field(default_factory=list)
    _stage: int | None = None
    _mark: int | None = None
    _marked: int = 0

    @property
    def where(self) -> str:
        """The user's line that is building now, or that of the node being differentiated."""
        return self._where[-1] if self._where else user_line()

    def unique(self, base: str) -> str:
        """A name in the current scope that no node or variable of this trace has."""
        name = "/".join([*self._scopes, base])
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        return f"{name}.{count}" if count else name

    @contextmanager
    def scope(self, name: str, where: str | None = None) -> Iterator[None]:
        """Names inside begin with `name`; `where`, if given, is the line that nodes carry."""
        self._scopes.append(name)
        if where is not None:
            self._where.append(where)
        try:
            yield
        finally:
            self._scopes.pop()
            if where is not None:
                self._where.pop()

    def stage(self, index: int) -> AbstractContextManager[None]:
        """Pin the nodes that are added inside to a pipeline stage."""
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise GraphError(
                f"mf.stage({index!r}): stages are counted from 0, name one by its number"
                f"\n  {self.where}"
            )
        return self._pinned(index)

    @contextmanager
    def _pinned(self, index: int) -> Iterator[None]:
        before, self._stage = self._stage, index
        try:
            yield
        finally:
            self._stage = before

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Mark the nodes that are added inside to be computed again in the backward pass."""
        before = self._mark
        if before is None:
            self._mark, self._marked = self._marked, self._marked + 1
        try:
            yield
        finally:
            self._mark = before

    def input(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A field of the batch."""
        if name in self.inputs:
            raise GraphError(f"input {name!r} is declared twice")
        tensor = Tensor(self, f"batch/{name}", shape, dtype, where=self.where)
        self._counts[tensor.name] = 1
        self.inputs[name] = tensor
        return tensor

    def variable(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: str = "float32",
        init: Op,
        trainable: bool = True,
        sbp: Hint | None = None,
    ) -> Tensor:
        """A new variable; its name must be new in this trace."""
        if name in self.variables:
            first = self.variables[name].tensor.where
            raise GraphError(
                f"variable {name!r} exists already (made at {first}); give the second one another"
                f" name, or pass the variable itself to share it\n  {self.where}"
            )
        if name in self._counts:
            raise GraphError(f"variable {name!r}: a node or layer has this name\n  {self.where}")
        if any(size < 1 for size in shape):
            raise GraphError(f"variable {name!r} has an empty shape {tuple(shape)}\n  {self.where}")
        tensor = Tensor(self, name, tuple(shape), dtype, where=self.where)
        self._counts[name] = 1
        self.variables[name] = Variable(tensor, init, trainable, sbp)
        return tensor

    def add(self, op: Op, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Add a node; gives its outputs."""
        where = self.where
        if self.policy is not None:
            inputs = self.policy(op, inputs)
        for tensor in inputs:
            if tensor.graph is not self:
                raise GraphError(
                    f"{op.name}: {tensor.name} belongs to another trace ({tensor.graph.name})"
                    f"\n  {where}"
                )
        shapes = tuple(t.shape for t in inputs)
        try:
            out_shapes = op.infer(shapes)
            dtypes = op.dtypes(tuple(t.dtype for t in inputs))
        except GraphError as error:
            raise GraphError(f"{error}\n  {where}") from None
        if len(dtypes) != len(out_shapes):
            raise GraphError(
                f"{op.name} has {len(out_shapes)} outputs, and dtypes() gives {len(dtypes)} dtypes"
                f" for them\n  {where}"
            )
        name = self.unique(_snake(type(op).__name__))
        outputs = tuple(
            Tensor(self, name if i == 0 else f"{name}:{i}", shape, dtype, index=i, where=where)
            for i, (shape, dtype) in enumerate(zip(out_shapes, dtypes, strict=True))
        )
        node = Node(op, name, inputs, outputs, where)
        for tensor in outputs:
            tensor.node = node
        self.nodes.append(node)
        if self._stage is not None:
            self.stages[node] = self._stage
        if self._mark is not None:
            self.marks[node] = self._mark
        return outputs

    def assign(self, variable: Tensor, value: Tensor) -> None:
        """At the end of the step the variable becomes `value`; readers see the old value."""
        name = variable.name
        if self.variables.get(name) is None or self.variables[name].tensor is not variable:
            raise GraphError(f"assign: {name} is no variable of this trace\n  {self.where}")
        if name in self.assigns:
            raise GraphError(f"assign: variable {name} is assigned twice\n  {self.where}")
        if (variable.shape, variable.dtype) != (value.shape, value.dtype):
            raise GraphError(f"assign: variable {variable}, value {value}\n  {self.where}")
        self.assigns[name] = value

    def live(self) -> list[Node]:
        """The nodes that an output or an assignment depends on, in order."""
        needed = {*self.outputs.values(), *self.assigns.values()}
        kept = []
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.inputs)
                kept.append(node)
        return kept[::-1]

    def drop_unread_inputs(self) -> None:
        """Forget the fields that nothing depends on."""
        read = {tensor for node in self.live() for tensor in node.inputs}
        read.update(self.outputs.values(), self.assigns.values())
        self.inputs = {name: tensor for name, tensor in self.inputs.items() if tensor in read}

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        lines += [f"  input     {tensor}" for tensor in self.inputs.values()]
        lines += [f"  variable  {v.tensor}" for v in self.variables.values()]
        for node in self.nodes:
            attributes = ", ".join(f"{k}={v}" for k, v in node.op.attributes().items())
            inputs = ", ".join(t.name for t in node.inputs)
            outputs = ", ".join(map(str, node.outputs))
            lines.append(f"  {outputs} = {node.op.name}({inputs}) {attributes}".rstrip())
        lines += [f"  assign    {name} <- {value.name}" for name, value in self.assigns.items()]
        lines += [f"  output    {name} = {t.name}" for name, t in self.outputs.items()]
        return "\n".join(lines)


_current: list[Graph] = []


@contextmanager
def building(graph: Graph) -> Iterator[Graph]:
    """Ops called inside add their nodes to `graph`."""
    _current.append(graph)
    try:
        yield graph
    finally:
        _current.pop()


def current() -> Graph:
    """The graph that is being built."""
    if not _current:
        raise GraphError("ops and layers are called inside a model function, while it is traced")
    return _current[-1]


def user_line() -> str:
    """File and line of the innermost caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
