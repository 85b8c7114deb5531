"""Marked: a step of a program as a marked graph, and the walk that proves that it ends.

A firing is a task for one micro-batch. It has a number, which grows along every stream; the turns
of a step, in which streams do the tasks of a phase or segment, follow one another on all of them.
What a firing waits for are the arcs without a token:

    for what it reads                 the firing that makes it; of a sum, the last of its loop
    by its `after`                    the same
    by the order of its stream        the firing before
    by the order of the turns         what begins a turn: the last computation of the turns before
    for a slot to fill                those that use what the slot held, so many firings ago
    to meet the other end             of a message, both ends of which are one event

Collectives are one event too: all ranks of a stage have the same program, so one stands for all.
Arcs with a token (slots that the step before has freed, the end of a step) delay but never block.
All rates are 1, so a step ends whatever the timing exactly if no circle is without a token, which
is if firing whatever can fire, in any order, comes to an end of all streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpiflow.errors import VerifyError
from mpiflow.graph.sbp import B
from mpiflow.plan.places import AHEAD
from mpiflow.plan.records import COMPUTE, RECEIVE, SEND, Program, Register, Task
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
    """The firings of one step of a program, and what each of them waits for."""

    def __init__(self, program: Program) -> None:
        self.program, self.count = program, program.micro_batches
        self.tasks = program.tasks
        self.registers = {register.name: register for register in program.registers}
        self.makers = {
            n: i for i, t in enumerate(self.tasks) for n in t.outputs if n in self.registers
        }
        self.index = {task.name: i for i, task in enumerate(self.tasks)}
        self.users: dict[str, list[int]] = {}
        for i, task in enumerate(self.tasks):
            for name in dict.fromkeys(task.inputs):
                self.users.setdefault(name, []).append(i)
        self.streams = [stream for stream, _ in program.order]
        self.stream = {i: s for s, (_, order) in enumerate(program.order) for i in order}
        self.last_loop = max((t.phase for t in self.tasks if t.phase % 2), default=-1)
        self.keys = [self._key(task) for task in self.tasks]
        self._number()
        self.waits = [tuple(self._waits(i, task)) for i, task in enumerate(self.tasks)]
        self._add_slots()

    def looped(self, task: int) -> bool:
        """Whether a task fires once for each micro-batch."""
        return self.count > 1 and self.tasks[task].phase % 2 == 1

    def in_parts(self, register: Register) -> bool:
        """Whether each micro-batch has a register of its own."""
        return (
            self.count > 1 and register.layout[0] != B and self.looped(self.makers[register.name])
        )

    def number(self, task: int, micro: int) -> int:
        """The firing of a task for a micro-batch; 0 where it fires once."""
        return self.start[self.keys[task]][micro] + self.within[task]

    def last(self, task: int) -> int:
        """The last firing of a task."""
        return self.number(task, self.count - 1 if self.looped(task) else 0)

    def along(self, stream: int) -> Iterator[Firing]:
        """The firings of a stream, in its order."""
        for turn, (key, micro) in enumerate(self.turns):
            start = self.start[key][micro]
            for task in self.members[key][stream]:
                yield Firing(start + self.within[task], task, micro, turn)

    def before(self, firing: Firing) -> Iterator[tuple[int, int, str]]:
        """Stream and number of each firing that one waits for, and why."""
        _, task, micro, turn = firing
        for wait in self.waits[task]:
            other = wait.fixed if wait.fixed >= 0 else micro - wait.back
            if other >= 0:
                yield self.stream[wait.task], self.number(wait.task, other), wait.why
        if task in self.beginning and self.computed[turn] >= 0:
            yield self.streams.index(COMPUTE), self.computed[turn], "by the order of the turns"

    def label(self, number: int) -> str:
        """A firing in the user's words."""
        turns = ((key, k) for key, k in self.turns if self.start[key][k] <= number)
        key, micro = max(turns, key=lambda turn: self.start[turn[0]][turn[1]])
        task = next(i for tasks in self.members[key] for i in tasks
                    if self.number(i, micro) == number)  # fmt: skip
        return label(self.tasks[task]) + f" of micro-batch {micro + 1}" * self.looped(task)

    def _key(self, task: Task) -> Turn:
        if self.count == 1:
            return 0, -1
        pipelined = self.program.sequence and task.phase == self.last_loop
        return task.phase, task.segment if pipelined else -1

    def _turns(self) -> Iterator[tuple[Turn, int]]:
        """The turns of the step and their micro-batches, in order."""
        for phase in sorted({phase for phase, _ in self.keys}):
            if self.count == 1 or phase % 2 == 0:
                yield (phase, -1), 0
            elif self.program.sequence and phase == self.last_loop:
                turns = (((phase, segment), micro) for segment, micro in self.program.sequence)
                yield from (turn for turn in turns if turn[0] in self.members)
            else:
                yield from (((phase, -1), micro) for micro in range(self.count))

    def _number(self) -> None:
        """Number the firings: turn after turn, in each stream after stream."""
        self.members: dict[Turn, list[list[int]]] = {}
        self.within: dict[int, int] = {}
        sizes: dict[Turn, int] = {}
        for stream, (_, order) in enumerate(self.program.order):
            for i in order:
                key = self.keys[i]
                self.members.setdefault(key, [[] for _ in self.streams])[stream].append(i)
                self.within[i] = sizes.get(key, 0)
                sizes[key] = self.within[i] + 1
        self.turns = list(self._turns())
        self.start: dict[Turn, dict[int, int]] = {key: {} for key in self.members}
        self.size = 0
        for key, micro in self.turns:
            self.start[key][micro] = self.size
            self.size += sizes[key]
        self.beginning = self._beginning()
        self.computed = self._computed()

    def _beginning(self) -> set[int]:
        """Tasks that need nothing of their turn but what runs ahead of it: reads and receives."""
        needs = self.program.needs()
        found = set()
        for i, task in enumerate(self.tasks):
            if self.looped(i) and task.kind != COMPUTE and not _runs_ahead(task):
                others = (self.tasks[self.index[name]] for name in needs[task.name])
                turn = task.phase, task.segment
                if all((t.phase, t.segment) != turn or _runs_ahead(t) for t in others):
                    found.add(i)
        return found

    def _computed(self) -> list[int]:
        """By turn: the last computation of the turns before that what begins it waits for.

        The first turn of a loop waits for none, unless it is of segments, whose memory others use
        before the loop.
        """
        compute = self.streams.index(COMPUTE) if COMPUTE in self.streams else 0
        found, before, last, phase = [], -1, -1, -1
        for key, micro in self.turns:
            if key[0] != phase:
                phase, last = key[0], before if key[1] >= 0 else -1
            found.append(last)
            tasks = self.members[key][compute]
            if tasks and self.streams[compute] == COMPUTE:
                last = before = self.number(tasks[-1], micro)
        return found

    def _waits(self, i: int, task: Task) -> Iterator[Wait]:
        """For inputs and by `after`, but for what the order of the stream says anyway."""
        made = [(self.makers[n], n) for n in task.inputs if n in self.makers]
        arcs = [(other, f"for {n}", self.in_parts(self.registers[n])) for other, n in made]
        arcs += [(self.index[n], "by its `after`", False) for n in task.after]
        for other, why, parts in arcs:
            if self._ordered(other, i):
                continue
            if not self.looped(other):
                yield Wait(other, why, fixed=0)
            elif parts or self.tasks[other].phase == task.phase:
                yield Wait(other, why)
            else:
                yield Wait(other, why, fixed=self.count - 1)

    def _ordered(self, a: int, b: int) -> bool:
        if self.stream[a] != self.stream[b]:
            return False
        return self.keys[a][0] < self.keys[b][0] or (
            self.keys[a] == self.keys[b] and self.within[a] < self.within[b]
        )

    def _add_slots(self) -> None:
        """Let what fills a slot anew in a step wait for those on other streams that used it.

        The slots of a read are given back together, all others one by one.
        """
        for name, register in self.registers.items():
            maker = self.makers[self.root(name)]
            reads = self.tasks[maker].stream in AHEAD and self.looped(maker)
            if reads:
                slots = min(self.registers[n].slots for n in self.tasks[maker].outputs)
            elif register.rewound:
                slots = register.slots
            else:
                continue
            self.waits[maker] += tuple(
                Wait(user, f"for a slot of {name}", back=slots)
                for user in self.users.get(name, ())
                if self.stream[user] != self.stream[maker]
            )

    def root(self, name: str) -> str:
        """The register whose memory one shares."""
        while self.registers[name].aliases in self.registers:
            name = self.registers[name].aliases
        return name


