"""Verify: no byte is overwritten before its last reader, whatever the timing.

Two pieces of memory may share bytes where all accesses of one are complete before the firing that
first writes the other starts. That relation is transitive, so the pieces over any byte, sorted by
their first firing, need only be compared with their neighbours: a sweep over the arena makes two
comparisons a piece. Compute and communication drain at the end of a step, so comparing within one
step is enough; what runs ahead of steps or behind them outlives one and shares with nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpiflow.errors import VerifyError
from mpiflow.plan.marked import Step
from mpiflow.plan.places import AHEAD, workspace_space
from mpiflow.plan.records import WRITE, Plan, Program, Variable
from mpiflow.plan.seats import seats
from mpiflow.plan.verify_layout import label
from mpiflow.plan.walk import Order, Use


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a space, the firing that first writes them, and the last that use
    them, of each stream.

    `name` and `over`, what it lies over on purpose, are of a register and the micro-batch. `alone`
    pieces share with nothing, before or after; `lasting` ones are needed until the step ends. A
    variable has first = -1; what a task writes over it is a piece of its own.
    """

    what: str
    space: str
    start: int
    stop: int
    first: int
    uses: tuple[Use, ...]
    name: tuple[str, int] = ("", 0)
    over: tuple[str, int] = ("", -1)
    alone: bool = False
    lasting: bool = False


def check_memory(variables: Iterable[Variable], step: Step) -> None:
    """Prove that of a step that ends, whatever is read is there, and variables change only then."""
    order = Order(step)
    pieces = [*_of_variables(variables, step), *_of_registers(variables, step), *_of_work(step)]
    _sweep([piece for piece in pieces if piece.start < piece.stop], step, order)


def check_between(plan: Plan) -> None:
    """Memory that reads and writes touch outlives a step: no other program may use it.

    A sweep over each arena: of each program the piece that reaches furthest is enough to compare.
    """
    spans = sorted(
        span for program in plan.programs for span in _spans(program) if span[0] < span[1]
    )
    furthest: dict[tuple[str, str, bool], tuple[int, str]] = {}
    for start, stop, program, name, lasting, space in spans:
        for (beside, other, other_lasts), (end, other_name) in furthest.items():
            if beside != space or other == program or not (lasting or other_lasts):
                continue
            if end > start:
                first, second = (name, other_name) if lasting else (other_name, name)
                raise VerifyError(
                    f"{first} of program {program if lasting else other} is filled or stored"
                    f" beside the steps of other programs, and shares bytes [{start}, "
                    f"{min(end, stop)}) with {second} of program {other if lasting else program}"
                )
        key = (space, program, lasting)
        furthest[key] = max(furthest.get(key, (0, "")), (stop, name))


def _spans(program: Program) -> list[tuple[int, int, str, str, bool, str]]:
    """Start, stop, program, name of all memory of a program, if it outlives a step, its space."""
    lasting = {n for t in program.tasks if t.stream in AHEAD for n in t.outputs}
    lasting |= {n for t in program.tasks if t.stream == WRITE for n in t.inputs}
    spans = [
        (r.offset, r.offset + r.nbytes * r.slots, program.name, r.name, r.name in lasting, r.space)
        for r in program.registers
    ]
    return spans + [
        (task.workspace[0], sum(task.workspace), program.name, f"the workspace of {task.name}",
         False, workspace_space(task.route))
        for task in program.tasks
    ]  # fmt: skip


def _of_variables(variables: Iterable[Variable], step: Step) -> Iterator[Piece]:
    places = {v.name: (f"variable {v.name}", v.space, v.offset, v.offset + v.nbytes)
              for v in variables}  # fmt: skip
    for name, place in places.items():
        uses = _uses(step, step.users.get(name, ()))
        yield Piece(*place, -1, uses, (name, 0), alone=True, lasting=True)
    for i, task in enumerate(step.tasks):
        for name in task.outputs:
            if name in places:
                yield Piece(
                    *places[name], step.number(i), _uses(step, (i,)), over=(name, 0),
                    alone=task.stream in AHEAD, lasting=True,
                )  # fmt: skip


