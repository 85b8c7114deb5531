"""Walk: fire a marked graph through, which proves that it ends and says what happens before what.

Firing whatever can fire, in any order, comes to the end of all streams exactly if no circle of the
graph is without a token: firing one thing never hinders another. Where streams are stuck, the
shortest circle of them is the counter-example.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import permutations
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
        self._came: set[tuple[int, int]] = set()  # lane and number of ends that need only the other
        self._heads: dict[Node, Firing] = {}
        self._waiting: dict[Node, set[Node]] = {}

    def run(self) -> Iterator[Firing]:
        """The firings, in an order in which each follows all that it waits for.

        VerifyError with the shortest circle where some are never reached.
        """
        ready = deque(self._queues)
        while ready:
            lane, stream = node = ready.popleft()
            while firing := self._heads.get(node) or next(self._queues[node], None):
                self._heads[node] = firing
                if unmet := next(self._unmet(lane, firing), None):
                    self._waiting.setdefault(unmet[0], set()).add(node)
                    break
                self.done[lane][stream] = firing.number
                yield self._heads.pop(node)
                ready.extend(self._waiting.pop(node, ()))
        if self._heads:
            raise VerifyError(self._stuck())

    def _unmet(self, lane: int, firing: Firing) -> Iterator[Arc]:
        """What a firing waits for still; once that is nothing else, the other end of its message.

        The second end to come fires, which wakes the first.
        """
        step, done, free = self.steps[lane], self.done[lane], True
        for task, micro, why in step.before(firing):
            stream, number = step.stream[task], step.number(task, micro)
            if done[stream] < number:
                yield (lane, stream), number, why
                free = False
        if free and (lane, firing.task) in self._ends:
            self._came.add((lane, firing.number))
            other, task = self._ends[lane, firing.task]
            there = self.steps[other]
            stream, number = there.stream[task], there.number(task, firing.micro)
            if self.done[other][stream] < number and (other, number) not in self._came:
                yield (other, stream), number, "to meet it: messages are not buffered"

    def _stuck(self) -> str:
        """The shortest circle of streams, of which each waits at its head for the next."""
        heads = sorted(self._heads.items())
        arcs = {node: list(self._unmet(node[0], head)) for node, head in heads}
        circles = (circle for node in arcs if (circle := _circle(node, arcs)))
        lines = []
        for node, (other, number, why) in min(circles, key=len):
            name, wanted = self._named(node, self._heads[node].number), self._named(other, number)
            lines.append(f"  {name} waits for {wanted} ({why})")
            if number != (head := self._heads[other].number):
                order = f"by the order of stream {self.steps[other[0]].streams[other[1]]}"
                lines.append(f"  {wanted} waits for {self._named(other, head)} ({order})")
        text = f"{len(lines)} tasks wait for each other"
        if len(lines) > 12:
            lines[6:-5] = [f"  ... and {len(lines) - 11} more ..."]
        return "\n".join([f"program {self.steps[0].program.name} would hang: {text}", *lines])

    def _named(self, node: Node, number: int) -> str:
        step = self.steps[node[0]]
        return f"stage {step.program.stage}: " * (len(self.steps) > 1) + step.label(number)


def _ends(steps: Sequence[Step]) -> dict[tuple[int, int], tuple[int, int]]:
    """Of each send and receive, by its lane and task, the other end of its message, if any."""
    messages: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for lane, step in enumerate(steps):
        for i, task in enumerate(step.tasks):
            if task.kind in (SEND, RECEIVE):
                stages = step.program.stage, task.attributes["stage"]
                ends = stages if task.kind == SEND else stages[::-1]
                messages.setdefault((*ends, task.attributes["message"]), []).append((lane, i))
    return dict(pair for ends in messages.values() for pair in permutations(ends, 2))


def _circle(start: Node, arcs: dict[Node, list[Arc]]) -> list[tuple[Node, Arc]]:
    """The shortest circle through a stream; empty where there is none."""
    paths, seen = deque([(start, arc)] for arc in arcs[start]), {start}
    while paths:
        path = paths.popleft()
        node = path[-1][1][0]
        if node == start:
            return path
        if node not in seen:
            seen.add(node)
            paths.extend([*path, (node, arc)] for arc in arcs[node])
    return []


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
            for task, micro, _ in step.before(firing):
                other, number = step.stream[task], step.number(task, micro)
                if other != stream and clock[other] < number:
                    merged = list(map(max, clock, self._over[number]))
                    merged[other] = number
                    clock = tuple(merged)
            latest[stream] = self._over[firing.number] = clock
            self.place[firing.number], self._stream[firing.number] = place, stream

    def before(self, stream: int, number: int, firing: int) -> bool:
        """Whether a firing of a stream is surely complete when another firing starts."""
        if stream == self._stream[firing]:
            return number < firing
        return self._over[firing][stream] >= number
