"""Whom a job that stands still waits for: the wait-for graph of its ranks.

    rank 0   comm.data: bucket.0 in flight ──> rank 2, which has not come to it
    rank 1   comm.data: bucket.0 in flight ──> rank 2
    rank 2   compute: a kernel                              the culprit; two ranks wait for it

What a rank waits for follows from the plan and the positions of all ranks (`exec.position`). A rank
that waits for no other rank holds up the rest: it computes, reads, writes, or is silent; or it may
wait, but never looks whether what it waits for has come. Where every rank waits and looks, and all
are in what they wait for, a message was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mpiflow.exec.beat import Beat
from mpiflow.plan.pieces import pieces_of
from mpiflow.plan.places import D2H, H2D
from mpiflow.plan.records import COMPUTE, READ, RECEIVE, SEND, WRITE, Plan, Program, Task
from mpiflow.plan.unroll import folded, unroll

SILENT, COMPUTING, DEAF, READING, WRITING, HOST, LOST = (
    "silent", "computing", "deaf", "reading", "writing", "host", "lost",
)  # fmt: skip
FILES = (READING, WRITING, HOST)
"""Kinds of stalls that may mend by themselves, as file systems do."""
_MOST_NAMES = 8
_DEAF_SECONDS = 2.0
"""A rank that waits looks many times a second whether what it waits for has come."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a rank: its last beat, and for how long it has sent none, if too long.

    `about` is what its host knows of its process: `whose process is stopped`.
    """

    rank: int
    host: str
    beat: Beat | None
    silent: float = 0.0
    about: str = ""

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds up a job: the kind of stall, the rank (one of them, for a lost message), why.

    `key` is the same for as long as the stall is the same.
    """

    kind: str
    rank: int
    text: str
    key: str


@dataclass(slots=True)
class _Cause:
    """Why a rank waits for no other one; `task` is what it is in, `with_ranks` who else is."""

    kind: str
    task: Task | None = None
    with_ranks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Node:
    """A rank in the graph: the cause, if it is one, and the ranks that it waits for, in `task`."""

    cause: _Cause | None = None
    waits: set[int] = field(default_factory=set)
    task: Task | None = None


