"""The schedules of a pipeline: which stage does which segment of which micro-batch, in turn.

A stage that holds v pieces of the model has 3 v segments at most, numbered as one micro-batch goes
through them: forward of piece j is j, backward is 2v-1-j; where gradients of weights are computed
apart, so that they can wait, those of piece j are 3v-1-j.

    1f1b          as few micro-batches in flight as keep all stages busy, backward first
    gpipe         all forward, then all backward
    interleaved   several pieces a stage, so that a pipeline fills sooner (Narayanan et al. 2021)
    zero-bubble   gradients of weights fill the gaps: ZB-H1 (Qi et al. 2024)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import zip_longest

from mpiflow.compiler.domains import DATA
from mpiflow.errors import UsageError
from mpiflow.graph.mesh import STAGE, Mesh
from mpiflow.graph.sbp import B
from mpiflow.plan.places import AHEAD
from mpiflow.plan.records import COMPUTE, RECEIVE, Program, Register, Task
from mpiflow.plan.registers import holder
from mpiflow.plan.seats import Span, take_seats

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")

Sequence = tuple[tuple[int, int], ...]
"""Segments and their micro-batches."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the stages work together. `ahead` is how many more micro-batches may be in flight."""

    schedule: str = "1f1b"
    virtual: int = 1
    ahead: int = 0

    def check(self, mesh: Mesh, micro_batches: int) -> None:
        """UsageError for what cannot be scheduled."""
        if self.schedule not in SCHEDULES:
            raise UsageError(f"--schedule {self.schedule!r} is none of {', '.join(SCHEDULES)}")
        if self.virtual < 1:
            raise UsageError(f"--virtual must be at least 1, not {self.virtual}")
        if self.virtual > 1 and self.schedule != "interleaved":
            raise UsageError(
                f"--virtual {self.virtual} is for --schedule interleaved, not {self.schedule}"
            )
        asked = self.schedule != "1f1b" or self.virtual > 1
        if asked and mesh.stages == 1:
            raise UsageError(
                f"--schedule {self.schedule} is for pipeline stages; mesh {mesh} has no axis"
                f" {STAGE!r}"
            )
        if asked and micro_batches == 1:
            raise UsageError(
                f"--schedule {self.schedule} orders the work on several micro-batches; give"
                " --micro-batches N"
            )
        if self.virtual > 1 and micro_batches % mesh.stages:
            raise UsageError(
                f"interleaved stages need a number of micro-batches that {mesh.stages} stages"
                f" divide, not {micro_batches}"
            )

    def sequence(self, stage: int, stages: int, micro_batches: int) -> Sequence:
        """The segments of a stage, in turn."""
        if self.schedule == "gpipe":
            micros = range(micro_batches)
            return (*((0, k) for k in micros), *((1, k) for k in micros))
        if self.schedule == "zero-bubble":
            return _zero_bubble(stage, stages, micro_batches)
        if self.virtual > 1:
            return _interleaved(stage, stages, micro_batches, self.virtual)
        behind = stages - stage - 1
        return _one_forward_one_backward(1 + behind + min(self.ahead, behind), micro_batches)

    def alive(self, stage: int, stages: int, micro_batches: int) -> float:
        """The micro-batches whose activations a stage keeps at once, counting parts of one."""
        if micro_batches == 1:
            return 1.0
        sequence, virtual = self.sequence(stage, stages, micro_batches), self.virtual
        last = max(segment for segment, _ in sequence) // virtual * virtual
        most = alive = 0
        for segment, _ in sequence:
            alive += segment < virtual
            most = max(most, alive)
            alive -= segment >= last
        return most / virtual

    def streaming(self, stages: int, micro_batches: int) -> Sequence:
        """The segments of any stage, in turn, where there is no backward pass."""
        return _pieces_in_groups(stages, micro_batches, self.virtual)


ONE_FORWARD_ONE_BACKWARD = Pipeline()
"""What stages do unless asked for something else."""


def _one_forward_one_backward(first: int, count: int) -> Sequence:
    """`first` forwards, then backward and forward by turns."""
    found = [(0, k) for k in range(min(first, count))]
    for k in range(count):
        found.append((1, k))
        if k + first < count:
            found.append((0, k + first))
    return tuple(found)


def _zero_bubble(stage: int, stages: int, count: int) -> Sequence:
    """ZB-H1: gradients of weights wait for as many micro-batches as there are stages before."""
    first = min(stages - stage, count)
    found = [(0, k) for k in range(first)]
    done = 0
    for k in range(count):
        found.append((1, k))
        if k >= stage:
            found.append((2, done))
            done += 1
        if k + first < count:
            found.append((0, k + first))
    return (*found, *((2, k) for k in range(done, count)))


def _interleaved(stage: int, stages: int, count: int, virtual: int) -> Sequence:
    """Pieces in groups of as many micro-batches as there are stages (Megatron-LM's order)."""
    forward = _pieces_in_groups(stages, count, virtual)
    backward = tuple((virtual + piece, k) for piece, k in forward)  # the pieces the other way round
    first = min(len(forward), 2 * (stages - stage - 1) + (virtual - 1) * stages)
    found = list(forward[:first])
    for one, other in zip(forward[first:], backward, strict=False):
        found += [one, other]
    return (*found, *backward[len(forward) - first :])


