"""Kernels that come early, as others wait for what is exchanged behind them.

Two streams that have work in turn are busy for the shortest time if what is short on the first and
long on the second goes first (Johnson 1954, for flow shops of two machines). So among kernels that
are ready, those whose results are exchanged go first: the gradient of a layer's weights before that
of its input. And where a rank updates a part of a variable, which is gathered then, it does so in
the midst of the backward pass, as soon as the gradient has been reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from mpiflow.compiler.order import in_order
from mpiflow.plan.records import COMPUTE, Program, Task


def beside(program: Program, kernels: Sequence[int] = ()) -> Program:
    """With all other tasks listed beside the kernels, which are in their order or in this one.

    What kernels are needed for comes behind the last of them, anything else before its first use,
    kernels that need nothing too.
    """
    tasks, needs = program.tasks, program.needs()
    kernels = kernels or [i for i, task in enumerate(tasks) if task.stream == COMPUTE]
    turn = {tasks[i].name: place for place, i in enumerate(kernels) if needs[tasks[i].name]}
    behind: dict[str, int] = {}
    before: dict[str, int] = {}
    for name in TopologicalSorter(needs).static_order():
        behind[name] = turn.get(name, max((behind[n] for n in needs[name]), default=-1))
    for task in reversed(tasks):
        mine = turn.get(task.name, before.get(task.name, len(tasks)))
        for name in needs[task.name]:
            before[name] = min(mine, before.get(name, mine))

    def key(numbered: tuple[int, Task]) -> tuple[int, int, int]:
        i, task = numbered
        if task.name in turn:
            return turn[task.name], 1, i
        if behind[task.name] >= 0:
            return behind[task.name], 2, i
        return before.get(task.name, len(tasks)), 0, i

    listed = tuple(task for _, task in sorted(enumerate(tasks), key=key))
    return in_order(replace(program, tasks=listed))


def exchanged(tasks: Sequence[Task], followers: Sequence[Sequence[int]]) -> set[int]:
    """The kernels whose results are exchanged at once."""
    return {
        i
        for i, task in enumerate(tasks)
        if task.stream == COMPUTE and any(tasks[j].kind == "collective" for j in followers[i])
    }


class Early:
    """The kernels that updates with a gather behind them are made of, and when each is due.

    It is due when everything that was exchanged for it is over, and twice as late as predicted:
    an exchange that takes longer than that holds up the backward pass.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        needs: Sequence[Sequence[int]],
        followers: Sequence[Sequence[int]],
        registers: Sequence[frozenset[str]],
    ) -> None:
        """`registers` are those of the program of each task; what is not among them, a variable."""
        self._needs, self._followers = needs, followers
        gathers = {
            i
            for i, task in enumerate(tasks)
            if task.kind == "collective" and registers[i].isdisjoint(task.outputs)
        }
        self.members = _leading_to(gathers, tasks, followers)
        self._waits = dict.fromkeys(self.members, 0)
        for i in sorted(self.members):
            self._waits[i] = sum(
                self._waits.get(n, 0) > 0 or tasks[n].stream != COMPUTE for n in needs[i]
            )
        awaited = {n for i in self.members for n in needs[i] if tasks[n].stream != COMPUTE}
        self.seconds = {i: tasks[i].seconds for i in awaited}
        """How long after its end each exchange counts as over."""

    def over(self, exchange: int, promote: Callable[[int], None]) -> None:
        """An exchange is over; `promote` is called with every kernel that is due by that."""
        done = [exchange]
        while done:
            for i in self._followers[done.pop()]:
                if not self._waits.get(i):
                    continue
                self._waits[i] -= 1
                if not self._waits[i]:
                    self._demand(i, promote)
                    done.append(i)

    def _demand(self, kernel: int, promote: Callable[[int], None]) -> None:
        """Promote a kernel, and before it those that it needs and nothing was exchanged for."""
        wanted = [kernel]
        while wanted:
            i = wanted.pop()
            if i in self.members:
                self.members.remove(i)
                promote(i)
                wanted += self._needs[i]


def _leading_to(
    gathers: set[int], tasks: Sequence[Task], followers: Sequence[Sequence[int]]
) -> set[int]:
    """The kernels that one of these needs, and nothing else that is exchanged."""
    elsewhere: set[int] = set()
    found: set[int] = set()
    for i in reversed(range(len(tasks))):
        if i in gathers:
            continue
        if tasks[i].stream != COMPUTE or not elsewhere.isdisjoint(followers[i]):
            elsewhere.add(i)
        elif any(j in gathers or j in found for j in followers[i]):
            found.add(i)
    return found
