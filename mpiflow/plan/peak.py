"""What the arena of a plan, that of kernels, holds when it is fullest: by class and by tensor.

The moment is one of the order in which tasks can run; as no two buffers that live at once share a
byte, what lives then is at most the arena. What it leaves is room that other moments need. A loop
stands for as many micro-batches as have slots of their own, so those in flight count one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from mpiflow.plan.places import H2D, workspace_space
from mpiflow.plan.records import WRITE, Plan, Program, Register, Task, Variable
from mpiflow.plan.registers import holder, outliving
from mpiflow.plan.unroll import enough, folded, unroll
from mpiflow.plan.waits import in_turn, waits_of

CLASSES = (
    "variables", "optimizer state", "read slots", "staging of saves", "activations", "gradients",
    "updates", "communication", "workspace", "unused then",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is in memory at a peak: `times` in as many slots, `nbytes` in all of them together."""

    name: str
    kind: str
    nbytes: int
    times: int
    where: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment: while `task` of `program` runs. Bytes by class add up to the arena.

    `tensors` are in memory then, the largest first; those that share memory are there once, by the
    name of the newest.
    """

    program: str
    task: str
    where: str
    classes: tuple[tuple[str, int], ...]
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of the arena that something of a class holds, and the line that it comes from."""

    offset: int
    nbytes: int
    kind: str
    name: str
    where: str
    slots: int = 1


def peak(plan: Plan) -> Peak:
    """The fullest moment of all programs of a stage, the first of equals."""
    state = _state_of(plan.variables)
    lasting = [_Span(v.offset, v.nbytes, state[v.name], v.name, v.where) for v in plan.variables]
    lasting += [span for program in plan.programs for span in _lasting(program)]
    lives = [_Lives(program) for program in plan.programs if program.tasks]
    arena = plan.arena()
    if not lives:
        return Peak("", "", "", _by_class(lasting, arena), _tensors(lasting))
    fullest = max(lives, key=lambda one: one.largest)
    task, spans = fullest.task, fullest.spans()
    return Peak(
        fullest.program.name,
        folded(task),
        task.where,
        _by_class(lasting + spans, arena),
        _tensors(lasting + spans),
    )


def _tensors(spans: list[_Span]) -> tuple[Tensor, ...]:
    """What spans hold, those of one name together; of spans in the same place the first counts."""
    places: set[int] = set()
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for span in spans:
        if span.nbytes and span.offset not in places:
            places.add(span.offset)
            key = span.name, span.kind, span.where
            nbytes, times = found.get(key, (0, 0))
            found[key] = nbytes + span.nbytes, times + span.slots
    tensors = (Tensor(name, kind, *held, where) for (name, kind, where), held in found.items())
    return tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes))


def _state_of(variables: tuple[Variable, ...]) -> dict[str, str]:
    """The class of each variable: what is named after one that is trained is kept for it."""
    trained = tuple(f"{v.name}." for v in variables if v.trainable)
    return {
        v.name: "variables" if v.trainable or not v.name.startswith(trained) else "optimizer state"
        for v in variables
    }


def _lasting(program: Program) -> list[_Span]:
    """What is read ahead and written behind, which has places of its own all the time."""
    lasting = {
        name: ("staging of saves" if task.stream == WRITE else "read slots", task.where)
        for name, task in outliving(program.tasks).items()
    }
    return [
        _Span(r.offset, r.nbytes * r.slots, kind, r.name, where, r.slots)
        for r in program.registers
        if r.name in lasting and not r.space
        for kind, where in (lasting[r.name],)
    ]


class _Lives:
    """When the memory of each register of a program is in use, in places of one valid order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        unrolled = unroll(program, enough(program))
        self.order = [unrolled.tasks[i] for i in in_turn(unrolled, waits_of(unrolled))]
        lasting = outliving(unrolled.tasks)
        self.registers = {
            r.name: r for r in unrolled.registers if r.name not in lasting and not r.space
        }
        self.producer = {n: t for t in unrolled.tasks for n in t.outputs if n in self.registers}
        self.life: dict[str, tuple[int, int]] = {}
        for place, task in enumerate(self.order):
            for name in (*task.inputs, *task.outputs):
                if name in self.registers:
                    self.life[name] = self.life.get(name, (place, place))[0], place
        for output in unrolled.outputs:
            if output.register in self.life:
                self.life[output.register] = self.life[output.register][0], len(self.order) - 1
        sums = self._sums()
        self.largest = max(sums)
        self.place = sums.index(self.largest)

    @property
    def task(self) -> Task:
        """The one that runs when most is in use."""
        return self.order[self.place]

    def _sums(self) -> list[int]:
        """Bytes in use at each place; those that share memory count once."""
        chains: dict[str, tuple[int, int]] = {}
        for name, (start, stop) in self.life.items():
            root = holder(name, self.registers)
            first, last = chains.get(root, (start, stop))
            chains[root] = min(first, start), max(last, stop)
        changes = [0] * (len(self.order) + 1)
        for root, (start, stop) in chains.items():
            if not self.registers[root].aliases:  # the memory is not that of a variable
                changes[start] += self.registers[root].nbytes
                changes[stop + 1] -= self.registers[root].nbytes
        held = accumulate(changes[:-1])
        return [n + _workspace(task)[1] for n, task in zip(held, self.order, strict=True)]

    def spans(self) -> list[_Span]:
        """What is in use at the fullest place; the newest first, as it is what a byte is now."""
        alive = [n for n, (start, stop) in self.life.items() if start <= self.place <= stop]
        alive.sort(key=lambda name: -self.life[name][0])
        spans = [self._span(self.registers[name]) for name in alive]
        offset, nbytes = _workspace(self.task)
        return [*spans, _Span(offset, nbytes, "workspace", folded(self.task), self.task.where)]

    def _span(self, register: Register) -> _Span:
        """The slot of a register, which stands for one micro-batch where it is of a loop."""
        slot = register.micro % register.slots if register.rewound else 0
        producer = self.producer[register.name]
        name = register.name.rpartition("#")[0] if producer.phase % 2 else register.name
        offset = register.offset + slot * register.nbytes
        return _Span(offset, register.nbytes, self._class(register), name, producer.where)

    def _class(self, register: Register) -> str:
        """What a register holds, by the task that makes it."""
        while self.producer[register.name].kind in ("collective", H2D) and (
            register.aliases in self.registers
        ):
            register = self.registers[register.aliases]
        if self.producer[register.name].kind in ("collective", H2D):
            return "communication"
        if register.name.startswith("grad/"):
            return "gradients"
        return "updates" if register.name.startswith("update/") else "activations"


def _workspace(task: Task) -> tuple[int, int]:
    """Offset and bytes of what a task needs beside registers, where it is memory of kernels."""
    return (0, 0) if workspace_space(task.route) else task.workspace


def _by_class(spans: list[_Span], arena: int) -> tuple[tuple[str, int], ...]:
    """Bytes by class, each counted once, for the first span that holds it; and what is left."""
    held = dict.fromkeys(CLASSES, 0)
    edges = sorted({edge for span in spans for edge in (span.offset, span.offset + span.nbytes)})
    waiting = sorted(range(len(spans)), key=lambda i: -spans[i].offset)
    here: list[int] = []
    for begin, end in pairwise(edges):
        while waiting and spans[waiting[-1]].offset <= begin:
            heappush(here, waiting.pop())
        while here and spans[here[0]].offset + spans[here[0]].nbytes <= begin:
            heappop(here)
        if here:
            held[spans[here[0]].kind] += end - begin
    held["unused then"] = arena - sum(held.values())
    return tuple(held.items())
