"""Bind: from a program to ready-made calls on arrays that exist.

What a step does on one rank is a list of calls in a fixed order, see `plan.calls`. Nothing is
looked up while a step runs. Loops over micro-batches are written out: each firing is a call of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

import numpy as np

from mpiflow.errors import PlanError
from mpiflow.exec.arena import Arena
from mpiflow.exec.collective import bind_collective, bind_message
from mpiflow.exec.transport import Group, Message
from mpiflow.graph.mesh import STAGE, Mesh
from mpiflow.graph.op import OUT, build_op
from mpiflow.graph.sbp import box_shape
from mpiflow.plan import calls as calling
from mpiflow.plan.records import RECEIVE, SEND, Program, Register, Task
from mpiflow.plan.slice import RankPlan
from mpiflow.plan.unroll import unroll

Call = Callable[[], Any]


def _giving_nothing(call: Call) -> None:
    """A kernel of the user's own: one that returns its result has not written it."""
    if call() is not None:
        raise TypeError(
            "the kernel gives something back, which nobody takes; it writes `out`: with out=out,"
            " or out[...] = ..."
        )


class Shard:
    """What a kernel sees of the plan; see `graph.op.ShardView`."""

    __slots__ = ("_first", "_starts", "work", "xp")

    def __init__(
        self,
        xp: Any,
        work: np.ndarray | None,
        starts: dict[int | str, tuple[int, ...]],
        first: bool,
    ) -> None:
        self.xp, self.work, self._starts, self._first = xp, work, starts, first

    def start(self, operand: int | str, dim: int) -> int:
        """The logical index at which `dim` of an input, or of the output, begins."""
        return self._starts[operand][dim]

    def first(self) -> bool:
        """Whether this rank is the first along the task's axis, or axes."""
        return self._first


@dataclass(frozen=True, slots=True)
class Step:
    """The calls of one step for one phase of the slots; `tasks` names the task of each."""

    calls: tuple[Call, ...]
    tasks: tuple[Task, ...]


class Binder:
    """Makes the calls of one program on one rank.

    `rank` is the plan seen from it, on the mesh of the program; `whole` is that of all stages.
    """

    def __init__(
        self,
        program: Program,
        registers: dict[str, Register],
        rank: RankPlan,
        whole: Mesh,
        arena: Arena,
        groups: dict[str, Group],
        check: Callable[[], None],
    ) -> None:
        self.program = unroll(program)
        self.registers = {**registers, **{r.name: r for r in self.program.registers}}
        self.rank, self.whole, self.arena = rank, whole, arena
        self.groups, self.check = groups, check
        self.boxes = {name: rank.box(register) for name, register in self.registers.items()}
        slots = {r.slots for r in program.registers if not r.rewound} - {1}
        if len(slots) > 1:
            raise PlanError(f"program {program.name} has registers of different slot counts")
        turns = program.micro_batches
        self.phases = lcm(turns, *slots) // turns
        self.order = calling.calls_of(self.program, self.registers)

    def views(self, phase: int) -> dict[str, np.ndarray]:
        """An array for every register and variable, in the slot of this phase."""
        return {
            name: self.arena.view(
                register.offset + self._slot(register, phase) * register.nbytes,
                box_shape(self.boxes[name]),
                register.dtype,
            )
            for name, register in self.registers.items()
        }

    def _slot(self, register: Register, phase: int) -> int:
        steps = 0 if register.rewound else phase * self.program.micro_batches
        return (steps + register.micro) % register.slots

    def step(self, phase: int, wait_read: Callable[[int], None], give_back: Call) -> Step:
        """The calls of a step in this phase; `wait_read` is told the micro-batch to wait for."""
        views = self.views(phase)
        messages: dict[str, Message] = {}
        calls: list[Call] = []
        for action, task in self.order:
            match action:
                case calling.KERNEL:
                    calls.append(self.kernel(task, views))
                case calling.START:
                    messages[task.name] = message = self._message(task, views)
                    calls.append(message.start)
                case calling.WAIT:
                    calls.append(partial(messages.pop(task.name).wait, self.check))
                case calling.FREE:
                    calls.append(give_back)
                case _:
                    calls.append(partial(wait_read, task.micro))
        return Step(tuple(calls), tuple(task for _, task in self.order))

    def _message(self, task: Task, views: dict[str, np.ndarray]) -> Message:
        if task.kind in (SEND, RECEIVE):
            return bind_message(
                task, self.rank, self.registers, views, self.groups[STAGE], self.whole
            )
        group = self.groups[task.axis]
        return bind_collective(task, self.rank, self.registers, views, self.arena, group)

    def kernel(self, task: Task, views: dict[str, np.ndarray]) -> Call:
        """A compute task as a call without arguments."""
        op = build_op(task.op, task.attributes)
        starts: dict[int | str, tuple[int, ...]] = {
            i: self._start(name) for i, name in enumerate(task.inputs)
        }
        starts[OUT] = self._start(task.outputs[0])
        offset, nbytes = task.workspace
        work = self.arena.scratch(offset, nbytes) if nbytes else None
        axes = self.rank.mesh.along(task.axis) if task.axis else (0,)
        first = not any(self.rank.coordinates[axis] for axis in axes)
        shard = Shard(self.arena.device.xp, work, starts, first)
        outs = tuple(views[name] for name in task.outputs)
        inputs = (views[name] for name in task.inputs)
        call = op.bind(shard, outs[0] if len(outs) == 1 else outs, *inputs)
        return partial(_giving_nothing, call) if op.source else call

    def _start(self, name: str) -> tuple[int, ...]:
        return tuple(start for start, _ in self.boxes[name])
