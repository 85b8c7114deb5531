"""Step 9: from placed nodes to the tasks and registers of a program, conversions included.

In a step of micro-batches a node becomes a task for each loop in which it fires (microbatch.py),
and the tasks are sorted into phases: odd ones are the loops, even ones what is around them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from typing import Any

from mpiflow.compiler.build import Builder
from mpiflow.compiler.cost import compute_seconds, read_seconds
from mpiflow.compiler.domains import Choice
from mpiflow.compiler.limits import Limits, index_limits
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.microbatch import Timing
from mpiflow.compiler.order import in_order, order_updates, sums_at_once
from mpiflow.compiler.owners import owner_axes
from mpiflow.compiler.pipeline import Sequence, in_flight
from mpiflow.compiler.rowtasks import fetch, send
from mpiflow.compiler.signature import Placed
from mpiflow.compiler.transfer import Transfer, first_uses
from mpiflow.compiler.zero import is_backward, of_variables
from mpiflow.graph.graph import Graph, Node
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import REGISTRY
from mpiflow.graph.sbp import B, Layout, S
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.embedding import EmbeddingGrad
from mpiflow.ops.gradnorm import SumScalars
from mpiflow.ops.rows import Lookup, SumRows
from mpiflow.plan.records import (
    READ,
    RECEIVE,
    SEND,
    WRITE,
    Output,
    Program,
    Register,
    Task,
    Variable,
    in_time,
)

PREFETCH = 2
"""Slots of a read register: one in use, one being filled."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage has to do with others: the messages that come and leave, and its turns.

    `segments` numbers the parts of the last loop that its nodes belong to.
    """

    stage: int = 0
    coming: tuple[Transfer, ...] = ()
    going: tuple[Transfer, ...] = ()
    sequence: Sequence = ()
    segments: dict[Node, int] = field(default_factory=dict)


def lower(
    placed: Placed,
    variables: dict[str, Variable],
    mesh: Mesh,
    machine: Machine,
    *,
    data: str,
    rows: int,
    timing: Timing | None = None,
    zero: int = 0,
    stage: StageWork | None = None,
) -> Program:
    """The tasks of a traced graph: read, compute, convert, update.

    With pipeline stages the graph is the part of one, and `stage` what it has to do with others.

    `mesh` is timed where the step is cut into micro-batches, as `timing` says. From level 2 of
    `zero` on, gradients are split over the ranks before they are added up; at level 3, weights that
    the forward pass has gathered are gathered again for the backward pass, unless there is a loop.
    """
    work = stage or StageWork()
    return _Lowering(placed, variables, mesh, machine, timing, zero, work).program(data, rows)


class _Lowering:
    def __init__(
        self,
        placed: Placed,
        variables: dict[str, Variable],
        mesh: Mesh,
        machine: Machine,
        timing: Timing | None,
        zero: int,
        stage: StageWork,
    ) -> None:
        self.placed, self.graph, self.timing = placed, placed.graph, timing
        self.stage = stage
        self.leaving: dict[tuple[Tensor, int], list[Transfer]] = {}
        for transfer in stage.going:
            self.leaving.setdefault((transfer.made_of[-1], transfer.loop), []).append(transfer)
        self.zero = zero
        # A loop over micro-batches uses what was gathered before it, forward and backward.
        self.weights = of_variables(self.graph) if zero > 2 and not timing else set()
        # By the name in the graph: an evaluation has averages in the place of weights.
        self.variables = dict(zip(variables, in_time(variables.values(), mesh), strict=True))
        self.build = Builder(mesh, machine, loops=timing.count if timing else 0)
        self.values: dict[tuple[Tensor, int], Register] = {}
        self.old: dict[Tensor, Register] = {}
        self.sums = {part: transfer.tensor for transfer in stage.coming for part in transfer.parts}
        assigned = list(self.graph.assigns.values())
        self.assigned = {
            value: name for name, value in self.graph.assigns.items() if assigned.count(value) == 1
        }
        self.given = {t for node, _ in placed.nodes for t in node.inputs}
        self.given.update(
            self.graph.outputs.values(), (t for transfer in stage.going for t in transfer.made_of)
        )
        self.changing = {
            self.graph.variables[name].tensor: value for name, value in self.graph.assigns.items()
        }

    def program(self, data: str, rows: int) -> Program:
        self._read(data)
        for name, variable in self.graph.variables.items():
            self.values[variable.tensor, 0] = self.variables[name]
        self._keep_old()
        self._receive()
        for node, choice in self.placed.nodes:
            self.build.segment = self.stage.segments.get(node, 0)
            for loop in self._loops(node):
                self.build.loop = loop
                self._node(node, choice)
                for tensor in node.outputs:
                    self._send(self.leaving.pop((tensor, loop), []))
        self.build.loop = 0
        self._send(transfer for rest in self.leaving.values() for transfer in rest)
        self._copy_assigned()
        # Outputs that have rows are handed out by what stands behind this; see predict.py.
        scalars = ((name, t) for name, t in self.graph.outputs.items() if not t.shape)
        outputs = tuple(self._output(name, t) for name, t in scalars)
        tasks = order_updates(self.build.tasks, set(self.variables))
        registers = tuple(self.build.registers.values())
        program = Program(self.graph.name, rows, registers, tasks, (), outputs, 0.0, data)
        program = replace(program, stage=self.stage.stage, sequence=self.stage.sequence)
        if self.timing:
            program = in_phases(replace(program, micro_batches=self.timing.micro_batches))
        return in_order(sums_at_once(program))

    def _receive(self) -> None:
        """Registers for what comes from other stages, each in the segment that first needs it."""
        first = first_uses(self.stage.segments)
        for transfer in self.stage.coming:
            self.build.loop = transfer.loop
            self.build.segment = first.get(transfer.tensor, 0)
            self.values[transfer.tensor, transfer.loop] = self.build.receive(transfer)
        self.build.loop = 0

    def _send(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            tensor = transfer.tensor
            if transfer.parts:
                self._add_up(tensor, transfer.parts)
            self.build.send(transfer, self._result(tensor, transfer.layout), tensor.where)

    def _add_up(self, total: Tensor, parts: Iterable[Tensor]) -> None:
        """Make the sum of scalars of one layout."""
        taken = [self.values[part, 0] for part in parts]
        made = self.build.register(total.name, (), total.dtype, taken[0].layout)
        self.build.compute(total.name, SumScalars(), taken, [made], total.where)
        self.values[total, 0] = made

    def _taken(self, node: Node, choice: Choice) -> list[tuple[Tensor, Layout]]:
        """What a node takes: for the parts of a sum that another stage sends, the sum."""
        taken = list(zip(node.inputs, choice.inputs, strict=True))
        if self.sums.keys().isdisjoint(node.inputs):
            return taken
        return list({self.sums.get(tensor, tensor): layout for tensor, layout in taken}.items())

    def _loops(self, node: Node) -> tuple[int, ...]:
        """The loops in which a node fires; (0,) if it fires once."""
        return (self.timing.loops[node] if self.timing else ()) or (0,)

    def _value(
        self, tensor: Tensor, wanted: Layout, where: str, *, backward: bool = False
    ) -> Register:
        """A tensor as the task that is built now takes it, converted where it must be."""
        build = self.build
        if not self.timing:
            again = "again" if backward and tensor in self.weights else ""
            return build.convert(self.values[tensor, 0], wanted, where, copy=again)
        loop, segment = build.loop, build.segment
        if wanted[0] == B and tensor in self.timing.made:
            build.loop = self.timing.made[tensor]
        held = self.values.get((tensor, build.loop)) or self.values[tensor, 0]
        if build.loop != loop:
            build.segment = build.made_in.get(held.name, 0)
        if self.zero > 1 and held.layout[0] != wanted[0] and any(isinstance(x, S) for x in wanted):
            held = build.convert(held, (held.layout[0], *wanted[1:]), where)
        found = build.convert(held, wanted, where)
        build.loop, build.segment = loop, segment
        return found

    def _read(self, data: str) -> None:
        registers = []
        for tensor in self.graph.inputs.values():
            layout = self.placed.sources[tensor]
            made = self.build.register(
                tensor.name, tensor.shape, tensor.dtype, layout, slots=self._read_slots()
            )
            self.values[tensor, 0] = made
            registers.append(made)
        if not registers:
            return
        nbytes = sum(r.nbytes for r in registers)
        attributes: dict[str, Any] = {"data": data, "fields": list(self.graph.inputs)}
        limits = index_limits(self.graph)
        if limits:
            found = [limits.get(name, Limits(0)) for name in self.graph.inputs]
            attributes["limits"] = [one.below for one in found]
            if any(one.ignored for one in found):
                attributes["ignored"] = [sorted(one.ignored) for one in found]
        self.build.loop = 1
        self.build.add(
            Task(
                f"read {data}",
                "read",
                READ,
                "read",
                outputs=tuple(r.name for r in registers),
                attributes=attributes,
                nbytes=nbytes,
                seconds=read_seconds(self.build.machine, nbytes),
            ),
            *(r.layout for r in registers),
        )
        self.build.loop = 0

    def _read_slots(self) -> int:
        """Two of what is read at a time; where several loops use it, that is a whole batch.

        With stages, more than are in flight, and a number that divides those of a step.
        """
        count = self.timing.micro_batches if self.timing else 1
        if self.timing and self.timing.count > 1:
            return PREFETCH * count
        if self.stage.sequence:
            wanted = min(count, in_flight(self.stage.sequence) + 1)
            return next(n for n in range(wanted, count + 1) if not count % n)
        return PREFETCH

    def _keep_old(self) -> None:
        """Copy the variables whose value of before the step is given out, or to a variable."""
        shown, moved = set(self.graph.outputs.values()), set(self.graph.assigns.values())
        for name, variable in self.graph.variables.items():
            tensor = variable.tensor
            if tensor in shown or (tensor in moved and name in self.graph.assigns):
                old = self.build.register(
                    f"{name}@old", tensor.shape, tensor.dtype, self.variables[name].layout
                )
                identity = REGISTRY["Identity"]()
                self.build.compute(
                    f"keep {name}", identity, [self.variables[name]], [old], tensor.where
                )
                self.old[tensor] = old

    def _node(self, node: Node, choice: Choice) -> None:
        inputs = [
            self._value(tensor, layout, node.where, backward=is_backward(node))
            for tensor, layout in self._taken(node, choice)
        ]
        outputs: list[Register] = []
        layouts = (*choice.inputs, *choice.outputs)
        for i, (tensor, layout) in enumerate(zip(node.outputs, choice.outputs, strict=True)):
            made = self._update_target(node, i, inputs, layout) or self.build.register(
                self.build.name(tensor.name, *layouts), tensor.shape, tensor.dtype, layout
            )
            self.values[tensor, self.build.loop] = made
            outputs.append(made)
        axes = owner_axes(node, choice.inputs, choice.outputs)
        if axes and isinstance(node.op, Lookup):
            fetch(self.build, inputs, outputs[0], axes, node.where)
            return
        if axes and isinstance(node.op, SumRows | EmbeddingGrad):
            inputs = send(self.build, inputs, node.op.rows, axes, node.where)
        op = replace(node.op, clears=False) if axes and isinstance(node.op, SumRows) else node.op
        name = self.build.name(node.name, *layouts)
        self.build.compute(name, op, inputs, outputs, node.where)
        self._wait(node)

    def _wait(self, node: Node) -> None:
        """Let the newest task come after what its node is to come after, if this stage has it."""
        tensor = self.graph.after.get(node)
        held = self.values.get((tensor, self.build.loop)) if tensor is not None else None
        if held is None:
            return
        tasks = self.build.tasks
        maker = next((t.name for t in reversed(tasks) if held.name in t.outputs), None)
        if maker is not None:
            tasks[-1] = replace(tasks[-1], after=(maker,))

    def _update_target(
        self, node: Node, output: int, inputs: list[Register], layout: Layout
    ) -> Variable | None:
        """The variable itself, where the op may update it in place.

        Nothing may read what the node gives, and the node no other variable that changes: its
        turn is after every reader of the variable, which must not have to wait for it.
        """
        tensor = node.outputs[output]
        name = self.assigned.get(tensor)
        if name is None or not self.given.isdisjoint(node.outputs) or self._reads_changing(node):
            return None
        variable = self.variables[name]
        in_place = any(j == output and inputs[i] is variable for i, j in node.op.inplace)
        return variable if in_place and layout == variable.layout else None

    def _reads_changing(self, node: Node) -> bool:
        """Whether the node reads a variable that the step changes, and not by this node."""
        values = [self.changing[t] for t in node.inputs if t in self.changing]
        return any(value not in node.outputs for value in values)

    def _copy_assigned(self) -> None:
        """Values that could not be computed in place are copied once all readers are done.

        Those that have to be gathered first are received where they belong.
        """
        for name, tensor in self.graph.assigns.items():
            variable, tasks = self.variables[name], len(self.build.tasks)
            value = self._result(tensor, variable.layout)
            made = len(self.build.tasks) > tasks and self.build.tasks[-1].outputs == (value.name,)
            if made and self.build.tasks[-1].op == "all_gather":
                self.build.redirect(value, variable)
            elif value is not variable:
                identity = REGISTRY["Identity"]()
                self.build.compute(f"assign {name}", identity, [value], [variable], tensor.where)

    def _output(self, name: str, tensor: Tensor) -> Output:
        everywhere = (B,) * len(self.build.mesh.axes)
        register = self._result(tensor, everywhere)
        return Output(name, register.name, name in self.graph.totals)

    def _result(self, tensor: Tensor, layout: Layout) -> Register:
        """What a step gives or keeps, as it was before the step if it is a variable."""
        if tensor in self.old:
            return self.build.convert(self.old[tensor], layout, tensor.where)
        return self._value(tensor, layout, tensor.where)


def in_phases(program: Program) -> Program:
    """With the phase of the tasks that fire once: as late as what needs them allows.

    So what only updates take, as another layout of a moment, is not held by the loops before them.
    Messages between stages are as early as they can be, on both sides.
    """
    needs = program.needs()
    fixed = {task.name: task.phase for task in program.tasks}
    messages = {task.name for task in program.tasks if task.kind in (SEND, RECEIVE)}
    order = list(TopologicalSorter(needs).static_order())
    phase: dict[str, int] = {}
    for name in order:
        before = (p + p % 2 for need in needs[name] for p in [phase[need]])
        phase[name] = fixed[name] or max(before, default=0)
    latest: dict[str, int] = {}
    for name in reversed(order):
        if not fixed[name] and name in latest and name not in messages:
            phase[name] = max(phase[name], latest[name] - latest[name] % 2)
        for need in needs[name]:
            latest[need] = min(latest.get(need, phase[name]), phase[name])
    tasks = tuple(replace(task, phase=phase[task.name]) for task in program.tasks)
    return replace(program, tasks=tasks)


def lower_initialise(
    graph: Graph, variables: dict[str, Variable], mesh: Mesh, machine: Machine
) -> Program:
    """The program that gives every variable its first value."""
    build = Builder(mesh, machine)
    for name, variable in graph.variables.items():
        where = variable.tensor.where
        build.compute(f"initialise {name}", variable.init, [], [variables[name]], where)
    return Program("initialise", 0, (), tuple(build.tasks), ())


def lower_save(variables: dict[str, Variable], mesh: Mesh, machine: Machine) -> Program:
    """The program that hands every variable to the checkpoint.

    Each rank copies its own part of what it holds to staging memory, which the write stream then
    stores beside the next steps.
    """
    build = Builder(mesh, machine)
    for name, variable in variables.items():
        staged = build.register(
            f"save/{name}", variable.shape, variable.dtype, _divided(variable, mesh)
        )
        build.compute(f"stage {name}", REGISTRY["Slice"](), [variable], [staged], variable.where)
        build.tasks.append(
            Task(
                f"write {name}",
                "write",
                WRITE,
                "write",
                inputs=(staged.name,),
                attributes={"variable": name},
                nbytes=staged.nbytes,
                seconds=compute_seconds(machine, 0, staged.nbytes, variable.dtype)
                + staged.nbytes / machine.storage,
                where=variable.where,
            )
        )
    return Program("save", 0, tuple(build.registers.values()), tuple(build.tasks), ())


def _divided(variable: Variable, mesh: Mesh) -> Layout:
    """The variable's layout with every B turned to S where the shards stay in one piece."""
    layout = list(variable.layout)
    for axis in reversed(range(len(layout))):
        inner = {sbp.dim for sbp in layout[axis + 1 :] if isinstance(sbp, S)}
        free = [dim for dim in range(len(variable.shape)) if dim not in inner]
        if layout[axis] == B and free:
            layout[axis] = S(max(free, key=lambda dim: variable.shape[dim]))
    return tuple(layout)
