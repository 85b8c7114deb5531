"""Calls: the one order in which a rank's thread does what the plan has on several streams.

    kernel   a compute task                       start, wait   a collective, a send or a receive
    read     until what is read is there          free          a slot of what was read, given back

Kernels come in the order of their stream. Everything else starts as soon as what it needs is done,
and is waited for just before the first task that needs it. Between pipeline stages a wait may hold
up what another stage waits for, so every send that can be started is, before any wait;
`verify_calls` proves of each plan that the calls of all its stages come to their ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from mpiflow.plan.places import D2H, H2D, workspace_space
from mpiflow.plan.records import COMPUTE, READ, SEND, WRITE, Program, Register, Task

KERNEL, START, WAIT, FREE = "kernel", "start", "wait", "free"

Calls = list[tuple[str, Task]]
"""What is done, of which task; `READ` waits for a read."""


def calls_of(program: Program, tensors: Mapping[str, Register]) -> Calls:
    """The calls of a program without loops, whose registers and variables are `tensors`."""
    walk = _Walk(program, tensors)
    walk.run()
    return walk.calls


class _Walk:
    """Merges the streams that one thread serves into one list."""

    def __init__(self, program: Program, tensors: Mapping[str, Register]) -> None:
        self.tensors = tensors
        self.tasks = {task.name: task for task in program.tasks}
        self.needs = program.needs()
        order = dict(program.order)
        self.compute = [program.tasks[i] for i in order.get(COMPUTE, ())]
        self.queues = {
            stream: deque(program.tasks[i] for i in indices)
            for stream, indices in order.items()
            if stream not in (COMPUTE, READ, WRITE)
        }
        self.queued = {task.name for queue in self.queues.values() for task in queue}
        self.unused = deque(_users_of_reads(program))
        self.uses: dict[str, list[set[str]]] = {}  # of each task, the sets above that it is in
        for users in self.unused:
            for name in users:
                self.uses.setdefault(name, []).append(users)
        self.started: dict[str, deque[Task]] = {stream: deque() for stream in self.queues}
        self.done: set[str] = set()
        self.sending = False
        self.calls: Calls = []

    def run(self) -> None:
        """Walk the compute stream; what is left of the others follows."""
        self._start_ready()
        for task in self.compute:
            for name in self.needs[task.name]:
                self._complete(name)
            self.calls.append((KERNEL, task))
            self._finish(task)
            self._start_ready()
        for stream, queue in self.queues.items():
            while queue or self.started[stream]:
                self._complete((queue or self.started[stream])[-1].name)

    def _finish(self, task: Task) -> None:
        """The task is done; give back the slots that nobody needs any more, the oldest first."""
        self.done.add(task.name)
        for users in self.uses.get(task.name, ()):
            users.remove(task.name)
        while self.unused and not self.unused[0]:
            self.unused.popleft()
            self.calls.append((FREE, task))

    def _complete(self, name: str) -> None:
        """Do what it takes for a task to be done."""
        if name in self.done:
            return
        task = self.tasks[name]
        if task.stream == READ:
            self.calls.append((READ, task))
            self.done.add(name)
            return
        while name in self.queued:
            self._start(self.queues[task.stream][0])
        self._wait_up_to(task)

    def _start_ready(self) -> None:
        """Start every collective whose turn it is and whose inputs are there."""
        for queue in self.queues.values():
            while queue and all(name in self.done for name in self.needs[queue[0].name]):
                self._start(queue[0])

    def _start(self, task: Task) -> None:
        """Start a task as soon as what it needs is done, unless a send has had to do so by then."""
        for name in self.needs[task.name]:
            self._complete(name)
        running = self.started[task.stream]
        for earlier in list(running):
            if task.kind == "collective" and self._touch(earlier, task):
                self._wait_up_to(earlier)
        if task.name not in self.queued:
            return
        self.queues[task.stream].popleft()
        self.queued.remove(task.name)
        running.append(task)
        self.calls.append((START, task))

    def _send_computed(self) -> None:
        """Start every send of what is computed, as another stage may wait for it.

        First what needs no other wait than for copies, then what comes out of collectives, which
        all ranks of the stage can end, and last what fills memory that has to be sent before.
        """
        if self.sending:
            return
        self.sending = True
        copies = (H2D, D2H)
        for kinds in (copies, (*copies, "collective"), (*copies, "collective", SEND)):
            for stream, queue in self.queues.items():
                while stream.startswith(SEND) and queue and self._is_computed(queue[0], kinds):
                    self._start(queue[0])
        self.sending = False

    def _is_computed(self, task: Task, kinds: tuple[str, ...]) -> bool:
        """Whether nothing is missing for a task but some of these kinds that can be completed."""
        missing = [self.tasks[name] for name in self.needs[task.name] if name not in self.done]
        return all(need.kind in kinds and self._is_computed(need, kinds) for need in missing)

    def _wait_up_to(self, task: Task) -> None:
        """Wait for a task and all before it on its stream, in order."""
        self._send_computed()
        running = self.started[task.stream]
        while task.name not in self.done:
            first = running.popleft()
            self.calls.append((WAIT, first))
            self._finish(first)

    def _touch(self, a: Task, b: Task) -> bool:
        """Whether two tasks use the same memory, so that they may not overlap in time."""
        return any(
            space == b_space and x < b_stop and b_start < x_stop
            for space, x, x_stop in self._memory(a)
            for b_space, b_start, b_stop in self._memory(b)
        )

    def _memory(self, task: Task) -> list[tuple[str, int, int]]:
        spans = [
            (r.space, r.offset, r.offset + r.nbytes * r.slots)
            for r in (self.tensors[name] for name in (*task.inputs, *task.outputs))
        ]
        offset, nbytes = task.workspace
        return [*spans, (workspace_space(task.route), offset, offset + nbytes)]


def _users_of_reads(program: Program) -> list[set[str]]:
    """The tasks that use what each read gives, in the order of the reads."""
    reads = [task for task in program.tasks if task.stream == READ]
    number = {name: k for k, read in enumerate(reads) for name in read.outputs}
    users: list[set[str]] = [set() for _ in reads]
    for task in program.tasks:
        for name in number.keys() & task.inputs:
            users[number[name]].add(task.name)
    return users
