"""Marked: one step of a program as a marked graph: firings, and what each of them waits for.

A firing is a task for one micro-batch. Its number grows along every stream: a step goes through
turns, the tasks of a phase or segment for a micro-batch, which follow one another on all streams.
Arcs without a token are waits:

    for what it reads               the firing that makes it; of a sum, the last of its loop
    by its `after`                  the same
    by the order of its stream      the firing before
    by the order of the turns       what begins a turn: the last computation of the turns before
    for a slot to fill              those that used what the slot held, so many micro-batches ago
    to meet the other end           of a message: both ends are one event, as nothing is buffered

A collective is one event for all its members: all ranks of a stage have the same program, so one
stands for all. Arcs with a token (a slot that an earlier step has freed, the end of a step) delay
but never block, so they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mpiflow.graph.sbp import B
from mpiflow.plan.places import AHEAD
from mpiflow.plan.records import COMPUTE, RECEIVE, Program, Task
from mpiflow.plan.registers import holder
from mpiflow.plan.verify_layout import label

Turn = tuple[int, int]
"""A phase, and the segment of it; -1 for all of it."""


class Firing(NamedTuple):
    """A task, by its place in the program, for a micro-batch; `turn` is the place of its turn."""

    number: int
    task: int
    micro: int
    turn: int


@dataclass(frozen=True, slots=True)
class Wait:
    """An arc from a task: of the same micro-batch, of one `back` before it, or of `fixed`."""

    task: int
    why: str
    back: int = 0
    fixed: int = -1


class Step:
    """The firings of one step of a program whose names and phases are in order.

    Of each loop, the first `micro_batches` (default: all).
    """

    def __init__(self, program: Program, micro_batches: int | None = None) -> None:
        self.program, self.tasks = program, program.tasks
        self.count = min(micro_batches or program.micro_batches, program.micro_batches)
        self.registers = {register.name: register for register in program.registers}
        self.index = {task.name: i for i, task in enumerate(self.tasks)}
        self.makers = {
            n: i for i, t in enumerate(self.tasks) for n in t.outputs if n in self.registers
        }
        self.users: dict[str, list[int]] = {}
        for i, task in enumerate(self.tasks):
            for name in dict.fromkeys(task.inputs):
                self.users.setdefault(name, []).append(i)
        self.streams = [stream for stream, _ in program.order]
        self.stream = {i: s for s, (_, order) in enumerate(program.order) for i in order}
        self.members: dict[Turn, list[list[int]]] = {}  # of a turn, by stream
        self.turns = list(self._turns())
        self._numbers: list[list[int]] = [[] for _ in self.tasks]  # by micro-batch
        fired = (i for turn, _ in self.turns for tasks in self.members[turn] for i in tasks)
        for number, i in enumerate(fired):
            self._numbers[i].append(number)
        self.size = sum(map(len, self._numbers))
        self.waits = [list(self._arcs(i, task)) for i, task in enumerate(self.tasks)]
        self._add_slots()
        self._beginning, self._computed = self._begin()

    def looped(self, task: int) -> bool:
        """Whether a task fires once for each micro-batch."""
        return self.program.micro_batches > 1 and self.tasks[task].phase % 2 == 1

    def in_parts(self, name: str) -> bool:
        """Whether each micro-batch has a register of that name of its own."""
        maker = self.makers.get(name)
        return maker is not None and self.looped(maker) and self.registers[name].layout[0] != B

    def number(self, task: int, micro: int = 0) -> int:
        """Of a task's firing for a micro-batch; that is 0 where it fires once, -1 for the last."""
        return self._numbers[task][micro]

    def along(self, stream: int) -> Iterator[Firing]:
        """The firings of a stream, in its order."""
        for place, (turn, micro) in enumerate(self.turns):
            for task in self.members[turn][stream]:
                yield Firing(self._numbers[task][micro], task, micro, place)

    def before(self, firing: Firing) -> Iterator[tuple[int, int, str]]:
        """Task and micro-batch of each firing that one waits for, and why."""
        _, task, micro, turn = firing
        for wait in self.waits[task]:
            other = wait.fixed if wait.fixed >= 0 else micro - wait.back
            if other >= 0:
                yield wait.task, other, wait.why
        if task in self._beginning and (computed := self._computed[turn]):
            yield *computed, "by the order of the turns"

    def label(self, number: int) -> str:
        """A firing in the user's words."""
        task = next(i for i, numbers in enumerate(self._numbers) if number in numbers)
        micro = self._numbers[task].index(number) + 1
        return label(self.tasks[task]) + f" of micro-batch {micro}" * self.looped(task)

    def _turns(self) -> Iterator[tuple[Turn, int]]:
        """The turns and their micro-batches, which any one segment is done of in their order."""
        phases = sorted({task.phase for task in self.tasks})
        pipelined = ([-1] + [p for p in phases if p % 2 and self.program.sequence])[-1]
        for stream, (_, order) in enumerate(self.program.order):
            for i in order:
                phase, segment = self.tasks[i].phase, self.tasks[i].segment
                turn = phase, segment if phase == pipelined else -1
                self.members.setdefault(turn, [[] for _ in self.streams])[stream].append(i)
        for phase in phases:
            turns = [(-1, k) for k in range(self.count if phase % 2 else 1)]
            for segment, micro in self.program.sequence if phase == pipelined else turns:
                if (phase, segment) in self.members and micro < self.count:
                    yield (phase, segment), micro

    def _arcs(self, i: int, task: Task) -> Iterator[Wait]:
        """For inputs and by `after`, but for what the order of the stream says anyway."""
        arcs = [(self.makers[n], f"for {n}", self.in_parts(n)) for n in task.inputs
                if n in self.makers]  # fmt: skip
        arcs += [(self.index[n], "by its `after`", False) for n in task.after]
        for other, why, parts in arcs:
            if self.stream[other] == self.stream[i] and self.number(other) < self.number(i):
                continue
            same = parts or (self.looped(other) and self.tasks[other].phase == task.phase)
            yield Wait(other, why, fixed=-1 if same else len(self._numbers[other]) - 1)

    def _add_slots(self) -> None:
        """Let what fills a slot anew in a step wait for those on other streams that used it.

        The slots of what runs ahead are given back together, all others one by one.
        """
        for name, register in self.registers.items():
            maker, slots = self.makers[holder(name, self.registers)], register.slots
            if self.tasks[maker].stream in AHEAD and self.looped(maker):
                slots = min(self.registers[n].slots for n in self.tasks[maker].outputs)
            elif not register.rewound:
                continue
            for user in self.users.get(name, ()):
                if self.stream[user] != self.stream[maker]:
                    self.waits[maker].append(Wait(user, f"for a slot of {name}", back=slots))

    def _begin(self) -> tuple[set[int], list[tuple[int, int] | None]]:
        """Tasks that begin a turn, and by turn the computation that what begins it waits for.

        They need nothing of their turn but what runs ahead of it. The first turn of a loop waits
        for none, unless it is of segments, whose memory others use before the loop.
        """
        needs = self.program.needs()
        turn = {task.name: (task.phase, task.segment) for task in self.tasks}
        # May come before its turn: what is read, and what other stages send.
        ahead = {t.name for t in self.tasks if t.stream in AHEAD or t.kind == RECEIVE}
        beginning = set()
        for i, task in enumerate(self.tasks):
            needed = {name for name in needs[task.name] if turn[name] == turn[task.name]}
            apart = task.kind == COMPUTE or task.name in ahead
            if self.looped(i) and not apart and needed <= ahead:
                beginning.add(i)
        computed: list[tuple[int, int] | None] = []
        last: tuple[int, int] | None = None
        compute = self.streams.index(COMPUTE) if COMPUTE in self.streams else None
        for (phase, segment), micro in self.turns:
            within = last and (segment >= 0 or self.tasks[last[0]].phase == phase)
            computed.append(last if within else None)
            if compute is not None and (tasks := self.members[phase, segment][compute]):
                last = tasks[-1], micro
        return beginning, computed