def _of_registers(variables: Iterable[Variable], step: Step) -> Iterator[Piece]:
    """A piece for each micro-batch that has a register of its own; what is read ahead is one."""
    lasting = {output.register for output in step.program.outputs}
    names, seated = {variable.name for variable in variables}, seats(step.program)
    for r in step.program.registers:
        maker = step.makers[r.name]
        tasks = (maker, *step.users.get(r.name, ()))
        ahead = step.tasks[maker].stream in AHEAD
        parts = step.in_parts(r.name) and not ahead
        for micro in range(step.count) if parts else (0,):
            slot, slots = (micro % r.slots, 1) if r.rewound else (0, r.slots)
            if r.pool:
                slot = seated[r.name][micro]
            start = r.offset + slot * r.nbytes
            yield Piece(
                f"register {r.name}" + f" of micro-batch {micro + 1}" * parts,
                r.space, start, start + slots * r.nbytes, step.number(maker, micro),
                _uses(step, tasks, micro if parts else None), (r.name, micro),
                (r.aliases, micro if step.in_parts(r.aliases) else 0),
                alone=ahead or any(step.tasks[i].stream == WRITE for i in tasks),
                lasting=r.name in lasting or r.aliases in names,
            )  # fmt: skip


def _of_work(step: Step) -> Iterator[Piece]:
    for i, task in enumerate(step.tasks):
        alone, what = task.stream in (*AHEAD, WRITE), f"the workspace of {label(task)}"
        span = workspace_space(task.route), task.workspace[0], sum(task.workspace)
        for micro in range(step.count) if task.workspace[1] and step.looped(i) else (0,):
            yield Piece(what, *span, step.number(i, micro), _uses(step, (i,), micro), alone=alone)


def _uses(step: Step, tasks: Iterable[int], micro: int | None = None) -> tuple[Use, ...]:
    """The last firings of tasks on each stream, for one micro-batch or all."""
    uses: dict[int, int] = {}
    for i in tasks:
        number = step.last(i) if micro is None else step.number(i, micro)
        uses[step.stream[i]] = max(uses.get(step.stream[i], -1), number)
    return tuple(uses.items())


def _sweep(pieces: list[Piece], step: Step, order: Order) -> None:
    """Compare the pieces over each byte with their neighbours in the order of first firings."""
    keys = [(order.place[p.first] if p.first >= 0 else -1, i) for i, p in enumerate(pieces)]
    events = [(p.space, p.start, 1, i) for i, p in enumerate(pieces)]
    events += [(p.space, p.stop, 0, i) for i, p in enumerate(pieces)]
    live: list[tuple[int, int]] = []
    for _, _, opens, i in sorted(events):
        at = bisect_left(live, keys[i])
        if not opens:
            del live[at]
            continue
        for left, right in ((live[at - 1 : at], [keys[i]]), ([keys[i]], live[at : at + 1])):
            if left and right:
                _compare(pieces[left[0][1]], pieces[right[0][1]], step, order)
        live.insert(at, keys[i])


def _compare(a: Piece, b: Piece, step: Step, order: Order) -> None:
    """Raise unless all accesses of `a` are complete when the first firing of `b` starts."""
    declared = b.over == a.name
    update = declared and a.first < 0
    alone = b.alone or (a.alone and not update)
    kept = a.lasting and not update
    late = [
        number
        for stream, number in a.uses
        if not (order.before((stream, number), b.first) or (declared and number == b.first))
    ]
    if not (alone or kept or late or a.first == b.first):
        return
    writer, program = step.label(b.first), f"program {step.program.name}"
    shared = f"{program}: {a.what} and {b.what} share bytes" + (
        f" {max(a.start, b.start)}..{min(a.stop, b.stop)}"
    )
    users = [step.label(p.first) for p in (a, b) if p.first >= 0]
    if kept and a.what == b.what:
        raise VerifyError(f"{program}: {a.what} is written by {' and by '.join(users)}; one may")
    if alone:
        raise VerifyError(
            f"{shared} (written by {' and '.join(users)}), but {(a if a.alone else b).what} is in"
            " use beyond the step and keeps its memory to itself"
        )
    if a.first == b.first:
        raise VerifyError(f"{shared}: {writer} uses both at once")
    if kept:
        raise VerifyError(
            f"{shared}: {writer} overwrites {a.what}, which is needed until the step ends"
        )
    user = step.label(max(late, key=order.place.__getitem__))
    if update:
        raise VerifyError(f"{program}: {a.what} may be overwritten by {writer} before {user} has"
                          " read it; nothing orders the two")  # fmt: skip
    who = "it" if user == writer else user
    raise VerifyError(f"{shared}: {writer} may write {b.what} while {who} still uses {a.what}")
