"""Where a rank is in its plan, as few numbers as other ranks need to know whom it waits for.

    calls of a step   read x | start a | kernel f | kernel g | wait a | kernel h
    after kernel f    {read: 1, compute: 1, comm: 0}: g is at the head of `compute`, a of `comm`

All ranks run the same programs in the same order, and every stream its tasks in the order of the
plan; so that two positions can be compared, and the plan says what stands at the head of a stream.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from mpiflow.plan import calls as calling
from mpiflow.plan.records import COMPUTE, READ


@dataclass(frozen=True, slots=True)
class Position:
    """The `run`-th program that a rank runs, and by stream how many of its tasks are done.

    `program` is empty between two programs. `computing` is whether a kernel runs, rather than the
    rank waiting for one of its streams. `seconds` are predicted, for the task in hand.
    """

    run: int = 0
    program: str = ""
    step: int = 0
    done: tuple[tuple[str, int], ...] = ()
    computing: bool = False
    seconds: float = 0.0

    def head(self, stream: str) -> int:
        """The number of the first task of a stream that is not done."""
        return dict(self.done).get(stream, 0)


NOWHERE = Position()
"""Before the first program."""


class Walk:
    """The calls of one step of a program, for finding out where among them a rank is."""

    def __init__(self, order: calling.Calls) -> None:
        self._order = order
        self._ends: dict[str, list[int]] = {}
        for number, (action, task) in enumerate(order):
            stream = {calling.KERNEL: COMPUTE, READ: READ, calling.WAIT: task.stream}.get(action)
            if stream:
                self._ends.setdefault(stream, []).append(number)

    def done(self, call: int) -> tuple[tuple[str, int], ...]:
        """By stream, how many tasks are done while this call runs."""
        return tuple((stream, bisect_left(ends, call)) for stream, ends in self._ends.items())

    def position(self, run: int, program: str, step: int, call: int) -> Position:
        """The position of a rank that is in a call, or past the last one."""
        if call >= len(self._order):
            return Position(run, program, step, self.done(call))
        action, task = self._order[call]
        computing = action == calling.KERNEL
        return Position(run, program, step, self.done(call), computing, task.seconds)
