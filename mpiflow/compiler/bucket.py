"""Step 11: one message for many small tensors.

all_reduce       in place: the tensors of a bucket lie side by side in memory, nothing is copied
reduce_scatter   packed and unpacked in the task's workspace: in a bucket the parts that a rank has
all_gather       of all tensors are next to each other, in each tensor they are not; within a host
                 ranks take them from where they lie

A bucket is full at the size at which waiting for more costs as much as another message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Any

from mpiflow.compiler.cost import collective_seconds, packing_seconds
from mpiflow.compiler.late import awaiting, put_off
from mpiflow.compiler.machine import Machine
from mpiflow.compiler.order import in_order, needs_in_order, pulled
from mpiflow.compiler.pace import of_variables
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.records import SEND, Program, Register, Task, Variable
from mpiflow.plan.slice import parts_of

_SMALLEST, _LARGEST = 256 << 10, 25 << 20


@dataclass
class _Bucket:
    """Collectives that become one, before `deadline`, where the first of others needs a result.

    Of all_reduces, those of what another bucket reduced are next to each other there; `place` is
    the last one's.
    """

    name: str
    deadline: int
    tasks: list[Task] = field(default_factory=list)
    nbytes: int = 0
    place: int = 0


def bucket(
    program: Program, mesh: Mesh, machine: Machine, variables: Iterable[Variable] = ()
) -> Program:
    """Fuse reductions that can wait for one another, then gathers of weights, before and after."""
    kept = {variable.name: variable for variable in variables}
    program = put_off(program)
    program = _Fusing(program, mesh, machine, kept).put_off()
    program = _Fusing(_in_place(program), mesh, machine, kept).reductions()
    program = _Fusing(program, mesh, machine, kept).weights()
    return _Fusing(program, mesh, machine, kept).updates()


def _in_place(program: Program) -> Program:
    """With all_reduces that are the only readers of their input in its memory."""
    readers = Counter(name for task in program.tasks for name in set(task.inputs))
    source = {
        task.outputs[0]: task.inputs[0]
        for task in program.tasks
        if task.op == "all_reduce" and readers[task.inputs[0]] == 1
    }
    registers = (replace(r, aliases=source.get(r.name, r.aliases)) for r in program.registers)
    return replace(program, registers=tuple(registers))


def _of_several_slots(program: Program) -> set[str]:
    """What may need a slot for each of several micro-batches: it cannot lie beside anything.

    In a pipeline, what segments hand to one another or send to other stages; see `with_slots`.
    """
    segments: dict[str, set[int]] = {}
    sent: set[str] = set()
    for task in program.tasks if program.sequence else ():
        if task.phase % 2:
            for name in (*task.inputs, *task.outputs):
                segments.setdefault(name, set()).add(task.segment)
            if task.kind == SEND:
                sent.update(task.inputs)
    return sent | {name for name, where in segments.items() if len(where) > 1}


class _Fusing:
    def __init__(
        self, program: Program, mesh: Mesh, machine: Machine, variables: dict[str, Variable]
    ) -> None:
        self.program, self.variables, self.mesh, self.machine = program, variables, mesh, machine
        self.registers: dict[str, Register] = {
            **variables, **{r.name: r for r in program.registers}
        }  # fmt: skip
        self.candidates: dict[str, Task] = {}

    def reductions(self) -> Program:
        several = _of_several_slots(self.program)
        self.candidates = {
            t.name: t
            for t in self.program.tasks
            if t.op == "reduce_scatter"
            or (
                t.op == "all_reduce"
                and self.registers[t.outputs[0]].aliases
                and several.isdisjoint((*t.inputs, *t.outputs))
            )
        }
        self.program = self._second_late()
        return in_order(self._fused(self._buckets(_REDUCTIONS)))

    def put_off(self) -> Program:
        """What is gathered for kernels that come last alone."""
        late = awaiting(self.program)
        taken = {n for t in self.program.tasks if t.name not in late for n in t.inputs}
        taken.update(output.register for output in self.program.outputs)
        self.candidates = {
            t.name: t
            for t in self.program.tasks
            if t.op == "all_gather" and taken.isdisjoint(t.outputs)
            and not self.variables.keys() & {*t.inputs, *t.outputs}
        }  # fmt: skip
        return in_order(self._fused(self._buckets({"all_gather": "late"})))

    def weights(self) -> Program:
        """What is gathered of variables alone, where it is used and where it is used again."""
        stored = of_variables(self.program, self.variables.keys())
        gathers = [t for t in self.program.tasks if t.op == "all_gather" and t.name in stored]
        self.candidates = {t.name: t for t in gathers}
        first = {t.inputs[0]: t.name for t in reversed(gathers)}
        again = {t.name for t in gathers if first[t.inputs[0]] != t.name}
        return pulled(self._fused(self._buckets({"all_gather": "gather"}, again)))

    def updates(self) -> Program:
        """What is gathered into variables."""
        gathers = (t for t in self.program.tasks if t.op == "all_gather")
        self.candidates = {t.name: t for t in gathers if t.outputs[0] in self.variables}
        return pulled(self._fused(self._buckets({"all_gather": "update"})))

    def _fused(self, buckets: list[_Bucket]) -> Program:
        """With one task for the members of each bucket, where the last of them was."""
        merged = {t.name: b for b in buckets if len(b.tasks) > 1 for t in b.tasks}
        tasks: list[Task] = []
        for task in self.program.tasks:
            group = merged.get(task.name)
            if group is None:
                tasks.append(task)
            elif task is group.tasks[-1]:
                tasks.append(self._task(group))
        renamed = {name: b.name for name, b in merged.items()}
        tasks = [
            t
            if renamed.keys().isdisjoint(t.after)
            else replace(t, after=tuple(dict.fromkeys(renamed.get(n, n) for n in t.after)))
            for t in tasks
        ]
        return replace(self.program, tasks=tuple(tasks))

    def _second_late(self) -> Program:
        """With reductions of what was reduced already, on another axis, as late as others allow.

        So the first reductions of all members of a bucket come before the second of any.
        """
        tasks = self.program.tasks
        deadlines, needs = self._deadlines(), needs_in_order(self.program)
        index = {task.name: i for i, task in enumerate(tasks)}
        given = {name for task in self.candidates.values() for name in task.outputs}
        place: dict[str, int] = {}
        for i, task in enumerate(tasks):
            second = task.name in self.candidates and task.inputs[0] in given
            before = (place[name] for name in needs[task.name])
            place[task.name] = max(deadlines[i] if second else i, *before, 0)

        def key(task: Task) -> tuple[int, bool, int]:
            """What has moved comes before what has its place there."""
            own, wanted = index[task.name], place[task.name]
            return wanted, wanted == own, own

        return replace(self.program, tasks=tuple(sorted(tasks, key=key)))

    def _buckets(self, names: dict[str, str], again: Set[str] = frozenset()) -> list[_Bucket]:
        """The candidates in buckets, each in the newest of its kind that is neither full nor due.

        A kind is also for whom: the final results of all members have one deadline, so none waits
        for another that nobody needs yet. And as every bucket ends before its deadline, along any
        chain of buckets that need one another the last members come later and later: there are no
        circles. What fills a bucket alone has one, and leaves the others open. What is made
        `again` goes with its like.
        """
        tasks, deadlines = self.program.tasks, self._deadlines()
        onward = {t.inputs[0]: i for i, t in enumerate(tasks) if t.name in self.candidates}
        limits = self._limits()
        buckets: list[_Bucket] = []
        newest: dict[tuple[Any, ...], _Bucket] = {}
        home: dict[str, tuple[str, int]] = {}  # the bucket that gives a register, and where in it
        for position, task in enumerate(tasks):
            nbytes = self._joint(task) if task.name in self.candidates else 0
            if not nbytes:
                continue
            source, in_place = self.registers[task.inputs[0]], task.op == "all_reduce"
            whole, place = home.get(source.name, ("", 0)) if in_place else ("", 0)
            last = position
            while tasks[last].outputs[0] in onward:
                last = onward[tasks[last].outputs[0]]
            data = (task.op, task.axis, task.attributes.get("reduce"), source.dtype)
            key = (
                *data, task.phase, task.segment, tasks[last].axis, deadlines[last], whole,
                task.name in again,
            )  # fmt: skip
            found, limit = newest.get(key), limits[task.op]
            if (
                found is None
                or found.nbytes + nbytes > limit
                or found.deadline <= position
                or (whole and found.place + 1 != place)
            ):
                name = f"{names[task.op]}.{task.axis}.{len(buckets)}"
                found = _Bucket(name, deadlines[position])
                buckets.append(found)
                if nbytes < limit or whole:
                    newest[key] = found
            if in_place:
                home[task.outputs[0]] = found.name, len(found.tasks)
            found.tasks.append(task)
            found.nbytes += nbytes
            found.place, found.deadline = place, min(found.deadline, deadlines[position])
        return buckets

    def _deadlines(self) -> list[int]:
        """By task the place of the first candidate that needs it, or one behind all tasks."""
        tasks = self.program.tasks
        index = {task.name: i for i, task in enumerate(tasks)}
        deadlines = [len(index)] * len(index)
        for i, needs in reversed(list(enumerate(needs_in_order(self.program).values()))):
            mine = i if tasks[i].name in self.candidates else deadlines[i]
            for name in needs:
                deadlines[index[name]] = min(deadlines[index[name]], mine)
        return deadlines

    def _joint(self, task: Task) -> int:
        """The bytes that the members of a collective hold jointly of its tensor."""
        return max(self.registers[name].nbytes for name in (task.inputs[0], task.outputs[0]))

    def _limits(self) -> dict[str, int]:
        """By collective, the size at which waiting for more costs as much as another message."""
        totals: Counter[str] = Counter()
        for task in self.candidates.values():
            totals[task.op] += self._joint(task)
        compute = sum(t.seconds for t in self.program.tasks if t.kind == "compute")
        return {
            op: bucket_bytes(op, total, compute, self.mesh, self.machine)
            for op, total in totals.items()
        }

    def _task(self, group: _Bucket) -> Task:
        first = group.tasks[0]
        axes = self.mesh.along(first.axis)
        seconds = collective_seconds(self.machine, first.op, group.nbytes, self.mesh, axes)
        attributes, workspace = first.attributes, 0
        if first.op != "all_reduce":
            attributes = {name: x for name, x in attributes.items() if name != "dim"}
            workspace = group.nbytes + self._own(group)
            seconds += packing_seconds(self.machine, workspace, self.mesh, axes)
        names = {t.name for t in group.tasks}
        after = dict.fromkeys(n for t in group.tasks for n in t.after if n not in names)
        return replace(
            first,
            name=group.name,
            inputs=tuple(t.inputs[0] for t in group.tasks),
            outputs=tuple(t.outputs[0] for t in group.tasks),
            attributes=attributes,
            after=tuple(after),
            workspace=(0, workspace),
            seconds=seconds,
            where=group.tasks[-1].where,
        )

    def _own(self, group: _Bucket) -> int:
        """The bytes of the parts that the rank with the most has of a bucket that is packed."""
        return sum(self.registers[parts_of(t)[0]].nbytes for t in group.tasks)


_REDUCTIONS = {"all_reduce": "bucket", "reduce_scatter": "scatter"}
"""How buckets of them are called."""


def bucket_bytes(op: str, total: int, compute: float, mesh: Mesh, machine: Machine) -> int:
    """The best size of the messages of one kind.

    With G bytes in all beside T seconds of compute, a message costing a + b n: if compute hides it
    all, the smallest n with (G/n) a + G b <= T; else n = G sqrt(a / T).
    """
    if not total or not compute:
        return _SMALLEST
    axes = (mesh.sizes.index(max(mesh.sizes)),)
    fixed = collective_seconds(machine, op, 0, mesh, axes)
    moving = collective_seconds(machine, op, total, mesh, axes) - fixed
    if compute > moving:
        size = total * fixed / (compute - moving)
    else:
        size = total * (fixed / compute) ** 0.5
    return int(min(max(size, _SMALLEST), _LARGEST))
