"""Handshakes: what the streams of a rank wait for of one another within a step.

Each stream goes through its items in order, and nothing else orders them: there is no list of what
a rank does. An item waits until other streams have come far enough.

    compute      a segment: a run of tasks within which nobody waits for anybody
    others       one task: a collective, a send, a receive or a read

An item may start as soon as the one before it on its stream has started, if they use no memory in
common; it counts as done once all before it are. What `write` does outlives the step, and is left
out. A copy to the device of what is read may begin in the step before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mpiflow.plan.places import FEED, workspace_space
from mpiflow.plan.records import COMPUTE, READ, WRITE, Program, Register, Task
from mpiflow.plan.rows import ROW_KINDS
from mpiflow.plan.unroll import slot_before

Waits = dict[str, int]
"""By stream, how many of its items must be done."""
Place = tuple[str, int]
"""A space, and a byte of it."""


@dataclass(frozen=True, slots=True)
class Item:
    """What a stream does in one go. `waits` gives streams, and how many items of each come first.

    `awaited` is whether another stream waits for this item, or the end of the step does. Of one
    that may begin in the step before, `early` is what it waits for there; None for all others.
    """

    tasks: tuple[Task, ...]
    waits: tuple[tuple[str, int], ...]
    awaited: bool = True
    early: tuple[tuple[str, int], ...] | None = None

    def waits_only_for(self, *streams: str) -> bool:
        """Whether it waits for none but these streams of its own step."""
        return all(stream in streams for stream, _ in self.waits)


def items_of(program: Program, tensors: Mapping[str, Register]) -> dict[str, tuple[Item, ...]]:
    """By stream: its items, of a program without loops whose registers and variables these are."""
    tasks = {
        stream: [program.tasks[i] for i in indices]
        for stream, indices in program.order
        if indices and stream != WRITE
    }
    place = {t.name: (stream, n) for stream, order in tasks.items() for n, t in enumerate(order)}
    needs = program.needs()
    waits: dict[str, list[Waits]] = {}
    early: list[Waits] = []
    for stream, order in tasks.items():
        needed = [_needed(needs[task.name], place) for task in order]
        if stream == FEED:
            early = _wait_for_slots(needed, order, place, program)
        if stream not in (COMPUTE, READ):
            _wait_for_memory(stream, needed, order, tensors)
        waits[stream] = _news(stream, needed)
    segments = _segments(waits)
    items = {
        stream: (
            _computed(order, waits, segments)
            if stream == COMPUTE
            else tuple(
                Item((task,), _in_segments(found, segments))
                for task, found in zip(order, waits[stream], strict=True)
            )
        )
        for stream, order in tasks.items()
    }
    if early:
        items[FEED] = tuple(
            replace(item, early=_in_segments(before, segments))
            if item.waits_only_for(READ, FEED)
            else item
            for item, before in zip(items[FEED], early, strict=True)
        )
    return items


def _needed(names: Sequence[str], place: Mapping[str, tuple[str, int]]) -> Waits:
    """How far each stream must be for these tasks to be done."""
    found: Waits = {}
    for name in names:
        stream, number = place[name]
        found[stream] = max(found.get(stream, 0), number + 1)
    return found


def _wait_for_memory(
    stream: str, waits: list[Waits], order: list[Task], tensors: Mapping[str, Register]
) -> None:
    """Let tasks wait for those before them on their stream that use the same memory.

    Rows by owner go through several exchanges, whose order all members must agree on: such a
    message waits for all before it, and all after it wait for it.
    """
    memory = _LastUses([_memory(task, tensors) for task in order])
    alone = 0
    for number, task in enumerate(order):
        rows = task.op in ROW_KINDS
        last = max(number if rows else alone, memory.before(number))
        if last:
            waits[number][stream] = max(waits[number].get(stream, 0), last)
        if rows:
            alone = number + 1


def _wait_for_slots(
    waits: list[Waits], order: list[Task], place: Mapping[str, tuple[str, int]], program: Program
) -> list[Waits]:
    """Let what fills slots of the device anew wait for those who used them in this step.

    Gives what those who used them in the step before are: nobody did where a slot is older. Those
    who fill slots of the host are told by `exec.streams`.
    """
    registers = {register.name: register for register in program.registers}
    users: dict[str, list[str]] = {}
    for task in program.tasks:
        for name in task.inputs:
            users.setdefault(name, []).append(task.name)
    early: list[Waits] = []
    for found, task in zip(waits, order, strict=True):
        early.append({})
        for name in task.outputs:
            before, ago = slot_before(registers[name], program.micro_batches)
            if ago <= 1 and (ago or before != name):
                needed = _needed(users.get(before, ()), place)
                these = early[-1] if ago else found
                these |= {s: max(n, these.get(s, 0)) for s, n in needed.items()}
    return early


class _LastUses:
    """Who used memory last, of tasks taken in their order, each with the spans that it uses."""

    def __init__(self, spans: list[list[tuple[Place, Place]]]) -> None:
        self._spans = spans
        self._edges = sorted({edge for own in spans for span in own for edge in span})
        self._last = [0] * len(self._edges)

    def before(self, number: int) -> int:
        """How many tasks must be done before this one, which is then the last user."""
        found = 0
        for start, stop in self._spans[number]:
            first, end = bisect_left(self._edges, start), bisect_left(self._edges, stop)
            found = max(found, *self._last[first:end], 0)
        for start, stop in self._spans[number]:
            first, end = bisect_left(self._edges, start), bisect_left(self._edges, stop)
            self._last[first:end] = [number + 1] * (end - first)
        return found


def _memory(task: Task, tensors: Mapping[str, Register]) -> list[tuple[Place, Place]]:
    """The bytes that a task may use, as start and stop; all slots of its registers."""
    registers = (tensors[name] for name in (*task.inputs, *task.outputs))
    spans = [(r.space, r.offset, r.offset + r.nbytes * r.slots) for r in registers]
    spans.append((workspace_space(task.route), task.workspace[0], sum(task.workspace)))
    return [((space, start), (space, stop)) for space, start, stop in spans]


def _news(stream: str, needed: list[Waits]) -> list[Waits]:
    """Of each task what it waits for, unless one before it on its stream has waited for that."""
    known: Waits = {}
    news = []
    for waits in needed:
        found = {s: n for s, n in waits.items() if n > known.get(s, 0) and s != stream}
        if stream != COMPUTE and waits.get(stream, 0) > known.get(stream, 0):
            found[stream] = waits[stream]
        known |= found
        news.append(found)
    return news


def _segments(waits: Mapping[str, list[Waits]]) -> list[int]:
    """The tasks of compute with which segments begin, and their number at the end."""
    computed = waits.get(COMPUTE, [])
    cuts = {number for number, found in enumerate(computed) if found}
    cuts |= {found.get(COMPUTE, 0) for own in waits.values() for found in own}
    return sorted({0, *cuts, len(computed)})


def _in_segments(waits: Waits, segments: list[int]) -> tuple[tuple[str, int], ...]:
    """The waits, those for tasks of compute as waits for their segments."""
    return tuple((s, bisect_left(segments, n) if s == COMPUTE else n) for s, n in waits.items())


def _computed(
    order: list[Task], waits: Mapping[str, list[Waits]], segments: list[int]
) -> tuple[Item, ...]:
    """The segments of compute."""
    awaited = {found.get(COMPUTE, 0) for own in waits.values() for found in own} | {len(order)}
    return tuple(
        Item(
            tuple(order[first:stop]),
            _in_segments(waits[COMPUTE][first], segments),
            awaited=stop in awaited,
        )
        for first, stop in pairwise(segments)
    )
