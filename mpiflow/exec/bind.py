"""Bind: from a program to ready-made calls on arrays that exist.

What a step does on one rank is a lane for each stream, see `exec.engine`. Nothing is looked up
while a step runs. Loops over micro-batches are written out: each firing is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

import numpy as np

from mpiflow.exec.abreast import Operand, joined
from mpiflow.exec.arena import Arena
from mpiflow.exec.collective import bind_collective, bind_message
from mpiflow.exec.feed import FeedLane
from mpiflow.exec.lanes import DeviceLane, KernelLane, Lane, MessageLane, ReadLane
from mpiflow.exec.segments import Call, Segment
from mpiflow.exec.transport import Group, Message
from mpiflow.graph.mesh import STAGE, Mesh
from mpiflow.graph.op import OUT, build_op
from mpiflow.graph.sbp import box_shape
from mpiflow.plan.handshakes import Item, items_of
from mpiflow.plan.places import CUDA_MPI, D2H, FEED, H2D, NCCL, workspace_space
from mpiflow.plan.records import COMPUTE, READ, RECEIVE, SEND, WRITE, Program, Register, Task
from mpiflow.plan.slice import RankPlan
from mpiflow.plan.unroll import unroll

_LONG_KERNEL_SECONDS = 1e-3
"""For so long a message may wait for the next look at it."""


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
    """The streams of one step for one phase of the slots."""

    lanes: tuple[Lane, ...]

    @property
    def kernels(self) -> KernelLane | None:
        """That of compute, if it has any."""
        return next((lane for lane in self.lanes if isinstance(lane, KernelLane)), None)

    @property
    def on_device(self) -> tuple[DeviceLane, ...]:
        """Those that a device goes through by itself."""
        return tuple(lane for lane in self.lanes if isinstance(lane, DeviceLane))

    @property
    def feed(self) -> FeedLane | None:
        """That of the copies of what is read, if a device has it."""
        return next((lane for lane in self.lanes if isinstance(lane, FeedLane)), None)

    @property
    def reads(self) -> ReadLane | None:
        """That of what is read, if anything is."""
        return next((lane for lane in self.lanes if isinstance(lane, ReadLane)), None)


class Binder:
    """Makes the lanes of one program on one rank.

    `rank` is the plan seen from it, on the mesh of the program; `whole` is that of all stages.
    `give_back` is called with a stream that no longer needs what was read for a micro-batch.
    """

    def __init__(
        self,
        program: Program,
        registers: dict[str, Register],
        rank: RankPlan,
        whole: Mesh,
        arenas: dict[str, Arena],
        groups: dict[str, Group],
        direct: dict[str, Group],
        give_back: Callable[[str, int], None],
        *,
        polled: bool = True,
    ) -> None:
        self.program = unroll(program)
        self.registers = {**registers, **{r.name: r for r in self.program.registers}}
        self.rank, self.whole, self.arenas = rank, whole, arenas
        self.groups, self.direct = groups, direct
        self.give_back, self.polled = give_back, polled
        self.boxes = {name: rank.box(register) for name, register in self.registers.items()}
        slots = {r.slots for r in program.registers if not r.rewound}
        turns = program.micro_batches
        self.items = items_of(self.program, self.registers)
        # What feeds the next step has begun while the last is at work: each has lanes of its own.
        self.phases = max(lcm(turns, *slots) // turns, 2 if FEED in self.items else 1)
        self.reads = [task for task in self.program.tasks if task.stream == READ]
        self.last_uses = _last_uses(self.program, self.reads)

    @property
    def communicates(self) -> bool:
        """Whether there is anything but kernels and reads."""
        return not self.items.keys() <= {COMPUTE, READ}

    @property
    def has_long_kernels(self) -> bool:
        """Whether most of the time, as predicted, is that of kernels that keep messages waiting."""
        seconds = [task.seconds for task in self.program.tasks if task.stream == COMPUTE]
        return 2 * sum(s for s in seconds if s > _LONG_KERNEL_SECONDS) > sum(seconds)

    @property
    def users(self) -> list[tuple[str, ...]]:
        """Of each read, the streams that use what it gives."""
        streams = {task.name: task.stream for task in self.program.tasks}
        return [
            tuple(streams[name] for name, found in self.last_uses.items() if k in found)
            for k in range(len(self.reads))
        ]

    def views(self, phase: int) -> dict[str, np.ndarray]:
        """An array for every register and variable, in the slot of this phase."""
        return {
            name: self.arenas[register.space].view(
                register.offset + self._slot(register, phase) * register.nbytes,
                box_shape(self.boxes[name]),
                register.dtype,
            )
            for name, register in self.registers.items()
        }

    def _slot(self, register: Register, phase: int) -> int:
        steps = 0 if register.rewound else phase * self.program.micro_batches
        return (steps + register.micro) % register.slots

    def step(self, phase: int) -> Step:
        """The lanes of a step in this phase."""
        views = self.views(phase)
        lanes = {stream: self._lane(stream, items, views) for stream, items in self.items.items()}
        for lane in lanes.values():
            lane.tie(lanes)
        return Step(tuple(lanes.values()))

    def _lane(self, stream: str, items: tuple[Item, ...], views: dict[str, np.ndarray]) -> Lane:
        if stream == READ:
            return ReadLane(stream, items)
        if stream == COMPUTE:
            segments = tuple(self._segment(item, views) for item in items)
            return KernelLane(stream, items, segments)
        tasks = [item.tasks[0] for item in items]
        after = tuple(self._after(task) for task in tasks)
        routes = {task.route for task in tasks}
        if tasks[0].kind in (H2D, D2H) or NCCL in routes:
            segments = tuple(self._copies_or_message(item, views) for item in items)
            kind = FeedLane if stream == FEED else DeviceLane
            lane = kind(stream, items, segments)
            lane.after = list(after)
            return lane
        messages = tuple(self._message(task, views) for task in tasks)
        polled = self.polled or CUDA_MPI in routes  # what the device does for it wakes nobody
        return MessageLane(stream, items, messages, after, polled=polled)

    def _segment(self, item: Item, views: dict[str, np.ndarray]) -> Segment:
        """Its kernels; where one is the last to use what was read, the slot is given back."""
        calls: list[Call] = []
        tasks: list[Task] = []
        for task in item.tasks:
            call = self.kernel(task, views)
            after = self._after(task)
            calls += [call, *after]
            tasks += [task] * (1 + len(after))
        return Segment(tuple(calls), tuple(tasks), item.awaited)

    def _copies_or_message(self, item: Item, views: dict[str, np.ndarray]) -> Segment:
        (task,) = item.tasks
        device = self.arenas[""].device
        if task.route == NCCL:
            calls = [device.message(self._message(task, views))]
        else:
            pairs = zip(task.outputs, task.inputs, strict=True)
            calls = [device.copier(views[target], views[source]) for target, source in pairs]
        return Segment(tuple(calls), (task,) * len(calls), item.awaited)

    def _after(self, task: Task) -> tuple[Call, ...]:
        """What follows a task: its stream gives back what no other task of it uses."""
        found = self.last_uses.get(task.name, ())
        return tuple(partial(self.give_back, task.stream, k) for k in found)

    def _message(self, task: Task, views: dict[str, np.ndarray]) -> Message:
        groups = self.direct if task.route in (NCCL, CUDA_MPI) else self.groups
        if task.kind in (SEND, RECEIVE):
            return bind_message(task, self.rank, self.registers, views, groups[STAGE], self.whole)
        group = groups[task.axis]
        arena = self.arenas[workspace_space(task.route)]
        return bind_collective(task, self.rank, self.registers, views, arena, group)

    def kernel(self, task: Task, views: dict[str, np.ndarray]) -> Call:
        """A compute task as a call without arguments."""
        op = build_op(task.op, task.attributes)
        starts: dict[int | str, tuple[int, ...]] = {
            i: self._start(name) for i, name in enumerate(task.inputs)
        }
        starts[OUT] = self._start(task.outputs[0])
        offset, nbytes = task.workspace
        arena = self.arenas[workspace_space(task.route)]
        work = arena.scratch(offset, nbytes) if nbytes else None
        axes = self.rank.mesh.along(task.axis) if task.axis else (0,)
        first = not any(self.rank.coordinates[axis] for axis in axes)
        shard = Shard(arena.device.xp, work, starts, first)
        op, inputs, outs = joined(
            op,
            [Operand(self.registers[name], views[name]) for name in task.inputs],
            [Operand(self.registers[name], views[name]) for name in task.outputs],
            self.arenas,
        )
        call = op.bind(shard, outs[0] if len(outs) == 1 else tuple(outs), *inputs)
        return partial(_giving_nothing, call) if op.source else call

    def _start(self, name: str) -> tuple[int, ...]:
        return tuple(start for start, _ in self.boxes[name])


def _last_uses(program: Program, reads: list[Task]) -> dict[str, list[int]]:
    """By task: of which reads it is the last on its stream to use what they give."""
    number = {name: k for k, read in enumerate(reads) for name in read.outputs}
    last: dict[tuple[str, int], str] = {}
    for stream, order in program.order:
        for task in (program.tasks[i] for i in order if stream not in (READ, WRITE)):
            for name in number.keys() & set(task.inputs):
                last[stream, number[name]] = task.name
    found: dict[str, list[int]] = {}
    for (_, k), name in sorted(last.items()):
        found.setdefault(name, []).append(k)
    return found
