"""Step 13: an offset in the arena for every buffer.

    [ variables | read slots and staging | what programs use and reuse, one after another ]

Lifetimes are intervals of positions in the compute stream, and hold for every timing: a buffer that
another stream uses is live from the last compute task that must be done before that use, to the
first compute task that must wait for its end. Read slots and the staging of saves live beyond a
step, so each program has its own. A loop over micro-batches takes the positions of one turn; what
its turns share is live throughout. In a loop of segments that a pipeline does in another order, so
is what several of them use, and what stages send and receive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import pairwise

from mpiflow.compiler.abreast import places_of, side_by_side
from mpiflow.compiler.pack import WORTH, Buffer, align, lower_bound, pack
from mpiflow.graph.op import build_op
from mpiflow.graph.sbp import B
from mpiflow.plan.places import AHEAD, D2H, HOST, PINNED, workspace_space
from mpiflow.plan.records import (
    COMPUTE,
    RECEIVE,
    SEND,
    WRITE,
    Program,
    Register,
    Task,
    Variable,
)
from mpiflow.plan.registers import holder, outliving

_LANES = 2
"""The workspaces that the messages of a stream take by turns."""


@dataclass(frozen=True, slots=True)
class Block:
    """Buffers that are placed together: `parts` are (register, offset within the block)."""

    parts: tuple[tuple[str, int], ...]
    nbytes: int
    start: int
    stop: int
    space: str = ""


@dataclass(frozen=True, slots=True)
class Packed:
    """Programs and variables with offsets. `lower_bound` is what live buffers alone would need.

    `pinned` is the size of the arena of pinned memory, 0 in a plan for the host.
    """

    variables: tuple[Variable, ...]
    programs: tuple[Program, ...]
    nbytes: int
    lower_bound: int
    pinned: int = 0

    def in_process(self, device: str) -> int:
        """Of its arenas, the bytes that are memory of the process."""
        return self.nbytes if device == HOST else self.pinned

    @property
    def notes(self) -> list[str]:
        """What a plan says of it, where the arena is larger than it might be."""
        over = self.nbytes - self.lower_bound
        if over < max(WORTH, self.lower_bound // 1000):
            return []
        return [f"the arena is {over / self.lower_bound:.1%} above the largest live set"]

    def __str__(self) -> str:
        ratio = align(self.nbytes) / max(self.lower_bound, 1)
        lines = [f"arena: {self.nbytes} bytes, {ratio:.3f} x the lower bound"]
        for program in self.programs:
            lines.append(f"  program {program.name}")
            lines += [
                f"    {r.offset:>12} +{r.nbytes:<10} x{r.slots} {r.name}" for r in program.registers
            ]
        return "\n".join(lines)


def plan_memory(variables: tuple[Variable, ...], programs: tuple[Program, ...]) -> Packed:
    """Give every variable, register and workspace its offset."""
    names = {v.name for v in variables}
    places, cursor = places_of(variables, programs)
    placed = [replace(variable, offset=places[variable.name]) for variable in variables]
    programs = tuple(share_inputs(program, names) for program in programs)
    offsets, lower = _place(programs, "", cursor)
    pinned, _ = _place(programs, PINNED, 0)
    finished = [
        _with_offsets(program, {**a, **b})
        for program, a, b in zip(programs, offsets, pinned, strict=True)
    ]
    top = max((v.offset + v.nbytes for v in placed), default=0)
    top = max(top, _top(finished, ""))
    return Packed(tuple(placed), tuple(finished), top, lower, _top(finished, PINNED))


def _place(
    programs: tuple[Program, ...], space: str, cursor: int
) -> tuple[list[dict[str, int]], int]:
    """Offsets in one space, from `cursor` on, for each program; and what they need at least."""
    found: list[dict[str, int]] = []
    for program in programs:
        offsets = {}
        for register in _lasting(program):
            if register.space == space:
                offsets[register.name] = cursor
                cursor = align(cursor + register.nbytes * register.slots)
        found.append(offsets)
    blocks = [
        [b for b in blocks_of(p, {r.name for r in _lasting(p)}) if b.space == space]
        for p in programs
    ]
    buffers = [[Buffer(b.nbytes, b.start, b.stop) for b in each] for each in blocks]
    least = max((lower_bound(each) for each in buffers), default=0)
    for offsets, mine, each in zip(found, blocks, buffers, strict=True):
        # Programs use this memory one after another: none need be below what another needs.
        for block, place in zip(mine, pack(each, enough=least).offsets, strict=True):
            offsets.update((name, cursor + place + inner) for name, inner in block.parts)
    return found, cursor + least


def _top(programs: list[Program], space: str) -> int:
    """How far into an arena anything reaches: the predicted peak."""
    ends = [
        r.offset + r.nbytes * r.slots for p in programs for r in p.registers if r.space == space
    ]
    spaces = [(workspace_space(t.route), sum(t.workspace)) for p in programs for t in p.tasks]
    return max([*ends, *(end for where, end in spaces if where == space)], default=0)


def _lasting(program: Program) -> list[Register]:
    lasting = outliving(program.tasks)
    return [r for r in program.registers if r.name in lasting]


def _with_offsets(program: Program, offsets: dict[str, int]) -> Program:
    return replace(
        program,
        registers=tuple(replace(r, offset=offsets[r.name]) for r in program.registers),
        tasks=tuple(
            replace(t, workspace=(offsets[_scratch(t)], t.workspace[1])) if t.workspace[1] else t
            for t in program.tasks
        ),
    )


def _scratch(task: Task) -> str:
    return f"\0{task.name}"


class _Times:
    """When tasks start and are known to be done, in positions of the compute stream.

    Compute task i has time 2i. A task of another stream starts after the last compute task that
    it depends on, at an odd time, and is done just before the first compute task that waits for it.
    """

    def __init__(self, program: Program) -> None:
        self.tasks = {task.name: task for task in program.tasks}
        order = dict(program.order)
        self.end = 2 * len(order.get(COMPUTE, ())) + 1
        self.start: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.phases: dict[int, tuple[int, int]] = {}
        self.segments: dict[int, tuple[int, int]] = {}
        loops = [task.phase for task in program.tasks if task.phase % 2]
        self.pipelined = max(loops, default=0) if program.sequence else -1
        self.compute = {program.tasks[i].name for i in order.get(COMPUTE, ())}
        for position, index in enumerate(order.get(COMPUTE, ())):
            name = program.tasks[index].name
            self.start[name] = self.done[name] = 2 * position
            begin, _ = self.phases.get(self.tasks[name].phase, (2 * position, 0))
            self.phases[self.tasks[name].phase] = begin, 2 * position
            if self.tasks[name].phase == self.pipelined:
                begin, _ = self.segments.get(self.tasks[name].segment, (2 * position, 0))
                self.segments[self.tasks[name].segment] = begin, 2 * position
        followers: dict[str, list[str]] = {task.name: [] for task in program.tasks}
        before = {name: list(needs) for name, needs in program.needs().items()}
        for stream, indices in order.items():
            names = [program.tasks[i].name for i in indices]
            if stream != COMPUTE:
                for first, second in pairwise(names):
                    before[second].append(first)
        for name, needs in before.items():
            for need in needs:
                followers[need].append(name)
        ordered = list(TopologicalSorter(before).static_order())
        for name in ordered:
            if name not in self.start:
                self.start[name] = self._start_of(before[name])
        for name in reversed(ordered):
            if name not in self.done:
                self.done[name] = self._done_of(followers[name])

    def use(self, task: Task, register: Register) -> tuple[int, int]:
        """From when until when a task uses a register: all of a loop, if its turns share that."""
        start, stop = self.start[task.name], self.done[task.name]
        if outlives_turns(task, register):
            # Another stream may begin a turn, or end one, while no kernel of the loop runs.
            first, last = self.phases[task.phase]
            return min(first - 1, start), max(last + 1, stop)
        return self.within(task, start, stop)

    def within(self, task: Task, start: int, stop: int) -> tuple[int, int]:
        """The time from `start` to `stop` of a task; where it is not within its segment, more."""
        if task.phase != self.pipelined:
            return start, stop
        begin, end = self.segments.get(task.segment, (self.end, -1))
        if task.kind == RECEIVE:  # which waits for nothing that this stage does
            return self.throughout(start, stop)
        start = max(start, begin - 1)
        if task.kind == SEND or stop > end:
            return self.throughout(start, stop)
        return start, stop

    def throughout(self, start: int, stop: int) -> tuple[int, int]:
        """A time, and all of the pipelined loop."""
        first, last = self.phases.get(self.pipelined, (start, stop))
        return min(first - 1, start), max(last + 1, stop)

    def whole_segments(self, start: int, stop: int) -> tuple[int, int]:
        """A life within one segment or beside the loop as it is; any other takes all of it."""
        if self.pipelined < 0 or self.pipelined not in self.phases:
            return start, stop
        first, last = self.phases[self.pipelined]
        if stop < first or start > last:
            return start, stop
        inside = any(a - 1 <= start and stop <= b for a, b in self.segments.values())
        return (start, stop) if inside else self.throughout(start, stop)

    def _start_of(self, before: list[str]) -> int:
        latest = max((self.start[name] for name in before), default=-1)
        return latest + 1 if latest % 2 == 0 else latest

    def _done_of(self, followers: list[str]) -> int:
        ends = (self.start[f] - 1 if f in self.compute else self.done[f] for f in followers)
        return min(ends, default=self.end)


def outlives_turns(task: Task, register: Register) -> bool:
    """Whether a register that a task of a loop uses is there for all micro-batches."""
    return task.phase % 2 == 1 and register.layout[0] == B


def share_inputs(program: Program, variables: set[str]) -> Program:
    """Let outputs take over the memory of an input that nobody needs any more."""
    times = _Times(program)
    registers = {r.name: r for r in program.registers}
    reserved = {r.name for r in _lasting(program)} | {o.register for o in program.outputs}
    readers: dict[str, list[Task]] = {}
    for task in program.tasks:
        for name in task.inputs:
            readers.setdefault(name, []).append(task)
    for name, register in registers.items():
        if register.aliases:  # an in-place collective keeps its pair to itself
            reserved.update((name, register.aliases))
    for task in program.tasks:
        if task.kind == D2H and len(task.inputs) > 1:  # of one piece, as what it is copied for
            reserved.update(task.inputs)
    for task in program.tasks:
        if task.kind != "compute":
            continue
        op = build_op(task.op, task.attributes)
        for i, j in op.inplace:
            source, target = task.inputs[i], task.outputs[j]
            if {source, target} & (variables | reserved) or registers[target].aliases:
                continue
            if outlives_turns(task, registers[source]) or outlives_turns(task, registers[target]):
                continue
            last = all(times.done[t.name] <= times.start[task.name] for t in readers[source])
            if last and _same_memory(registers[source], registers[target], op.view):
                registers[target] = replace(registers[target], aliases=source)
    return replace(program, registers=tuple(registers.values()))


def _same_memory(a: Register, b: Register, view: bool) -> bool:
    """Whether one can lie over the other; slots are counted for the life of each alone.

    In a `view` the elements of every shard keep their order, so that shapes and layouts may differ.
    """
    alike = (a.shape, a.layout) == (b.shape, b.layout) or (view and a.nbytes == b.nbytes)
    return alike and a.dtype == b.dtype and not (a.rewound or b.rewound)


def blocks_of(program: Program, lasting: set[str]) -> list[Block]:
    """What has to be placed: registers with those that share their memory, buckets, workspaces."""
    times = _Times(program)
    registers = {r.name: r for r in program.registers}
    root = {name: holder(name, registers) for name in registers}
    root = {name: registers[first].pool or first for name, first in root.items()}
    sharing: dict[str, list[str]] = {}
    for name, first in root.items():
        sharing.setdefault(first, []).append(name)
    life: dict[str, tuple[int, int]] = {}
    for task in program.tasks:
        for name in (*task.outputs, *task.inputs):
            if name in registers:
                _extend(life, root[name], *times.use(task, registers[name]))
    for output in program.outputs:
        _extend(life, root[output.register], times.end, times.end)
    joined = side_by_side(program, registers, root, lasting)
    life = {name: times.whole_segments(*span) for name, span in life.items()}
    blocks = []
    seen: set[str] = set()
    for name in registers:
        first = root[name]
        if first in lasting or first in seen:
            continue
        members = joined.get(first, [first])
        seen.update(members)
        blocks.append(_block(members, registers, sharing, life))
    return blocks + _workspaces(program, times)


def _workspaces(program: Program, times: _Times) -> list[Block]:
    """Where tasks work: those of compute each for themselves, messages of a stream by turns.

    Messages that are ready early would all hold theirs until they are sent, one after another. They
    take two by turns, so that one can be filled while the other is on its way.
    """
    blocks = []
    for stream, indices in program.order:
        lanes: dict[tuple[str, int], list[Block]] = {}
        working = [task for i in indices if (task := program.tasks[i]).workspace[1]]
        for number, task in enumerate(working):
            start, stop = times.within(task, times.start[task.name], times.done[task.name])
            space = workspace_space(task.route)
            block = Block(((_scratch(task), 0),), task.workspace[1], start, stop, space)
            alone = stream in (COMPUTE, WRITE) or stream in AHEAD
            lane = lanes.setdefault((space, number if alone else number % _LANES), [])
            if lane and start <= lane[-1].stop:
                lane.append(_in_common(lane.pop(), block, times))
            else:
                lane.append(block)
        blocks += [block for lane in lanes.values() for block in lane]
    return blocks


def _in_common(a: Block, b: Block, times: _Times) -> Block:
    """A workspace that two messages use, the second after the first."""
    start, stop = times.whole_segments(min(a.start, b.start), max(a.stop, b.stop))
    return Block((*a.parts, *b.parts), max(a.nbytes, b.nbytes), start, stop, a.space)


def _extend(life: dict[str, tuple[int, int]], name: str, start: int, stop: int) -> None:
    first, last = life.get(name, (start, stop))
    life[name] = min(first, start), max(last, stop)


def _block(
    members: list[str],
    registers: dict[str, Register],
    sharing: dict[str, list[str]],
    life: dict[str, tuple[int, int]],
) -> Block:
    """Members side by side, each with the registers that share its memory."""
    parts: list[tuple[str, int]] = []
    offset = 0
    for member in members:
        parts += [(name, offset) for name in sharing[member]]
        offset += registers[member].nbytes * registers[member].slots
    starts, stops = zip(*(life[member] for member in members), strict=True)
    return Block(tuple(parts), offset, min(starts), max(stops), registers[members[0]].space)