class _Streams:
    """A program without loops: its tasks by stream, and where each stands."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.folded, self.program = program, unroll(program)
        self.needs = self.program.needs()
        self.tensors = {**plan.tensors(program), **{r.name: r for r in self.program.registers}}
        tasks = self.program.tasks
        self.order = {s: [tasks[i] for i in numbers] for s, numbers in self.program.order}
        self.places = {t.name: (s, n) for s, row in self.order.items() for n, t in enumerate(row)}

    @cached_property
    def messages(self) -> dict[tuple[str, str, int], Task]:
        """Sends and receives, by kind, message and micro-batch."""
        ends = (t for t in self.program.tasks if t.kind in (SEND, RECEIVE))
        return {(t.kind, str(t.attributes["message"]), t.micro): t for t in ends}


class Court:
    """Finds who holds up the ranks of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[tuple[int, str], _Streams] = {}
        self._seen: Sequence[Seen] = ()
        self._lates: dict[tuple[tuple[int, ...], str, int, int], frozenset[int]] = {}

    def judge(self, ranks: Sequence[Seen]) -> Verdict | None:
        """The verdict on ranks none of which gets on; None where no rank holds up another."""
        self._seen, self._lates = ranks, {}
        graph = [self._node(seen) for seen in ranks]
        causes = _causes(graph)
        if not causes:
            return None
        victims = {rank: _behind(rank, graph) for rank in causes}
        culprit = max(causes, key=lambda rank: self._weight(rank, graph[rank], victims[rank]))
        cause = graph[culprit].cause
        assert cause is not None
        text = self._text(ranks[culprit], cause, len(victims[culprit]))
        if cause.kind == SILENT:
            text += self._awaited(culprit, graph)
        return Verdict(cause.kind, culprit, text, f"{cause.kind} {culprit}")

    def _weight(self, rank: int, node: _Node, victims: set[int]) -> tuple[int, int, float, int]:
        """What makes one cause likelier than another; all have stood still for about as long."""
        assert node.cause is not None
        beat = self._seen[rank].beat
        kinds = (LOST, HOST, WRITING, READING, DEAF, COMPUTING, SILENT)
        still = round(beat.still, 1) if beat else 0.0
        return len(victims), kinds.index(node.cause.kind), still, -rank

    # -- the graph

    def _node(self, seen: Seen) -> _Node:
        beat = seen.beat
        if seen.silent or beat is None:
            return _Node(_Cause(SILENT))
        if not beat.position.program:
            return _heeding(self._between(beat), beat)
        if beat.position.computing:
            return _Node(_Cause(COMPUTING, self._head(seen.rank, beat, COMPUTE)))
        return _heeding(self._within(seen.rank, beat), beat)

    def _between(self, beat: Beat) -> _Node:
        """A rank between two programs: it waits for the others, for its files, or is busy."""
        if beat.saving:
            return _Node(_Cause(WRITING))
        if not beat.waiting:
            return _Node(_Cause(HOST))
        waits = {
            seen.rank
            for seen in self._seen
            if seen.beat is None or seen.beat.entered < beat.entered
        }
        everyone = tuple(seen.rank for seen in self._seen)
        return _Node(None if waits else _Cause(LOST, with_ranks=everyone), waits)

    def _within(self, rank: int, beat: Beat) -> _Node:
        """A rank that waits for its streams: for other ranks, or for the files that it reads."""
        node, streams = _Node(), self._streams(rank, beat.position.program)
        for stream in streams.order:
            task = self._head(rank, beat, stream)
            if task is None or stream == WRITE:
                continue
            missing = self._missing(rank, beat, task)
            if any(need.stream == READ for need in missing):
                node.cause = _Cause(READING, next(n for n in missing if n.stream == READ))
            elif not missing and task.kind in (H2D, D2H):
                # It takes nobody else; that it is over is seen by a look alone.
                if node.cause is None and beat.deaf <= _DEAF_SECONDS:
                    node.cause = _Cause(COMPUTING, task)
            elif not missing and task.kind not in (COMPUTE, READ):
                members = self._members(rank, beat, task)
                waits = self._late(members, beat, task)
                node.waits |= waits
                node.task = node.task or (task if waits else None)
                if not waits and node.cause is None:
                    node.cause = _Cause(LOST, task, members)
        return node

    def _streams(self, rank: int, name: str) -> _Streams:
        stage, _ = self._plan.mesh.stage_of(rank)
        if (stage, name) not in self._known:
            plan = self._plan.at_stage(stage)
            program = plan.program(name)
            assert program is not None, f"stage {stage} has no program {name}"
            self._known[stage, name] = _Streams(plan, program)
        return self._known[stage, name]

    def _head(self, rank: int, beat: Beat, stream: str) -> Task | None:
        """The first task of a stream that is not done."""
        row = self._streams(rank, beat.position.program).order.get(stream, [])
        done = beat.position.head(stream)
        return row[done] if done < len(row) else None

    def _missing(self, rank: int, beat: Beat, task: Task) -> list[Task]:
        """The tasks that must be done before this one, and are not."""
        streams = self._streams(rank, beat.position.program)
        places = ((need, streams.places[need]) for need in streams.needs[task.name])
        return [
            streams.order[stream][number]
            for _, (stream, number) in places
            if number >= beat.position.head(stream)
        ]

    def _members(self, rank: int, beat: Beat, task: Task) -> tuple[int, ...]:
        """The ranks that take part in a collective, or both ends of a message."""
        mesh = self._plan.mesh
        stage, place = mesh.stage_of(rank)
        plan = self._plan.at_stage(stage)
        if task.kind not in (SEND, RECEIVE):
            members = plan.slice(place).members(task.axis)
            return tuple(mesh.rank_in_stage(stage, member) for member in members)
        streams = self._streams(rank, beat.position.program)
        (name,) = task.inputs or task.outputs
        here = plan.slice(place, streams.folded)
        other = task.attributes["stage"]
        pieces = pieces_of(task, streams.tensors[name], here)
        return (rank, *(mesh.rank_in_stage(other, there) for there, _ in pieces))

    def _late(self, members: tuple[int, ...], asking: Beat, task: Task) -> frozenset[int]:
        """The members that have not come to a task; of a collective, the same for all of them."""
        which = asking.rank if task.kind in (SEND, RECEIVE) else -1
        key = members, task.name, asking.position.run, which
        if key not in self._lates:
            late = (m for m in members if not self._has_come(m, asking, task))
            self._lates[key] = frozenset(late)
        return self._lates[key]

    def _has_come(self, rank: int, asking: Beat, task: Task) -> bool:
        """Whether a rank has begun, or ended, what another one's task is part of."""
        beat = self._seen[rank].beat
        if beat is None:
            return False
        ours, theirs = asking.position, beat.position
        if theirs.run != ours.run:
            return theirs.run > ours.run
        if not theirs.program:
            return True
        streams = self._streams(rank, theirs.program)
        if rank != asking.rank and task.kind in (SEND, RECEIVE):
            other = RECEIVE if task.kind == SEND else SEND
            task = streams.messages[other, str(task.attributes["message"]), task.micro]
        stream, number = streams.places[task.name]
        done = theirs.head(stream)
        return done > number or (done == number and not self._missing(rank, beat, task))

    # -- words

    def _text(self, seen: Seen, cause: _Cause, victims: int) -> str:
        beat = seen.beat
        seconds = seen.silent or (beat.still if beat else 0.0)
        doing = self._doing(seen, cause, f"{seconds:.0f} s")
        waiting = f"{victims} rank{'s' if victims > 1 else ''} wait{'' if victims > 1 else 's'}"
        text = f"{doing}; {waiting} for it" if victims and cause.kind != LOST else doing
        if cause.kind in (COMPUTING, DEAF, HOST) and beat and beat.stack:
            text += f"\n{beat.stack}"
        return text

    def _awaited(self, culprit: int, graph: list[_Node]) -> str:
        """The task in which a rank waits for a silent one, whose own last word may be old."""
        for rank, node in enumerate(graph):
            if culprit in node.waits and node.task:
                return f" in {_named(node.task, self._seen[rank].beat)}"
        return ""

    def _doing(self, seen: Seen, cause: _Cause, time: str) -> str:
        beat = seen.beat
        match cause.kind:
            case "silent":
                about = f", {seen.about}," if seen.about else ""
                return f"{seen.name}{about} has been silent for {time}"
            case "computing":
                return f"{seen.name} has been in {_named(cause.task, beat)} for {time}"
            case "deaf":
                at = _named(cause.task, beat) if cause.task else self._since(beat)
                return f"{seen.name} has not looked at its messages for {time} in {at}"
            case "reading":
                file = (beat.reading if beat else "") or _named(cause.task, beat)
                return f"{seen.name} has been reading {file} for {time}"
            case "writing":
                file = beat.writing if beat else ""
                return f"{seen.name} has been storing {file or 'a checkpoint'} for {time}"
            case "host":
                return f"{seen.name} has been busy {_when(beat)} for {time}"
        return self._lost(cause, beat, time)

    def _since(self, beat: Beat | None) -> str:
        return (beat.position.name if beat else "") or f"the time {_when(beat)}"

    def _lost(self, cause: _Cause, beat: Beat | None, time: str) -> str:
        end = f"for {time}: a message between them is lost"
        if cause.task is None:
            return f"all ranks have waited for each other {_when(beat)} {end}"
        names = [self._seen[rank].name for rank in cause.with_ranks]
        more = len(names) - _MOST_NAMES
        last = names[-1] if more <= 0 else f"{more} more"
        who = f"{', '.join(names[:-1][:_MOST_NAMES])} and {last}"
        return f"{who} are all in {_named(cause.task, beat)}, which has not ended {end}"


