"""Runs: what all ranks do in a step, as runs of tasks of which only the first waits for others.

    stage 0  compute   [fc1 gelu fc2]-->        [grad2 grad1]      a run is of one stream
             send                    [h]             |
    stage 1  receive                 [h]-->     [dh]-+

Ranks that do the same are one lane: a lane for each pipeline stage, and for each class of its ranks
where one of them is slower. Only tasks of compute are put together, where none but the first waits
for another stream. So runs wait in a circle exactly if tasks do, and times of runs are those of
tasks; but there are few of them, and a step of a long pipeline is walked in little time.

What waits for what is said by `plan.marked`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mpiflow.plan.marked import Firing, Step, Turn
from mpiflow.plan.pieces import is_in_pieces
from mpiflow.plan.places import AHEAD
from mpiflow.plan.records import COMPUTE, RECEIVE, SEND, WRITE, Plan, Program, Task


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
    templates = [_Template(Step(program, micro_batches)) for program in programs]
    built = [_Lane(made, number, templates[lane.stage]) for number, lane in enumerate(given)]
    for lane in built:
        lane.wait()
    _meet(made, built)
    if any(lane.place for lane in given):
        _join_collectives(made, built, plan)
    made.order = _in_order(made.runs)
    return made


class _Template:
    """The runs of each turn of a program, and what frees a slot from step to step."""

    def __init__(self, step: Step) -> None:
        self.step, self.freed = step, _frees(step)
        self.runs: dict[Turn, list[tuple[int, tuple[int, ...]]]] = {}  # a stream, and its tasks
        self.where: dict[int, tuple[Turn, int, int]] = {}  # of each task: its run, its place in it
        for turn, streams in step.members.items():
            runs = self.runs[turn] = []
            for stream, tasks in enumerate(streams):
                for run in self._cut(stream, tasks):
                    for place, task in enumerate(run):
                        self.where[task] = turn, len(runs), place
                    runs.append((stream, tuple(run)))

    def _cut(self, stream: int, tasks: list[int]) -> list[list[int]]:
        """The tasks of a stream in a turn, cut before each that waits for another stream."""
        found: list[list[int]] = []
        for task in tasks:
            alone = self.step.streams[stream] != COMPUTE
            if alone or self.step.waits[task] or task in self.freed or not found:
                found.append([])
            found[-1].append(task)
        return found


def _frees(step: Step) -> dict[int, list[tuple[int, int]]]:
    """Of what fills slots ahead of its consumers or they outlive: consumers, and the slots.

    Within a step and on other streams these are waits; a step begins when all else is over.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for name, maker in step.makers.items():
        for user in step.users.get(name, ()):
            outlives = step.tasks[maker].stream in AHEAD or step.tasks[user].stream == WRITE
            if outlives and not step.registers[name].rewound:
                found.setdefault(maker, []).append((user, step.registers[name].slots))
    return found


class _Lane:
    """The runs of a lane: made first, then told what they wait for."""

    def __init__(self, made: Runs, number: int, template: _Template) -> None:
        self.made, self.number, self.template, self.step = made, number, template, template.step
        self.begin: dict[tuple[Turn, int], int] = {}  # the first run of each turn
        first = len(made.streams)
        last: dict[int, int] = {}  # by stream
        made.streams += [(number, stream) for stream in self.step.streams]
        for turn, micro in self.step.turns:
            self.begin[turn, micro] = len(made.runs)
            for stream, tasks in template.runs[turn]:
                run = Run(number, first + stream, tasks, micro, last.get(stream, -1))
                last[stream] = len(made.runs)
                made.runs.append(run)

    def find(self, task: int, micro: int) -> tuple[int, int] | None:
        """The run of a firing and its place in it, if it is there."""
        turn, run, place = self.template.where[task]
        first = self.begin.get((turn, micro))
        return None if first is None else (first + run, place)

    def wait(self) -> None:
        """Find what each run waits for."""
        for place, (turn, micro) in enumerate(self.step.turns):
            for offset, (_, tasks) in enumerate(self.template.runs[turn]):
                run = self.made.runs[self.begin[turn, micro] + offset]
                first = Firing(self.step.number(tasks[0], micro), tasks[0], micro, place)
                waits = (self.find(other, k) for other, k, _ in self.step.before(first))
                run.waits = tuple(dict.fromkeys(wait for wait in waits if wait))
                run.freed = tuple(self._freed(tasks[0], micro))

    def _freed(self, task: int, micro: int) -> Iterator[tuple[int, int, int]]:
        """What used the slot in the steps before."""
        count, looped = self.step.program.micro_batches, self.step.looped(task)
        for user, slots in self.template.freed.get(task, ()):
            steps, earlier = divmod(micro - slots, count) if looped else (-slots, 0)
            found = self.find(user, earlier) if steps < 0 else None
            if found is not None:
                yield (*found, -steps)

    def messages(self, kind: str) -> Iterable[tuple[tuple[Any, ...], int]]:
        """Sends or receives, with (place, from, to, number, micro-batch).

        The lane's place says which ranks of the other stage they are to or from, unless all may be.
        """
        stage = self.step.program.stage
        for i, task in enumerate(self.step.tasks):
            if task.kind == kind:
                other = task.attributes.get("stage")
                ends = (stage, other) if kind == SEND else (other, stage)
                place = () if is_in_pieces(task) else self.made.lanes[self.number].place
                for micro in range(self.step.count if self.step.looped(i) else 1):
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
