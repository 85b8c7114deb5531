"""Unroll: a program with its loops over micro-batches written out, each firing a task of its own.

    register x, S or P in time    x#0, x#1, ...    same memory, in turn (or slots in turn)
    a sum a, B, made in a loop    a#0, a#1, ...    a#k is a#k-1 with one more contribution, in place
    any other register            itself

Only reads and receives run ahead of a turn: what needs nothing else of it (a collective on a field,
say) comes after the last compute task of the turn before. With pipeline stages the turns of the
last loop are those of the program's `sequence`; what fills a slot of a register comes after all
that used what it held.

This is what ranks do: the binder works on the program that this gives, which is one without loops.
The verifier and the simulator have a graph of their own, see `plan.marked`.
"""

from __future__ import annotations

from dataclasses import replace

from mpiflow.graph.sbp import B
from mpiflow.plan.places import AHEAD
from mpiflow.plan.records import COMPUTE, RECEIVE, Program, Register, Task
from mpiflow.plan.registers import holder
from mpiflow.plan.seats import seats

ENOUGH = 3
"""Micro-batches that stand for any number: a first, one in the middle and a last.

Every loop does the same for each of them, and what one leaves is used by the next or at the end.
"""


def unroll(program: Program, micro_batches: int | None = None) -> Program:
    """The program without loops; the first `micro_batches` of each (default: all)."""
    if program.micro_batches == 1:
        return program
    return _Unroller(program, micro_batches or program.micro_batches).unrolled()


def enough(program: Program) -> int:
    """Micro-batches that stand for any number: with slots, more than are in flight at once."""
    return ENOUGH + max((r.slots for r in program.registers if r.rewound), default=0)


def folded(firing: Task) -> str:
    """The name in the plan of the task that a firing is of."""
    return firing.name.rpartition("#")[0] if firing.phase % 2 else firing.name


def slot_before(register: Register, micro_batches: int) -> tuple[str, int]:
    """Whose slot a register takes: its name, and how many steps ago that was filled."""
    name, _, micro = register.name.rpartition("#")
    if micro_batches == 1 or micro != str(register.micro):
        return register.name, register.slots
    if register.rewound and register.micro < register.slots:
        turns = (micro_batches - 1 - register.micro) // register.slots
        return _numbered(name, register.micro + turns * register.slots), 1
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
        self.members: dict[tuple[int, int | None], list[int]] = {}
        for i, task in enumerate(program.tasks):
            for segment in (None, task.segment):
                self.members.setdefault((task.phase, segment), []).append(i)
        self.seats = seats(program)
        self.first = self._beginning_turns()
        self.turns = {phase: self._turns(phase) for phase in sorted(set(self.phase.values()))}
        self.waits: dict[tuple[str, int], list[str]] = {}
        self._wait_for_turns()
        self._wait_for_slots()
        self.index: dict[tuple[int, int], int] = {}
        self.tasks: list[Task] = []

    def unrolled(self) -> Program:
        for phase, turns in self.turns.items():
            for segment, micro in turns:
                for i in self._members(phase, segment):
                    self.index[i, micro] = len(self.tasks)
                    self.tasks.append(self._task(self.program.tasks[i], micro))
        order = tuple((stream, self._order(indices)) for stream, indices in self.program.order)
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

    def _turns(self, phase: int) -> list[tuple[int | None, int]]:
        """The turns of a phase: which segment (None: all) is done of which micro-batch."""
        if not phase % 2:
            return [(None, 0)]
        if self._is_pipelined(phase):
            return [(segment, k) for segment, k in self.program.sequence if k < self.count]
        return [(None, micro) for micro in range(self.count)]

    def _is_pipelined(self, phase: int) -> bool:
        """Whether a phase is the loop that is done in segments."""
        loops = (phase for phase in self.phase.values() if phase % 2)
        return bool(self.program.sequence) and phase == max(loops, default=-1)

    def _members(self, phase: int, segment: int | None) -> list[int]:
        """The tasks of a turn."""
        return self.members.get((phase, segment), [])

    def _beginning_turns(self) -> set[str]:
        """Tasks that begin a turn on other streams than `compute`, and do not run ahead of it."""
        needs, tasks = self.program.needs(), {task.name: task for task in self.program.tasks}
        first = set()
        for task in self.program.tasks:
            if task.phase % 2 and task.kind != "compute" and not _runs_ahead(task):
                before = (tasks[name] for name in needs[task.name])
                turn = task.phase, task.segment
                if not any((t.phase, t.segment) == turn and not _runs_ahead(t) for t in before):
                    first.add(task.name)
        return first

    def _wait_for_turns(self) -> None:
        """Let what begins a turn come after the last firing of compute of the turns before.

        In segments, whose memory others use before the loop, the first turn waits as well.
        """
        computed: dict[tuple[int, int | None], str] = {}
        for i in dict(self.program.order).get(COMPUTE, ()):
            task = self.program.tasks[i]
            computed[task.phase, None] = computed[task.phase, task.segment] = task.name
        before = ""
        for phase, turns in self.turns.items():
            last = before if self._is_pipelined(phase) else ""
            for segment, micro in turns:
                for i in self._members(phase, segment):
                    name = self.program.tasks[i].name
                    if last and name in self.first:
                        self.waits.setdefault((name, micro), []).append(last)
                if found := computed.get((phase, segment)):
                    last = before = _numbered(found, micro) if phase % 2 else found

    def _wait_for_slots(self) -> None:
        """Let what fills a slot anew come after the firings on other streams that used it."""
        registers = {r.name: r for r in self.program.registers}
        root = {name: holder(name, registers) for name in registers}
        made = {n: task for task in self.program.tasks for n in task.outputs if n in registers}
        users: dict[str, list[Task]] = {}
        for task in self.program.tasks:
            for name in task.inputs:
                if name in registers and registers[name].rewound:
                    users.setdefault(root[name], []).append(task)
        for name, tasks in users.items():
            producer, slots = made[name], registers[name].slots
            others = [t.name for t in tasks if t.stream != producer.stream]
            for micro in range(slots, self.count):
                waits = self.waits.setdefault((producer.name, micro), [])
                waits += [_numbered(name, micro - slots) for name in others]

    def _order(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        found = []
        for phase, turns in self.turns.items():
            for segment, micro in turns:
                members = set(self._members(phase, segment))
                found += [self.index[i, micro] for i in indices if i in members]
        return tuple(found)

    def _task(self, task: Task, micro: int) -> Task:
        inputs = [self._name(name, micro, task.phase) for name in task.inputs]
        for name in task.outputs:
            if micro and name in self.loop and name not in self.in_time:
                inputs.append(_numbered(name, micro - 1))
        after = [self._after(name, micro, task.phase) for name in task.after]
        after += self.waits.get((task.name, micro), ())
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
            copy = replace(register, name=name, aliases=aliases, micro=micro)
            if register.pool:
                place = register.offset + self.seats[register.name][micro] * register.nbytes
                copy = replace(copy, offset=place, slots=1, pool="")
            copies.append(copy)
        return copies


def _runs_ahead(task: Task) -> bool:
    """Whether it may come before its turn: what is read, and what other stages send."""
    return task.stream in AHEAD or task.kind == RECEIVE


def _numbered(name: str, micro: int) -> str:
    return f"{name}#{micro}"
