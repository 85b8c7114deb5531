"""Unroll: a program with its loops over micro-batches written out, each firing a task of its own.

    register x, S or P in time    x#0, x#1, ...    same memory, in turn (or slots in turn)
    a sum a, B, made in a loop    a#0, a#1, ...    a#k is a#k-1 with one more contribution, in place
    any other register            itself

Only reads run ahead of a turn: what needs nothing else of it (a collective on a field, say) comes
after the last compute task of the turn before.

What the loops of the plan mean is said here once: verifier, simulator and binder all work on the
program that this gives, which is one without loops.
"""

from __future__ import annotations

from dataclasses import replace

from mpiflow.graph.sbp import B
from mpiflow.plan.records import COMPUTE, READ, Program, Register, Task

ENOUGH = 3
"""Micro-batches that stand for any number: a first, one in the middle and a last.

Every loop does the same for each of them, and what one leaves is used by the next or at the end.
"""


def unroll(program: Program, micro_batches: int | None = None) -> Program:
    """The program without loops; the first `micro_batches` of each (default: all)."""
    if program.micro_batches == 1:
        return program
    return _Unroller(program, micro_batches or program.micro_batches).unrolled()


def folded(firing: Task) -> str:
    """The name in the plan of the task that a firing is of."""
    return firing.name.rpartition("#")[0] if firing.phase % 2 else firing.name


def slot_before(register: Register, micro_batches: int) -> tuple[str, int]:
    """Whose slot a register takes: its name, and how many steps ago that was filled."""
    name, _, micro = register.name.rpartition("#")
    if micro_batches == 1 or micro != str(register.micro):
        return register.name, register.slots
    steps, earlier = divmod(register.micro - register.slots, micro_batches)
    return _numbered(name, earlier), -steps


class _Unroller:
    def __init__(self, program: Program, count: int) -> None:
        self.program, self.count = program, min(count, program.micro_batches)
        self.in_time = {r.name for r in program.registers if r.layout[0] != B}
        self.phase = {task.name: task.phase for task in program.tasks}
        registers = {register.name for register in program.registers}
        self.loop = {  # the loop in which a register is made
            name: task.phase
            for task in program.tasks
            if task.phase % 2
            for name in task.outputs
            if name in registers
        }
        self.first, self.last = self._ends_of_turns()
        self.index: dict[tuple[int, int], int] = {}
        self.tasks: list[Task] = []

    def unrolled(self) -> Program:
        phases = sorted({task.phase for task in self.program.tasks})
        for phase in phases:
            members = [i for i, t in enumerate(self.program.tasks) if t.phase == phase]
            for micro in range(self._firings(phase)):
                for i in members:
                    self.index[i, micro] = len(self.tasks)
                    self.tasks.append(self._task(self.program.tasks[i], micro))
        order = tuple(
            (stream, tuple(self._order(indices, phases))) for stream, indices in self.program.order
        )
        outputs = tuple(
            replace(o, register=self._name(o.register, 0, -1)) for o in self.program.outputs
        )
        return replace(
            self.program,
            registers=tuple(made for r in self.program.registers for made in self._copies(r)),
            tasks=tuple(self.tasks),
            order=order,
            outputs=outputs,
        )

    def _ends_of_turns(self) -> tuple[set[str], dict[int, str]]:
        """Tasks that begin a turn on other streams than `compute`; the last of compute, by loop."""
        needs, tasks = self.program.needs(), {task.name: task for task in self.program.tasks}
        first = set()
        for task in self.program.tasks:
            if task.phase % 2 and task.stream not in (COMPUTE, READ):
                before = (tasks[name] for name in needs[task.name])
                if not any(t.phase == task.phase and t.stream != READ for t in before):
                    first.add(task.name)
        computed = [self.program.tasks[i] for i in dict(self.program.order).get(COMPUTE, ())]
        return first, {task.phase: task.name for task in computed}

    def _firings(self, phase: int) -> int:
        return self.count if phase % 2 else 1

    def _order(self, indices: tuple[int, ...], phases: list[int]) -> list[int]:
        return [
            self.index[i, micro]
            for phase in phases
            for micro in range(self._firings(phase))
            for i in indices
            if self.program.tasks[i].phase == phase
        ]

    def _task(self, task: Task, micro: int) -> Task:
        inputs = [self._name(name, micro, task.phase) for name in task.inputs]
        for name in task.outputs:
            if micro and name in self.loop and name not in self.in_time:
                inputs.append(_numbered(name, micro - 1))
        after = [self._after(name, micro, task.phase) for name in task.after]
        if micro and task.name in self.first and task.phase in self.last:
            after.append(_numbered(self.last[task.phase], micro - 1))
        return replace(
            task,
            name=_numbered(task.name, micro) if task.phase % 2 else task.name,
            inputs=tuple(inputs),
            outputs=tuple(self._name(name, micro, task.phase) for name in task.outputs),
            after=tuple(after),
            micro=micro,
        )

    def _after(self, name: str, micro: int, phase: int) -> str:
        """The firing that a task comes after: of the same micro-batch, or the last of its loop."""
        own = self.phase[name]
        if not own % 2:
            return name
        return _numbered(name, micro if own == phase else self.count - 1)

    def _name(self, name: str, micro: int, phase: int) -> str:
        """What a task of that phase knows a register as; a sum is known as its end elsewhere."""
        if name in self.in_time:
            return _numbered(name, micro)
        if name not in self.loop:
            return name
        return _numbered(name, micro if self.loop[name] == phase else self.count - 1)

    def _copies(self, register: Register) -> list[Register]:
        if register.name not in self.loop:
            return [replace(register, aliases=self._name(register.aliases, 0, -1))]
        copies = []
        for micro in range(self.count):
            if micro and register.name not in self.in_time:
                aliases = _numbered(register.name, micro - 1)
            else:
                aliases = self._name(register.aliases, micro, self.loop[register.name])
            name = _numbered(register.name, micro)
            copies.append(replace(register, name=name, aliases=aliases, micro=micro))
        return copies


def _numbered(name: str, micro: int) -> str:
    return f"{name}#{micro}"