def _pieces_in_groups(stages: int, count: int, virtual: int) -> Sequence:
    """Forward through all pieces: each for as many micro-batches as there are stages, in turn."""
    return tuple(
        (piece, k)
        for base in range(0, count, stages)
        for piece in range(virtual)
        for k in range(base, min(base + stages, count))
    )


def stream_count(mesh: Mesh, rows: int, most: int) -> int:
    """Micro-batches of a step without a backward pass: 1 without stages, else `most` if they can.

    They divide the rows, and leave one to each rank of a stage that may split them.
    """
    if mesh.stages == 1:
        return 1
    parts = dict(mesh.axes).get(DATA, 1)
    return max((n for n in range(1, most + 1) if not rows % n and n * parts <= rows), default=1)


def in_flight(sequence: Sequence, first: int | None = None, last: int | None = None) -> int:
    """How many micro-batches are between two segments at once, at most; by default any two."""
    found = most = 0
    ends: dict[int, int] = {}
    for place, (segment, micro) in enumerate(sequence):
        if last is None or segment == last:
            ends[micro] = place
    begun: set[int] = set()
    for place, (segment, micro) in enumerate(sequence):
        if micro not in begun and (first is None or segment == first):
            begun.add(micro)
            found += 1
            most = max(most, found)
        if ends.get(micro) == place:
            found -= 1
    return most


def with_slots(program: Program) -> Program:
    """With as many slots for each register of the last loop as micro-batches need it at once.

    What comes from another stage has one more, so that it can come while the one before is used;
    so has what leaves, or what a collective takes that no kernel of its segment waits for, where
    there would be one.
    """
    if not program.sequence:
        return program
    registers = {r.name: r for r in program.registers}
    loop = max((t.phase for t in program.tasks if t.phase % 2), default=0)
    groups: dict[str, list[Task]] = {}
    # What is read has slots of its own, for the loops before this one too.
    others = {name for task in program.tasks if task.stream in AHEAD for name in task.outputs}
    for task in program.tasks:
        if task.phase == loop:
            for name in (*task.inputs, *task.outputs):
                if name in registers and name not in others and registers[name].layout[0] != B:
                    groups.setdefault(holder(name, registers), []).append(task)
    late = _unawaited(program, loop)
    slots = {name: _slots(program, tasks, late) for name, tasks in groups.items()}
    program = replace(
        program,
        registers=tuple(
            replace(r, slots=n, rewound=True) if (n := slots.get(holder(r.name, registers), 1)) > 1
            else r
            for r in program.registers
        ),
    )  # fmt: skip
    return _with_pools(program, groups)


def _with_pools(program: Program, groups: dict[str, list[Task]]) -> Program:
    """With slots in common for registers of one size that segments need at different times.

    What a piece of the model keeps for its backward pass is like what another keeps. Only kernels
    use such a register, as they follow one another.
    """
    registers = {r.name: r for r in program.registers}
    shared = {r.aliases for r in program.registers}
    alike: dict[tuple[str, int], dict[Span, list[str]]] = {}
    for name, tasks in groups.items():
        register, segments = registers[name], [task.segment for task in tasks]
        first, last = min(segments), max(segments)
        kernels = all(task.stream == COMPUTE for task in tasks)
        if first < last and kernels and name not in shared:
            spans = alike.setdefault((register.space, register.nbytes), {})
            spans.setdefault((first, last), []).append(name)
    pooled: dict[str, Register] = {}
    count = cache(partial(_seat_count, program.sequence))
    for spans in alike.values():
        for row in zip_longest(*spans.values()):
            members = {name: span for name, span in zip(row, spans, strict=True) if name}
            slots = count(tuple(members.values()))
            if slots < sum(registers[name].slots for name in members):
                pool = next(iter(members))
                pooled |= {
                    n: replace(registers[n], slots=slots, rewound=True, pool=pool) for n in members
                }
    return replace(program, registers=tuple(pooled.get(r.name, r) for r in program.registers))


def _seat_count(sequence: Sequence, spans: tuple[Span, ...]) -> int:
    """How many slots registers need together that are in use for these spans."""
    taken = take_seats(sequence, dict(enumerate(spans)))
    return 1 + max(seat for each in taken for seat in each.values())


def _unawaited(program: Program, loop: int) -> set[str]:
    """The tasks of a loop that no kernel of their own segment waits for."""
    needs, tasks = program.needs(), [task for task in program.tasks if task.phase == loop]
    segments = {task.name: task.segment for task in tasks}
    awaited: set[str] = set()
    for task in reversed(tasks):
        if task.stream == COMPUTE or task.name in awaited:
            awaited.update(n for n in needs[task.name] if segments.get(n) == task.segment)
    return {task.name for task in tasks if task.stream != COMPUTE and task.name not in awaited}


def _slots(program: Program, tasks: list[Task], late: set[str]) -> int:
    """The slots of what these tasks make and use."""
    segments = [task.segment for task in tasks]
    count = in_flight(program.sequence, min(segments), max(segments))
    received = any(task.kind == RECEIVE for task in tasks)
    if received or (count == 1 and any(task.name in late for task in tasks)):
        count += 1
    return min(count, program.micro_batches)
