"""Step 11a, for accelerators: copies between device and host, and the route between ranks.

    read -> [pinned slot] -h2d-> kernels ... -d2h-> [pinned] -> host, write

    staged   kernels -d2h-> [pinned] -> collective -> [pinned] -h2d-> kernels
    nccl, mpi   kernels -> collective -> kernels

Kernels work in the memory of the device; what the host reads, sends, stores or gives out lies in
pinned memory. A value that is in either is copied to the other once, where somebody there wants
it. What a staged collective gives stays on the host if only others of its kind take it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpiflow.compiler.boxing import local_shape
from mpiflow.compiler.cost import copy_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.order import in_order
from mpiflow.graph.mesh import Mesh
from mpiflow.graph.op import REGISTRY, Op, build_op
from mpiflow.graph.sbp import B
from mpiflow.plan.exchange import summed_bytes
from mpiflow.plan.pieces import is_strided
from mpiflow.plan.places import CUDA_MPI, D2H, FEED, H2D, NCCL, PINNED, STAGED
from mpiflow.plan.records import (
    READ,
    RECEIVE,
    SEND,
    WRITE,
    Program,
    Register,
    Task,
    Variable,
    host_stream,
    in_time,
)
from mpiflow.plan.rows import ROW_KINDS

_BETWEEN_RANKS = ("collective", SEND, RECEIVE)
_FED = 2
"""Slots of pinned memory that is read into: one on its way to the device, one being filled."""
_LINE = 256
"""Bytes at a multiple of which memory of a device begins that is used for something else."""
_SNAPSHOTS = 2
"""Parts of variables on the device at a time, on their way to the host."""


def with_copies(
    program: Program,
    variables: Iterable[Variable],
    mesh: Mesh,
    machine: Machine,
    route: str,
) -> Program:
    """The program for accelerators whose ranks reach one another by `route`.

    `mesh` is that of the program's layouts. Rows whose number is known only in the step, and parts
    of arrays that are no run of memory, are staged whatever the route.
    """
    return _Copying(program, in_time(variables, mesh), mesh, machine, route).copied()


class _Copying:
    def __init__(
        self,
        program: Program,
        variables: Iterable[Variable],
        mesh: Mesh,
        machine: Machine,
        route: str,
    ) -> None:
        self.program, self.mesh, self.machine, self.route = program, mesh, machine, route
        self.variables = {v.name for v in variables}
        self.registers: dict[str, Register] = {r.name: r for r in (*variables, *program.registers)}
        self.handed = self._handed()
        self.fed = {n for t in program.tasks if t.kind == READ for n in t.outputs}
        self.on_device = self._used_on_device()
        self.pinned: dict[str, str] = {}  # the copy on the host of what kernels know by a name
        self.tasks: list[Task] = []

    def copied(self) -> Program:
        for task in self.program.tasks:
            self._task(task)
        outputs = tuple(
            replace(o, register=name)
            for o, name in zip(self.program.outputs, self._outputs(), strict=True)
        )
        tasks = _few_snapshots(self.tasks)
        made = {name for task in tasks for name in task.outputs}
        registers = (r for n, r in self.registers.items() if n not in self.variables and n in made)
        program = replace(self.program, tasks=tuple(tasks), outputs=outputs)
        program = replace(program, registers=tuple(self._resolved(r, made) for r in registers))
        return in_order(program)

    def _handed(self) -> dict[str, Task]:
        """Of what is written: the kernels that only hand a tensor on as it is, by their output."""
        written = {n for t in self.program.tasks if t.stream == WRITE for n in t.inputs}
        return {
            task.outputs[0]: task
            for task in self.program.tasks
            if task.op == "Slice" and task.outputs[0] in written
            and self.registers[task.inputs[0]].layout == self.registers[task.outputs[0]].layout
        }  # fmt: skip

    def _used_on_device(self) -> set[str]:
        """The tensors that tasks of the device take."""
        return {
            name for task in self.program.tasks
            if task.kind != WRITE and not self._is_staged(task)
            for name in task.inputs
        } | self.variables  # fmt: skip

    def _is_staged(self, task: Task) -> bool:
        if task.kind not in _BETWEEN_RANKS:
            return False
        if self.route == STAGED or task.op in ROW_KINDS:
            return True
        register = self.registers[(*task.inputs, *task.outputs)[0]]
        return is_strided(task, register, self.mesh)

    def _task(self, task: Task) -> None:
        if task.kind == READ:
            self._read(task)
        elif task.kind == WRITE:
            inputs = self._on_host(task.inputs, task)
            self.tasks.append(replace(task, inputs=inputs))
        elif task.outputs and self.handed.get(task.outputs[0]) is task:
            self._hand_over(task)
        elif self._is_staged(task):
            inputs = self._on_host(task.inputs, task)
            outputs = tuple(self._pin(name, result=True) for name in task.outputs)
            # What devices start themselves, and what the host does, have no order in common.
            stream = host_stream(task.stream) if self.route == NCCL else task.stream
            self.tasks.append(
                replace(task, inputs=inputs, outputs=outputs, route=STAGED, stream=stream)
            )
            self._to_device(task, [n for n in task.outputs if n in self.on_device], H2D)
        elif task.kind in _BETWEEN_RANKS:
            self.tasks.append(self._direct(task))
        else:
            self.tasks.append(self._kernel(task))

    def _kernel(self, task: Task) -> Task:
        """With the workspace that it has on an accelerator, where that is another."""
        if REGISTRY[task.op].device_workspace is Op.device_workspace:
            return task
        inputs, outputs = (
            [self.registers[n] for n in names] for names in (task.inputs, task.outputs)
        )
        given, made = (
            tuple(local_shape(r.shape, r.layout, self.mesh) for r in each)
            for each in (inputs, outputs)
        )
        op = build_op(task.op, task.attributes)
        return replace(task, workspace=(0, op.device_workspace(given, made, outputs[0].dtype)))

    def _direct(self, task: Task) -> Task:
        """Between memories of devices; MPI sends what is to be summed to a workspace."""
        task = replace(task, route=self.route)
        if self.route != CUDA_MPI or not (needed := summed_bytes(task, self.registers, self.mesh)):
            return task
        first = -(-task.workspace[1] // _LINE) * _LINE
        attributes = task.attributes | {"received": first}
        return replace(task, workspace=(0, first + needed), attributes=attributes)

    def _read(self, task: Task) -> None:
        """Read into pinned slots, and copy on what the device takes, ahead of the step too."""
        taken = {n for t in self.program.tasks if self._is_staged(t) for n in t.inputs}
        for name in task.outputs:
            slots = self.registers[name].slots
            if name not in taken and slots % _FED == 0:
                slots = _FED
            self._pin(name, slots=slots)
        self.tasks.append(replace(task, outputs=tuple(self.pinned[n] for n in task.outputs)))
        self._to_device(task, [n for n in task.outputs if n in self.on_device], FEED)

    def _hand_over(self, task: Task) -> None:
        """A copy to the host where a kernel would have copied, into what is written from there."""
        (name,) = task.outputs
        self.registers[name] = replace(self.registers[name], space=PINNED)
        self.pinned[name] = name
        self.tasks.append(self._copy(replace(task, attributes={}), D2H, task.name))

    def _pin(self, name: str, *, slots: int = 0, result: bool = False) -> str:
        """A register in pinned memory; the result of a collective is in place if it was."""
        register = self.registers[name]
        pinned = f"{name}@pinned"
        if pinned in self.registers:  # a variable that was sent, and now comes back changed
            pinned += ".new"
        aliases = self.pinned.get(register.aliases, "") if result else ""
        self.registers[pinned] = Register(
            pinned, register.shape, register.dtype, register.layout, 0, register.nbytes,
            slots or register.slots, aliases, space=PINNED,
        )  # fmt: skip
        self.pinned[name] = pinned
        return pinned

    def _on_host(self, names: tuple[str, ...], task: Task) -> tuple[str, ...]:
        """What these are on the host, copied there unless they are."""
        missing = tuple(dict.fromkeys(n for n in names if n not in self.pinned))
        looped = task.phase % 2 == 1
        shared = tuple(n for n in missing if looped and self.registers[n].layout[0] == B)
        own = tuple(n for n in missing if n not in shared)
        if shared:  # by all turns of a loop, so that it is copied before
            before = replace(task, phase=task.phase - 1, segment=0)
            self._to_host(before, shared, f"d2h {', '.join(shared)}")
        if own:
            self._to_host(task, own, f"d2h {task.name}")
        return tuple(self.pinned[name] for name in names)

    def _to_host(self, task: Task, names: tuple[str, ...], name: str) -> None:
        outputs = tuple(self._pin(name) for name in names)
        if task.kind == WRITE:  # which outlives the step: the slots are those of the host
            for source in names:
                self.registers[source] = replace(self.registers[source], slots=1)
        self.tasks.append(self._copy(replace(task, inputs=names, outputs=outputs), D2H, name))

    def _to_device(self, task: Task, names: list[str], stream: str) -> None:
        if names:
            inputs = tuple(self.pinned[name] for name in names)
            made = replace(task, inputs=inputs, outputs=tuple(names))
            self.tasks.append(self._copy(made, stream, f"h2d {task.name}"))

    def _copy(self, task: Task, stream: str, name: str) -> Task:
        """A task that copies, in the part of the step that `task` is in."""
        nbytes = sum(self.registers[n].nbytes for n in task.inputs)
        kind = D2H if stream == D2H else H2D
        return Task(
            name,
            kind,
            stream,
            kind,
            inputs=task.inputs,
            outputs=task.outputs,
            nbytes=nbytes,
            seconds=copy_seconds(self.machine, nbytes),
            where=task.where,
            phase=task.phase,
            segment=task.segment,
        )

    def _outputs(self) -> list[str]:
        """The outputs of the step on the host: those that are not there yet come in one copy."""
        names = tuple(output.register for output in self.program.outputs)
        if any(name not in self.pinned for name in names):
            phase = max(t.phase for t in self.tasks if not set(names).isdisjoint(t.outputs))
            self._on_host(names, Task("outputs", "", "", "", phase=phase + phase % 2))
        return [self.pinned[name] for name in names]

    def _resolved(self, register: Register, made: set[str]) -> Register:
        """With the alias of what is there: over what was sent, if its result came in between."""
        aliases = register.aliases
        while aliases and aliases not in made and aliases not in self.variables:
            aliases = self.registers[aliases].aliases
        return replace(register, aliases=aliases)


def _few_snapshots(tasks: list[Task]) -> list[Task]:
    """Let kernels that cut out what is stored wait for the copies before, so that few are there."""
    cut = {t.outputs[0]: i for i, t in enumerate(tasks) if t.op == "Slice"}
    copies = [(t.name, cut[t.inputs[0]]) for t in tasks if t.kind == D2H and t.inputs[0] in cut]
    made = list(tasks)
    for (name, _), (_, kernel) in zip(copies, copies[_SNAPSHOTS:], strict=False):
        made[kernel] = replace(made[kernel], after=(*made[kernel].after, name))
    return made