def _when(beat: Beat | None) -> str:
    """Where in time a rank is that runs no program."""
    return "between two steps" if beat and beat.position.run else "before the first step"


def _heeding(node: _Node, beat: Beat) -> _Node:
    """A rank whose main thread never looks is one cause more, though it waits for others as well.

    What it is in may be a call of MPI that waits for them, so what it waits for stays.
    """
    if beat.deaf > _DEAF_SECONDS and (node.cause is None or node.cause.kind == LOST):
        node.cause = _Cause(DEAF, node.cause.task if node.cause else node.task)
    return node


def _causes(graph: list[_Node]) -> list[int]:
    """The ranks that hold up others.

    What all have come to may still need one of them that computes: a message is lost only where
    nobody does anything else. Such a rank may wait for others too, which wait for it in the end.
    """
    lost = {rank for rank, node in enumerate(graph) if node.cause and node.cause.kind == LOST}
    busy = {rank for rank, node in enumerate(graph) if node.cause} - lost
    if not busy:
        return sorted(lost)
    for rank in lost:
        cause = graph[rank].cause
        graph[rank].waits |= busy.intersection(cause.with_ranks if cause else ())
        graph[rank].cause = None
    return sorted(busy)


def _behind(rank: int, graph: list[_Node]) -> set[int]:
    """The ranks that wait for this one, or for one that does; for a lost message, those in it."""
    cause = graph[rank].cause
    waited_by: dict[int, list[int]] = {}
    for other, node in enumerate(graph):
        for awaited in node.waits:
            waited_by.setdefault(awaited, []).append(other)
    found = {rank, *(cause.with_ranks if cause else ())}
    todo = list(found)
    while todo:
        more = [other for other in waited_by.get(todo.pop(), ()) if other not in found]
        found.update(more)
        todo += more
    return found - {rank}


def _named(task: Task | None, beat: Beat | None) -> str:
    """`task fc1/linear (MatMul, digits.py:13) of step 17`."""
    if task is None or beat is None:
        return "no task"
    line = task.where.rpartition("/")[2]
    details = ", ".join(part for part in (task.op or task.kind, line) if part)
    micro = f"micro-batch {task.micro + 1} of " if task.phase % 2 else ""
    return f"task {folded(task)} ({details}) of {micro}{beat.position.name}"
