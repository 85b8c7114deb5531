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
from itertools import pairwise
from typing import NamedTuple

from mpiflow.errors import VerifyError
from mpiflow.plan.marked import Step
from mpiflow.plan.places import AHEAD, workspace_space
from mpiflow.plan.records import WRITE, Variable
from mpiflow.plan.seats import seats
from mpiflow.plan.verify_layout import label
from mpiflow.plan.walk import Order


class Piece(NamedTuple):
    """Bytes [start, stop) of a space, the firing that first writes them, each stream's last use.

    `name` and `over`, what it lies over on purpose, are of a register and the micro-batch. `alone`
    pieces share with nothing, before or after; `lasting` ones are needed until the step ends. A
    variable has first = -1; what a task writes over it is a piece of its own.
    """

    what: str
    space: str
    start: int
    stop: int
    first: int
    uses: tuple[tuple[int, int], ...]
    name: tuple[str, int] = ("", 0)
    over: tuple[str, int] = ("", -1)
    alone: bool = False
    lasting: bool = False


def check_memory(variables: Iterable[Variable], step: Step) -> None:
    """Prove that of a step that ends, whatever is read is there, and variables change only then."""
    order = Order(step)
    pieces = [*_of_variables(variables, step), *_of_registers(variables, step), *_of_work(step)]
    _sweep([piece for piece in pieces if piece.start < piece.stop], step, order)


def _of_variables(variables: Iterable[Variable], step: Step) -> Iterator[Piece]:
    kept = {
        v.name: Piece(
            f"variable {v.name}", v.space, v.offset, v.offset + v.nbytes, -1,
            _uses(step, step.users.get(v.name, ())), (v.name, 0), alone=True, lasting=True,
        )
        for v in variables
    }  # fmt: skip
    yield from kept.values()
    for i, task in enumerate(step.tasks):
        first, uses, ahead = step.number(i), _uses(step, (i,)), task.stream in AHEAD
        for old in (kept[name] for name in task.outputs if name in kept):
            yield old._replace(first=first, uses=uses, name=("", 0), over=old.name, alone=ahead)


def _of_registers(variables: Iterable[Variable], step: Step) -> Iterator[Piece]:
    """A piece for each micro-batch that has a register of its own; what is read ahead is one."""
    lasting = {output.register for output in step.program.outputs}
    names, seated = {variable.name for variable in variables}, seats(step.program)
    for r in step.program.registers:
        maker = step.makers[r.name]
        users = (maker, *step.users.get(r.name, ()))
        # Said here by itself: what plans memory must not be what proves it.
        alone = step.tasks[maker].stream in AHEAD or any(
            step.tasks[i].stream == WRITE for i in users
        )
        parts = step.in_parts(r.name) and not alone
        for micro in range(step.count) if parts else (0,):
            slot, slots = (micro % r.slots, 1) if r.rewound else (0, r.slots)
            if r.pool:
                slot = seated[r.name][micro]
            start = r.offset + slot * r.nbytes
            yield Piece(
                f"register {r.name}" + f" of micro-batch {micro + 1}" * parts,
                r.space, start, start + slots * r.nbytes, step.number(maker, micro),
                _uses(step, users, micro if parts else -1),
                (r.name, micro), (r.aliases, micro if step.in_parts(r.aliases) else 0),
                alone=alone, lasting=r.name in lasting or r.aliases in names,
            )  # fmt: skip


def _of_work(step: Step) -> Iterator[Piece]:
    for i, task in enumerate(step.tasks):
        alone, what = task.stream in (*AHEAD, WRITE), f"the workspace of {label(task)}"
        span = workspace_space(task.route), task.workspace[0], sum(task.workspace)
        for micro in range(step.count) if task.workspace[1] and step.looped(i) else (0,):
            yield Piece(what, *span, step.number(i, micro), _uses(step, (i,), micro), alone=alone)


def _uses(step: Step, tasks: Iterable[int], micro: int = -1) -> tuple[tuple[int, int], ...]:
    """The last firings of tasks on each stream, for one micro-batch or, with -1, all."""
    uses: dict[int, int] = {}
    for i in tasks:
        uses[step.stream[i]] = max(uses.get(step.stream[i], -1), step.number(i, micro))
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
        live.insert(at, keys[i])
        for (_, first), (_, second) in pairwise(live[max(at - 1, 0) : at + 2]):
            _compare(pieces[first], pieces[second], step, order)


def _compare(a: Piece, b: Piece, step: Step, order: Order) -> None:
    """Raise unless all accesses of `a` are complete when the first firing of `b` starts."""
    declared = b.over == a.name
    update = declared and a.first < 0
    alone = b.alone or (a.alone and not update)
    kept = a.lasting and not update
    late = [
        number
        for stream, number in a.uses
        if not (order.before(stream, number, b.first) or (declared and number == b.first))
    ]
    if not (alone or kept or late or a.first == b.first):
        return
    writers = [step.label(p.first) for p in (a, b) if p.first >= 0] or ["nothing"]
    writer, written = writers[-1], " and by ".join(writers)
    user = step.label(max(late, key=order.place.__getitem__)) if late else ""
    shared = f"{a.what} and {b.what} share bytes {max(a.start, b.start)}..{min(a.stop, b.stop)}"
    if kept and a.what == b.what:
        why = f"{a.what} is written by {written}; one may"
    elif alone:
        why = (f"{shared} (written by {written}), but {(a if a.alone else b).what} is in use beyond"
               " the step and keeps its memory to itself")  # fmt: skip
    elif a.first == b.first:
        why = f"{shared}: {writer} uses both at once"
    elif kept:
        why = f"{shared}: {writer} overwrites {a.what}, which is needed until the step ends"
    elif update:
        why = (f"{a.what} may be overwritten by {writer} before {user} has read it; nothing orders"
               " the two")  # fmt: skip
    else:
        user = "it" if user == writer else user
        why = f"{shared}: {writer} may write {b.what} while {user} still uses {a.what}"
    raise VerifyError(f"program {step.program.name}: {why}")
