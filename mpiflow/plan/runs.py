"""Runs: what all ranks do in a step, as runs of tasks of which only the first waits for others.

    stage 0  compute   [fc1 gelu fc2]-->        [grad2 grad1]      a run is of one stream
             send                    [h]             |
    stage 1  receive                 [h]-->     [dh]-+

Ranks that do the same are one lane: a lane for each pipeline stage, and for each class of its ranks
where one of them is slower. Only tasks of compute are put together, where none but the first waits
for another stream. So runs wait in a circle exactly if tasks do, and times of runs are those of
tasks; but there are few of them, and a step of a long pipeline is walked in little time.

What waits for what is said by `plan.unroll`, which writes every firing out; this says the same
without doing that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mpiflow.graph.sbp import B
from mpiflow.plan.pieces import is_in_pieces
from mpiflow.plan.places import AHEAD
from mpiflow.plan.records import COMPUTE, RECEIVE, SEND, WRITE, Plan, Program, Task

Turn = tuple[int, int]
"""A phase, and the segment of it, -1 for all."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks that do the same: those of a stage, or a class of them; how many, how much slower.

    `place` says on each axis of the stage's mesh where they stand, in classes or by coordinate:
    ranks of one place on the axes that a collective does not run along take part in the same one.
    """

    stage: int
    label: str
    ranks: int
    factor: float = 1.0
    place: tuple[int, ...] = ()


@dataclass(slots=True)
class Run:
    """Tasks of a stream, by number, that follow one another for one micro-batch.

    `waits` are (run, place in it) that must be over, `before` the run before it on its stream.
    `freed` are (run, place, steps): the slot that it fills was in use so many steps ago.
    """

    lane: int
    stream: int
    tasks: tuple[int, ...]
    micro: int
    before: int = -1
    waits: tuple[tuple[int, int], ...] = ()
    freed: tuple[tuple[int, int, int], ...] = ()


@dataclass(slots=True)
class Runs:
    """The runs of a step, in an order in which each follows all that it waits for.

    `streams` has the lane and the name of each stream. Where runs wait in a circle, those in it and
    behind it are missing in `order`. `met` are receives whose sends are known: they take no time.
    """

    programs: tuple[Program, ...]
    lanes: tuple[Lane, ...]
    streams: list[tuple[int, str]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    met: set[int] = field(default_factory=set)

    def program(self, run: Run) -> Program:
        """The program that a run is of."""
        return self.programs[self.lanes[run.lane].stage]

    def tasks(self, run: Run) -> list[Task]:
        """The tasks of a run."""
        tasks = self.program(run).tasks
        return [tasks[i] for i in run.tasks]


def runs_of(
    plan: Plan, name: str, micro_batches: int | None = None, lanes: tuple[Lane, ...] = ()
) -> Runs:
    """The runs of the programs of that name, of the first so many micro-batches of each loop.

    Without `lanes` there is one for each stage.
    """
    programs = tuple(program for program in plan.programs if program.name == name)
    given = lanes or tuple(
        Lane(stage, f"stage {stage}", plan.mesh.within_stage(stage).size)
        for stage in range(len(programs))
    )
    made = Runs(programs, given)
    count = min(micro_batches or programs[0].micro_batches, programs[0].micro_batches)
    templates = [_Template(program, count) for program in programs]
    built = [_Lane(made, number, templates[lane.stage]) for number, lane in enumerate(given)]
    for lane in built:
        lane.wait()
    _meet(made, built)
    if any(lane.place for lane in given):
        _join_collectives(made, built, plan)
    made.order = _in_order(made.runs)
    return made


@dataclass(frozen=True, slots=True)
class _Wait:
    """A firing that a task waits for: task `task` of micro-batch k - `back`, or of `fixed`."""

    task: int
    back: int = 0
    fixed: int = -1

    def micro(self, micro: int) -> int:
        return self.fixed if self.fixed >= 0 else micro - self.back


class _Template:
    """The runs of each turn of a program, and what their first tasks wait for."""

    def __init__(self, program: Program, count: int) -> None:
        self.program, self.count = program, count
        self.last_loop = max((t.phase for t in program.tasks if t.phase % 2), default=-1)
        self.registers = {r.name: r for r in program.registers}
        self.index = {task.name: i for i, task in enumerate(program.tasks)}
        self.makers = {
            n: i for i, t in enumerate(program.tasks) for n in t.outputs if n in self.registers
        }
        self.turn = [self._turn(task) for task in program.tasks]
        self.place = {i: (s, p) for s, (_, o) in enumerate(program.order) for p, i in enumerate(o)}
        self.users: dict[str, list[int]] = {}
        for i, task in enumerate(program.tasks):
            for n in dict.fromkeys(task.inputs):
                self.users.setdefault(n, []).append(i)
        self.waits = [self._waits(i, task) for i, task in enumerate(program.tasks)]
        self._add_slots()
        self.freed = self._frees()
        self.beginning = self._beginning()
        self.turns = self._turns()
        self.runs: dict[Turn, list[tuple[str, tuple[int, ...]]]] = {t: [] for t, _ in self.turns}
        self.computed: dict[Turn, int] = {}
        self.where: dict[int, tuple[int, int]] = {}  # of each task: its run in the turn, its place
        self._cut()

    def _turn(self, task: Task) -> Turn:
        segments = self.program.sequence and task.phase == self.last_loop
        return task.phase, task.segment if segments else -1

    def _turns(self) -> list[tuple[Turn, int]]:
        """The turns of a step and their micro-batches, in order."""
        found: list[tuple[Turn, int]] = []
        for phase in sorted({task.phase for task in self.program.tasks}):
            if not phase % 2 or self.program.micro_batches == 1:
                found.append(((phase, -1), 0))
            elif self.program.sequence and phase == self.last_loop:
                known = set(self.turn)
                turns = (((phase, s), k) for s, k in self.program.sequence if k < self.count)
                found += [(turn, k) for turn, k in turns if turn in known]
            else:
                found += [((phase, -1), k) for k in range(self.count)]
        return found

    def _looped(self, task: Task) -> bool:
        return task.phase % 2 == 1

    def _in_time(self, name: str) -> bool:
        return self.program.micro_batches > 1 and self.registers[name].layout[0] != B

    def _waits(self, i: int, task: Task) -> list[_Wait]:
        """For inputs and by `after`, but for what the order of the stream says anyway."""
        found = []
        for name in task.inputs:
            if name in self.makers:
                maker = self.program.tasks[self.makers[name]]
                same = self._in_time(name) or maker.phase == task.phase
                found.append(self._wait(self.makers[name], maker, same))
        for name in task.after:
            other = self.program.tasks[self.index[name]]
            found.append(self._wait(self.index[name], other, other.phase == task.phase))
        return [wait for wait in dict.fromkeys(found) if not self._ordered(wait, i)]

    def _wait(self, i: int, task: Task, same: bool) -> _Wait:
        if not self._looped(task):
            return _Wait(i, fixed=0)
        return _Wait(i) if same else _Wait(i, fixed=self.count - 1)

    def _ordered(self, wait: _Wait, i: int) -> bool:
        """Whether a task comes after another by the order of their stream."""
        mine, other = self.place[i], self.place[wait.task]
        turns = self.turn[i], self.turn[wait.task]
        if mine[0] != other[0] or turns[1] > turns[0]:
            return False
        return turns[1] < turns[0] or other[1] < mine[1] or wait.back > 0

    def _add_slots(self) -> None:
        """Let what fills a slot anew come after the firings on other streams that used it."""
        for name, register in self.registers.items():
            if register.rewound and name in self.users:
                maker = self.makers[self._root(name)]
                for user in self.users[name]:
                    if self.place[user][0] != self.place[maker][0]:
                        self.waits[maker].append(_Wait(user, back=register.slots))

    def _root(self, name: str) -> str:
        while self.registers[name].aliases in self.registers:
            name = self.registers[name].aliases
        return name

    def _frees(self) -> dict[int, list[tuple[int, int]]]:
        """Of what fills slots ahead of its consumers or they outlive: consumers, and the slots.

        Within a step and on other streams these are waits; a step begins when all else is over.
        """
        found: dict[int, list[tuple[int, int]]] = {}
        tasks = self.program.tasks
        for name, maker in self.makers.items():
            slots = self.registers[name].slots
            for user in self.users.get(name, ()):
                outlives = tasks[maker].stream in AHEAD or tasks[user].stream == WRITE
                if outlives and not self.registers[name].rewound:
                    found.setdefault(maker, []).append((user, slots))
                if self._looped(tasks[maker]) and self._in_time(name):
                    wait = _Wait(user, back=slots)
                    if self.place[user][0] != self.place[maker][0] and slots < self.count:
                        self.waits[maker].append(wait)
        return found

    def _beginning(self) -> set[int]:
        """Tasks that begin a turn on other streams than `compute`, and do not run ahead of it."""
        needs = self.program.needs()
        found = set()
        for i, task in enumerate(self.program.tasks):
            if self._looped(task) and not (task.kind in (COMPUTE, RECEIVE) or task.stream in AHEAD):
                before = [self.index[name] for name in needs[task.name]]
                if not any(
                    (self.program.tasks[j].phase, self.program.tasks[j].segment)
                    == (task.phase, task.segment)
                    and self.program.tasks[j].kind != RECEIVE
                    and self.program.tasks[j].stream not in AHEAD
                    for j in before
                ):
                    found.add(i)
        return found

    def _cut(self) -> None:
        for stream, places in self.program.order:
            by_turn: dict[Turn, list[int]] = {}
            for i in places:
                by_turn.setdefault(self.turn[i], []).append(i)
            for turn, tasks in by_turn.items():
                if stream == COMPUTE:
                    self.computed[turn] = tasks[-1]
                for run in self._runs(stream, tasks):
                    for place, i in enumerate(run):
                        self.where[i] = len(self.runs[turn]), place
                    self.runs[turn].append((stream, tuple(run)))

    def _runs(self, stream: str, tasks: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for i in tasks:
            alone = stream != COMPUTE or self.waits[i] or i in self.freed
            if alone or not found:
                found.append([])
            found[-1].append(i)
        return found


class _Lane:
    """The runs of a lane: made first, then told what they wait for."""

    def __init__(self, made: Runs, number: int, template: _Template) -> None:
        self.made, self.number, self.template = made, number, template
        self.begin: dict[tuple[Turn, int], int] = {}  # the first run of each turn
        streams: dict[str, int] = {}
        last: dict[int, int] = {}
        for stream, _ in template.program.order:
            streams[stream] = len(made.streams)
            made.streams.append((number, stream))
        for turn, micro in template.turns:
            self.begin[turn, micro] = len(made.runs)
            for stream, tasks in template.runs[turn]:
                run = Run(number, streams[stream], tasks, micro, last.get(streams[stream], -1))
                last[streams[stream]] = len(made.runs)
                made.runs.append(run)

    def find(self, task: int, micro: int) -> tuple[int, int] | None:
        """The run of a firing and its place in it, if it is there."""
        first = self.begin.get((self.template.turn[task], micro))
        if first is None:
            return None
        run, place = self.template.where[task]
        return first + run, place

    def wait(self) -> None:
        """Find what each run waits for."""
        phase, computed = -1, None
        for turn, micro in self.template.turns:
            if turn[0] != phase:  # only segments share memory with what is computed before
                phase, computed = turn[0], computed if turn[1] >= 0 else None
            for offset in range(len(self.template.runs[turn])):
                run = self.made.runs[self.begin[turn, micro] + offset]
                waits = list(self._resolved(run.tasks[0], micro))
                if computed and run.tasks[0] in self.template.beginning:
                    waits.append(computed)
                run.waits = tuple(dict.fromkeys(waits))
                run.freed = tuple(self._freed(run.tasks[0], micro))
            if turn in self.template.computed:
                computed = self.find(self.template.computed[turn], micro)

    def _resolved(self, task: int, micro: int) -> Iterator[tuple[int, int]]:
        for wait in self.template.waits[task]:
            found = self.find(wait.task, wait.micro(micro))
            if found is not None:
                yield found

    def _freed(self, task: int, micro: int) -> Iterator[tuple[int, int, int]]:
        """What used the slot in the steps before."""
        program = self.template.program
        for user, slots in self.template.freed.get(task, ()):
            looped = self.template._looped(program.tasks[task])
            steps, earlier = divmod(micro - slots, program.micro_batches) if looped else (-slots, 0)
            found = self.find(user, earlier) if steps < 0 else None
            if found is not None:
                yield (*found, -steps)

    def messages(self, kind: str) -> Iterable[tuple[tuple[Any, ...], int]]:
        """Sends or receives, with (place, from, to, number, micro-batch).

        The lane's place says which ranks of the other stage they are to or from, unless all may be.
        """
        stage = self.template.program.stage
        for i, task in enumerate(self.template.program.tasks):
            if task.kind == kind:
                other = task.attributes.get("stage")
                ends = (stage, other) if kind == SEND else (other, stage)
                place = () if is_in_pieces(task) else self.made.lanes[self.number].place
                for micro in range(self.template.count if task.phase % 2 else 1):
                    found = self.find(i, micro)
                    if found is not None:
                        yield (place, *ends, task.attributes.get("message"), micro), found[0]


def _meet(made: Runs, lanes: list[_Lane]) -> None:
    """Let sends begin when their receives can, and receives end with them."""
    receives: dict[tuple[Any, ...], list[int]] = {}
    for lane in lanes:
        for key, receive in lane.messages(RECEIVE):
            receives.setdefault(key, []).append(receive)
    found = [
        (send, receive)
        for lane in lanes
        for key, send in lane.messages(SEND)
        for receive in receives.get(key, ())
    ]
    waits = [_with_stream(made.runs, receive) for _, receive in found]
    for (send, receive), others in zip(found, waits, strict=True):
        made.runs[send].waits = tuple(dict.fromkeys((*made.runs[send].waits, *others)))
        made.runs[receive].waits += ((send, 0),)
        made.met.add(receive)


def _join_collectives(made: Runs, lanes: list[_Lane], plan: Plan) -> None:
    """Let a collective begin when all its members can: those of other lanes of the stage too."""
    mesh = plan.mesh.within_stage()  # of whose axes the names matter, which all stages have
    groups: dict[Any, list[int]] = {}
    for number, run in enumerate(made.runs):
        lane, task = made.lanes[run.lane], made.tasks(run)[0]
        if task.kind == "collective":
            along = mesh.along(task.axis)
            apart = tuple(at for axis, at in enumerate(lane.place) if axis not in along)
            key = (lane.stage, run.tasks[0], run.micro, apart)
            groups.setdefault(key, []).append(number)
    for members in groups.values():
        waits = [wait for member in members for wait in _with_stream(made.runs, member)]
        for member in members:
            made.runs[member].waits = tuple(dict.fromkeys(waits))


def _with_stream(runs: list[Run], number: int) -> tuple[tuple[int, int], ...]:
    """What a run waits for, the one before it on its stream too."""
    run = runs[number]
    if run.before < 0:
        return run.waits
    return (*run.waits, (run.before, len(runs[run.before].tasks) - 1))


def _in_order(runs: list[Run]) -> list[int]:
    """Runs so that each follows all it waits for; those in or behind a circle are left out."""
    missing = [0] * len(runs)
    followers: list[list[int]] = [[] for _ in runs]
    for number, run in enumerate(runs):
        sources = {source for source, _ in run.waits}
        if run.before >= 0:
            sources.add(run.before)
        missing[number] = len(sources)
        for source in sources:
            followers[source].append(number)
    ready = deque(number for number, count in enumerate(missing) if not count)
    order = []
    while ready:
        number = ready.popleft()
        order.append(number)
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    return order


def stops_within(seconds: Iterable[float]) -> tuple[float, ...]:
    """When each task of a run stops, from where the run starts."""
    return tuple(accumulate(seconds))
