"""Walk: fire a marked graph through, which proves that it ends and says what happens before what.

Firing whatever can fire, in any order, comes to the end of all streams exactly if no circle of the
graph is without a token: firing one thing never hinders another. Where streams are stuck, the
shortest circle of them is the counter-example.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from mpiflow.errors import VerifyError
from mpiflow.plan.marked import Firing, Step
from mpiflow.plan.records import RECEIVE, SEND

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
        circles = (circle for node in arcs if (circle := _circle(node, arcs)))
        for node, (other, number, why) in min(circles, key=len):
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


def _circle(start: Node, arcs: dict[Node, list[Arc]]) -> list[tuple[Node, Arc]]:
    """The shortest circle through a stream; empty where there is none."""
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


Use = tuple[int, int]
"""A stream, and the number of a firing on it."""


class Order:
    """What happens before what in a step; VerifyError where it would not come to its end.

    Of each firing: its place in one valid order, and of each other stream the last firing that is
    surely complete when it starts.
    """

    def __init__(self, step: Step) -> None:
        self.place = [0] * step.size
        self._stream = [0] * step.size
        self._over: list[tuple[int, ...]] = [()] * step.size
        latest = [(-1,) * len(step.streams)] * len(step.streams)
        for place, firing in enumerate(Walk([step]).run()):
            stream = step.stream[firing.task]
            clock = latest[stream]
            for other, number, _ in step.before(firing):
                if other != stream and clock[other] < number:
                    merged = list(map(max, clock, self._over[number]))
                    merged[other] = number
                    clock = tuple(merged)
            latest[stream] = self._over[firing.number] = clock
            self.place[firing.number], self._stream[firing.number] = place, stream

    def before(self, use: Use, firing: int) -> bool:
        """Whether a firing is surely complete when another starts."""
        stream, number = use
        if stream == self._stream[firing]:
            return number < firing
        return self._over[firing][stream] >= number