def _runs_ahead(task: Task) -> bool:
    """Whether it may come before its turn: what is read, and what other stages send."""
    return task.stream in AHEAD or task.kind == RECEIVE


Node = tuple[int, int]
"""A stream: its place among the steps that are walked, and in its own."""
Arc = tuple[Node, int, str]
"""The stream and the number of a firing that another waits for, and why."""


class Walk:
    """Fires whatever can fire. Steps of several stages meet in messages, of one alone none wait."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.done = [[-1] * len(step.streams) for step in steps]
        self._queues = {
            (lane, stream): step.along(stream)
            for lane, step in enumerate(steps)
            for stream in range(len(step.streams))
        }
        self._ends = _ends(steps) if len(steps) > 1 else {}
        self._came: set[tuple[int, int]] = set()  # lane and number of ends that wait for the other
        self._heads: dict[Node, Firing] = {}
        self._waiting: dict[Node, set[Node]] = {}

    def run(self) -> Iterator[Firing]:
        """The firings, in an order in which each follows all that it waits for.

        VerifyError with the shortest circle where some are never reached.
        """
        ready = deque(self._queues)
        while ready:
            node = ready.popleft()
            before = self.done[node[0]][node[1]]
            yield from self._advance(node, ready)
            if self.done[node[0]][node[1]] != before:
                ready.extend(self._waiting.pop(node, ()))
        if self._heads:
            raise VerifyError(self._stuck())

    def _advance(self, node: Node, ready: deque[Node]) -> Iterator[Firing]:
        """Fire along a stream up to the first firing that has to wait."""
        lane, stream = node
        step, done, queue = self.steps[lane], self.done[lane], self._queues[node]
        firing = self._heads.pop(node, None) or next(queue, None)
        while firing is not None:
            for other, number, _ in step.before(firing):
                if done[other] < number:
                    self._heads[node] = firing
                    self._waiting.setdefault((lane, other), set()).add(node)
                    return
            if (lane, firing.task) in self._ends and not self._meets(lane, firing, ready):
                self._heads[node] = firing
                return
            done[stream] = firing.number
            yield firing
            firing = next(queue, None)

    def _other_end(self, lane: int, firing: Firing) -> tuple[Node, int]:
        other, task = self._ends[lane, firing.task]
        step = self.steps[other]
        return (other, step.stream[task]), step.number(task, firing.micro)

    def _meets(self, lane: int, firing: Firing, ready: deque[Node]) -> bool:
        """Whether the other end of a message is there, or was; the second to come wakes it."""
        node, number = self._other_end(lane, firing)
        if self.done[node[0]][node[1]] >= number:
            return True
        if (node[0], number) in self._came:
            ready.append(node)
            return True
        self._came.add((lane, firing.number))
        return False

    def _stuck(self) -> str:
        """The shortest circle of streams, of which each waits at its head for the next."""
        arcs = {node: list(self._unmet(node[0], head)) for node, head in self._heads.items()}
        lines = []
        for node, (other, number, why) in min(filter(None, map(_circle(arcs), arcs)), key=len):
            ends = (node, self._heads[node].number), (other, number)
            lines.append(self._line(*ends, why))
            if number != self._heads[other].number:
                order = f"by the order of stream {self.steps[other[0]].streams[other[1]]}"
                lines.append(self._line(ends[1], (other, self._heads[other].number), order))
        text = f"{len(lines)} tasks wait for each other"
        if len(lines) > 12:
            lines[6:-5] = [f"  ... and {len(lines) - 11} more ..."]
        return "\n".join([f"program {self.steps[0].program.name} would hang: {text}", *lines])

    def _unmet(self, lane: int, head: Firing) -> Iterator[Arc]:
        """What the head of a stream waits for."""
        for stream, number, why in self.steps[lane].before(head):
            if self.done[lane][stream] < number:
                yield (lane, stream), number, why
        if (lane, head.number) in self._came:
            yield *self._other_end(lane, head), "to meet it: messages are not buffered"

    def _line(self, waiting: tuple[Node, int], wanted: tuple[Node, int], why: str) -> str:
        return f"  {self._named(*waiting)} waits for {self._named(*wanted)} ({why})"

    def _named(self, node: Node, number: int) -> str:
        step = self.steps[node[0]]
        stage = f"stage {step.program.stage}: " if len(self.steps) > 1 else ""
        return stage + step.label(number)


def _ends(steps: Sequence[Step]) -> dict[tuple[int, int], tuple[int, int]]:
    """Of each send or receive, by its lane and task, the other end of its message, if any."""
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for lane, step in enumerate(steps):
        for i, task in enumerate(step.tasks):
            if task.kind in (SEND, RECEIVE):
                stages = step.program.stage, task.attributes["stage"]
                ends = stages if task.kind == SEND else stages[::-1]
                found[*ends, task.attributes["message"], task.kind] = lane, i
    other = {SEND: RECEIVE, RECEIVE: SEND}
    pairs = ((end, found.get((*key[:-1], other[key[-1]]))) for key, end in found.items())
    return {end: peer for end, peer in pairs if peer is not None}


def _circle(arcs: dict[Node, list[Arc]]) -> Callable[[Node], list[tuple[Node, Arc]]]:
    """A function that gives the shortest circle through a stream; empty where there is none."""

    def through(start: Node) -> list[tuple[Node, Arc]]:
        paths: dict[Node, list[tuple[Node, Arc]]] = {start: []}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for arc in arcs[node]:
                path = [*paths[node], (node, arc)]
                if arc[0] == start:
                    return path
                if arc[0] not in paths:
                    paths[arc[0]] = path
                    queue.append(arc[0])
        return []

    return through
