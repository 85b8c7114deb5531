"""Bind: from a program to ready-made calls on arrays that exist.

What a step does on one rank is a list of calls in a fixed order: kernels as the compute stream
fires them, collectives started as soon as their inputs are there and waited for just before their
first consumer, read slots waited for and given back. Nothing is looked up while a step runs.
Loops over micro-batches are written out: each firing is a call of its own.
"""

from __future__ import annotations

from collections import deque
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
from mpiflow.graph.mesh import STAGE
from mpiflow.graph.op import OUT, build_op
from mpiflow.graph.sbp import box_shape
from mpiflow.plan.records import COMPUTE, READ, RECEIVE, SEND, WRITE, Program, Register, Task
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

    `rank` is the plan seen from it, on the mesh of the program.
    """

    def __init__(
        self,
        program: Program,
        registers: dict[str, Register],
        rank: RankPlan,
        arena: Arena,
        groups: dict[str, Group],
        check: Callable[[], None],
    ) -> None:
        self.program = unroll(program)
        self.registers = {**registers, **{r.name: r for r in self.program.registers}}
        self.rank, self.arena, self.groups, self.check = rank, arena, groups, check
        self.boxes = {name: rank.box(register) for name, register in self.registers.items()}
        slots = {r.slots for r in program.registers if not r.rewound} - {1}
        if len(slots) > 1:
            raise PlanError(f"program {program.name} has registers of different slot counts")
        turns = program.micro_batches
        self.phases = lcm(turns, *slots) // turns

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
        walk = _Walk(self, self.views(phase), wait_read, give_back)
        walk.run()
        return Step(tuple(walk.calls), tuple(walk.tasks))

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


class _Walk:
    """Merges the streams that one thread serves into one list of calls."""

    def __init__(
        self,
        binder: Binder,
        views: dict[str, np.ndarray],
        wait_read: Callable[[int], None],
        give_back: Call,
    ) -> None:
        self.binder, self.views = binder, views
        self.wait_read, self.give_back = wait_read, give_back
        program = binder.program
        self.tasks_by_name = {task.name: task for task in program.tasks}
        self.needs = program.needs()
        order = dict(program.order)
        self.compute = [program.tasks[i] for i in order.get(COMPUTE, ())]
        self.queues = {
            stream: [program.tasks[i] for i in indices]
            for stream, indices in order.items()
            if stream not in (COMPUTE, READ, WRITE)
        }
        self.unused = deque(self._users_of_reads())
        self.uses: dict[str, list[set[str]]] = {}  # of each task, the sets above that it is in
        for users in self.unused:
            for name in users:
                self.uses.setdefault(name, []).append(users)
        self.started: dict[str, list[tuple[Task, Message]]] = {s: [] for s in self.queues}
        self.done: set[str] = set()
        self.sending = False
        self.calls: list[Call] = []
        self.tasks: list[Task] = []

    def run(self) -> None:
        """Walk the compute stream; what is left of the others follows."""
        self._start_ready()
        for task in self.compute:
            for name in self.needs[task.name]:
                self._complete(name)
            self._emit(task, self.binder.kernel(task, self.views))
            self._finish(task)
            self._start_ready()
        for stream, queue in self.queues.items():
            while queue or self.started[stream]:
                self._complete((queue or [self.started[stream][-1][0]])[-1].name)

    def _users_of_reads(self) -> list[set[str]]:
        """The tasks that use what each read gives, in the order of the reads."""
        tasks = self.binder.program.tasks
        reads = [t for t in tasks if t.stream == READ]
        number = {name: k for k, read in enumerate(reads) for name in read.outputs}
        users: list[set[str]] = [set() for _ in reads]
        for task in tasks:
            for name in number.keys() & task.inputs:
                users[number[name]].add(task.name)
        return users

    def _finish(self, task: Task) -> None:
        """The task is done; give back the slots that nobody needs any more, the oldest first."""
        self.done.add(task.name)
        for users in self.uses.get(task.name, ()):
            users.remove(task.name)
        while self.unused and not self.unused[0]:
            self.unused.popleft()
            self._emit(task, self.give_back)

    def _emit(self, task: Task, call: Call) -> None:
        self.calls.append(call)
        self.tasks.append(task)

    def _complete(self, name: str) -> None:
        """Emit what it takes for a task to be done."""
        if name in self.done:
            return
        task = self.tasks_by_name[name]
        if task.stream == READ:
            self._emit(task, partial(self.wait_read, task.micro))
            self.done.add(name)
            return
        queue = self.queues[task.stream]
        while task in queue:
            self._start(queue[0])
        self._wait_up_to(task)

    def _start_ready(self) -> None:
        """Start every collective whose turn it is and whose inputs are there."""
        for queue in self.queues.values():
            while queue and all(name in self.done for name in self.needs[queue[0].name]):
                self._start(queue[0])

    def _start(self, task: Task) -> None:
        """Start a task as soon as what it needs is done, unless a send has had to do so by then."""
        for name in self.needs[task.name]:
            self._complete(name)
        running = self.started[task.stream]
        for earlier, _ in list(running):
            if task.kind == "collective" and self._touch(earlier, task):
                self._wait_up_to(earlier)
        if task not in self.queues[task.stream]:
            return
        self.queues[task.stream].remove(task)
        exchange = self._bound(task)
        running.append((task, exchange))
        self._emit(task, exchange.start)

    def _bound(self, task: Task) -> Message:
        binder = self.binder
        if task.kind in (SEND, RECEIVE):
            return bind_message(task, self.views, binder.groups[STAGE])
        return bind_collective(
            task, binder.rank, binder.registers, self.views, binder.arena, binder.groups[task.axis]
        )

    def _send_computed(self) -> None:
        """Start every send of what is computed, as another stage may wait for it.

        This comes before every wait: the stages that are waited for get all that they can have.
        First what needs no other wait, then what comes out of collectives, which all ranks of the
        stage can end, and last what fills memory that has to be sent before.
        """
        if self.sending:
            return
        self.sending = True
        for kinds in ((), ("collective",), ("collective", SEND)):
            for stream, queue in self.queues.items():
                while stream.startswith(SEND) and queue and self._is_computed(queue[0], kinds):
                    self._start(queue[0])
        self.sending = False

    def _is_computed(self, task: Task, kinds: tuple[str, ...]) -> bool:
        """Whether nothing is missing for a task but some of these kinds that can be completed."""
        missing = [self.tasks_by_name[name] for name in self.needs[task.name]]
        missing = [need for need in missing if need.name not in self.done]
        return all(need.kind in kinds and self._is_computed(need, kinds) for need in missing)

    def _wait_up_to(self, task: Task) -> None:
        """Wait for a collective and all before it on its stream, in order."""
        self._send_computed()
        running = self.started[task.stream]
        while task.name not in self.done:
            first, collective = running.pop(0)
            self._emit(first, partial(collective.wait, self.binder.check))
            self._finish(first)

    def _touch(self, a: Task, b: Task) -> bool:
        """Whether two tasks use the same memory, so that they may not overlap in time."""
        return any(
            x < b_stop and b_start < x_stop
            for x, x_stop in self._memory(a)
            for b_start, b_stop in self._memory(b)
        )

    def _memory(self, task: Task) -> list[tuple[int, int]]:
        spans = [
            (r.offset, r.offset + r.nbytes * r.slots)
            for r in (self.binder.registers[n] for n in (*task.inputs, *task.outputs))
        ]
        offset, nbytes = task.workspace
        return [*spans, (offset, offset + nbytes)]
