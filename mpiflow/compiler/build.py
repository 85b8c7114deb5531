"""Building a program: registers, priced tasks, and the conversions between layouts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

from mpiflow.compiler import boxing
from mpiflow.compiler.boxing import Hop, local_shape
from mpiflow.compiler.cost import compute_bytes, op_seconds
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.owners import as_expected
from mpiflow.compiler.transfer import Transfer
from mpiflow.graph.mesh import MICRO, Mesh
from mpiflow.graph.op import REGISTRY, Op
from mpiflow.graph.rule import Shape
from mpiflow.graph.sbp import B, Layout, layout_text
from mpiflow.plan.exchange import staging_bytes
from mpiflow.plan.records import COMPUTE, RECEIVE, SEND, Register, Task, communication_stream
from mpiflow.plan.slice import itemsize


@dataclass
class Builder:
    """Collects the registers and tasks of one program.

    `loop` is the one whose tasks are built now, of `loops`; tasks of the others get its number in
    their names. Until the phases are known, a task's `phase` is that of its loop, or 0.
    `segment` is that of the tasks built now in the last loop; `made_in` has it by register.
    """

    mesh: Mesh
    machine: Machine
    registers: dict[str, Register] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    loop: int = 0
    loops: int = 0
    segment: int = 0
    made_in: dict[str, int] = field(default_factory=dict)

    def name(self, base: str, *layouts: Layout) -> str:
        """A name for what has these layouts, in the loop that is built now."""
        early = 0 < self.loop < self.loops
        return f"{base}@{self.loop}" if early and self._fires_in_loop(*layouts) else base

    def _fires_in_loop(self, *layouts: Layout) -> bool:
        return self.mesh.timed and any(layout[0] != B for layout in layouts)

    def add(self, task: Task, *layouts: Layout) -> None:
        """A task on operands of these layouts."""
        if self._fires_in_loop(*layouts):
            task = replace(task, phase=loop_phase(self.loop))
            if self.loop == self.loops:
                task = replace(task, segment=self.segment)
                self.made_in.update(dict.fromkeys(task.outputs, self.segment))
        self.tasks.append(task)

    def register(
        self, name: str, shape: tuple[int, ...], dtype: str, layout: Layout, **more: Any
    ) -> Register:
        """A new register; its offset is set by the memory step."""
        nbytes = prod(local_shape(shape, layout, self.mesh)) * itemsize(dtype)
        made = Register(name, shape, dtype, layout, 0, nbytes, **more)
        self.registers[name] = made
        return made

    def compute(
        self, name: str, op: Op, inputs: list[Register], outputs: list[Register], where: str
    ) -> None:
        """A compute task, priced on its largest shard."""
        kinds = (tuple((r.shape, r.dtype, r.layout) for r in x) for x in (inputs, outputs))
        task = replace(
            priced(op, *kinds, self.mesh, self.machine),
            name=name,
            inputs=tuple(r.name for r in inputs),
            outputs=tuple(r.name for r in outputs),
            where=where,
        )
        self.add(task, *(r.layout for r in (*inputs, *outputs)))

    def convert(self, source: Register, target: Layout, where: str, *, copy: str = "") -> Register:
        """The register that holds `source` in another layout; consumers share it.

        Those that name a `copy` share one of their own.
        """
        current = source
        hops = boxing.path(
            source.layout, target, source.shape, source.dtype, self.mesh, self.machine
        )
        base = f"{source.name}@{copy}" if copy else source.name
        for hop in hops:
            target_name = f"{base}>{layout_text(hop.target).replace(' ', '')}"
            name = self.name(target_name, current.layout, hop.target)
            if self.made_in.get(name, 0) > self.segment:
                name = f"{name}%{self.segment}"  # the other one is made too late for this segment
            if name not in self.registers:
                self._hop(hop, current, name, where)
            current = self.registers[name]
        return current

    def send(self, transfer: Transfer, source: Register, where: str) -> None:
        """A task that sends a register to the stage that the transfer is for."""
        stage = transfer.target
        self.add(
            Task(
                self._message_name(transfer, f">stage{stage}"),
                SEND,
                f"{SEND}.{stage}.{transfer.lane}",
                SEND,
                inputs=(source.name,),
                attributes=transfer.attributes(SEND),
                nbytes=transfer.nbytes,
                seconds=transfer.seconds,
                where=where,
            ),
            source.layout,
        )

    def _message_name(self, transfer: Transfer, end: str) -> str:
        whole = ".whole" if self.loops and not transfer.loop else ""
        return self.name(f"{transfer.tensor.name}{whole}{end}", transfer.layout)

    def receive(self, transfer: Transfer) -> Register:
        """The register that holds what a transfer brings."""
        tensor, stage = transfer.tensor, transfer.source
        name = self._message_name(transfer, f"<stage{stage}")
        made = self.register(name, tensor.shape, tensor.dtype, transfer.received)
        self.add(
            Task(
                name,
                RECEIVE,
                f"{RECEIVE}.{stage}.{transfer.lane}",
                RECEIVE,
                outputs=(name,),
                attributes=transfer.attributes(RECEIVE),
                nbytes=transfer.nbytes,
                seconds=transfer.seconds,
                where=tensor.where,
                phase=transfer.phase,
            ),
            transfer.received,
        )
        return made

    def redirect(self, made: Register, target: Register) -> None:
        """Let the newest task give its output to `target`, and no register hold it."""
        self.tasks[-1] = replace(self.tasks[-1], outputs=(target.name,))
        del self.registers[made.name]

    def _hop(self, hop: Hop, source: Register, name: str, where: str) -> None:
        made = self.register(name, source.shape, source.dtype, hop.target)
        axis = self.mesh.joined(hop.axes)
        if hop.kind in boxing.LOCAL:
            self.compute(name, _local_op(hop), [source], [made], where)
            if axis != MICRO:
                self.tasks[-1] = replace(self.tasks[-1], axis=axis)
            return
        task = Task(
            name,
            "collective",
            communication_stream(axis),
            hop.kind,
            inputs=(source.name,),
            outputs=(name,),
            attributes=_describe(hop),
            axis=axis,
            seconds=hop.seconds,
            where=where,
        )
        staging = staging_bytes(task, source, made, self.mesh)
        self.add(replace(task, workspace=(0, staging)), hop.source, hop.target)


_Operands = tuple[tuple[Shape, str, Layout], ...]
"""Of each operand the shape, dtype and layout."""


@cache
def priced(op: Op, inputs: _Operands, outputs: _Operands, mesh: Mesh, machine: Machine) -> Task:
    """A compute task that still lacks names: worked out once for all nodes that are alike."""
    operands = (*inputs, *outputs)
    dtypes = tuple(dtype for _, dtype, _ in operands)
    layouts = [layout for _, _, layout in operands]
    given, made = tuple(layouts[: len(inputs)]), tuple(layouts[len(inputs) :])

    def shapes(chosen: Iterable[Layout]) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """The local shapes of the inputs, and of the outputs."""
        pairs = zip(operands, chosen, strict=True)
        local = tuple(local_shape(shape, layout, mesh) for (shape, _, _), layout in pairs)
        return local[: len(inputs)], local[len(inputs) :]

    ins, outs = shapes(layouts)
    likely = shapes(as_expected(op, given, made))
    return Task(
        "",
        "compute",
        COMPUTE,
        op.name,
        attributes=op.attributes(),
        workspace=(0, op.workspace(ins, outs, dtypes[len(inputs)])),
        flops=op.flops(*likely),
        nbytes=compute_bytes(op, *likely, dtypes),
        seconds=op_seconds(machine, op, *likely, dtypes),
    )


def loop_phase(loop: int) -> int:
    """The phase of a loop, which are numbered from 1."""
    return 2 * loop - 1


def _local_op(hop: Hop) -> Op:
    cls = REGISTRY[boxing.LOCAL[hop.kind]]
    if hop.kind == "accumulate":
        return cls(_describe(hop)["reduce"])  # type: ignore[call-arg]
    return cls()


def _describe(hop: Hop) -> dict[str, Any]:
    """The attributes of a hop's task, from what it changes on each of its axes."""
    if hop.kind == "exchange":
        return {}
    source, target = hop.source[hop.axes[0]], hop.target[hop.axes[0]]
    match hop.kind:
        case "all_gather":
            return {"dim": source.dim}  # type: ignore[union-attr]
        case "all_to_all":
            return {"source": source.dim, "target": target.dim}  # type: ignore[union-attr]
        case "reduce_scatter":
            return {"dim": target.dim, "reduce": source.reduce}  # type: ignore[union-attr]
    return {"reduce": source.reduce}  # type: ignore[union-attr]
