"""Verify, part three: no byte is overwritten before its last reader, whatever the timing.

Two pieces of memory may share bytes where all accesses of one are complete before the firing that
first writes the other starts. That relation is transitive, so the pieces over any byte, sorted by
their first firing, need only be compared with their neighbours: a sweep over the arena makes two
comparisons a piece. Compute and communication drain at the end of a step, so comparing within one
step is enough; what the `read` and `write` streams touch outlives it and shares with nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpiflow.errors import VerifyError
from mpiflow.plan.marked import Step, Walk
from mpiflow.plan.places import AHEAD, H2D, workspace_space
from mpiflow.plan.records import WRITE, Plan, Program, Register, Variable
from mpiflow.plan.verify_layout import label

Use = tuple[int, int]
"""A stream, and the number of a firing on it."""


class Order:
    """What happens before what in a step; VerifyError where it would not come to its end.

    Of each firing: its place in one valid order, and of each other stream the last firing that is
    surely complete when it starts.
    """

    def __init__(self, step: Step) -> None:
        self.place = [0] * step.size
        self._stream = [0] * step.size
        self._over: list[tuple[int, ...]] = [()] * step.size
        latest = [(-1,) * len(step.streams)] * len(step.streams)
        for place, firing in enumerate(Walk([step]).run()):
            stream = step.stream[firing.task]
            clock = latest[stream]
            for other, number, _ in step.before(firing):
                if other != stream and clock[other] < number:
                    merged = list(map(max, clock, self._over[number]))
                    merged[other] = number
                    clock = tuple(merged)
            latest[stream] = self._over[firing.number] = clock
            self.place[firing.number], self._stream[firing.number] = place, stream

    def before(self, use: Use, firing: int) -> bool:
        """Whether a firing is surely complete when another starts."""
        stream, number = use
        if stream == self._stream[firing]:
            return number < firing
        return self._over[firing][stream] >= number


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a space, the firing that first writes them, and the last that use
    them, of each stream.

    `name` and `aliases` are of a register and the micro-batch. `alone` pieces share with nothing,
    before or after; `lasting` ones are needed until the step ends. A variable has first = -1.
    """

    what: str
    space: str
    name: tuple[str, int]
    aliases: tuple[str, int]
    start: int
    stop: int
    first: int
    place: int
    uses: tuple[Use, ...]
    alone: bool
    lasting: bool


def check_memory(variables: Iterable[Variable], step: Step) -> None:
    """Variables have one writer, after all readers; aliases and shared bytes are in order."""
    order = Order(step)
    writers = _writers(step)
    for variable in variables:
        _check_variable(variable, writers.get(variable.name, []), step, order)
    _sweep(list(_pieces(variables, step, order)), step, order)


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
        (
            t.workspace[0],
            sum(t.workspace),
            program.name,
            f"the workspace of {t.name}",
            False,
            workspace_space(t.route),
        )
        for t in program.tasks
    ]


def check_aliases(program: Program, tensors: dict[str, Register]) -> None:
    """A register lies exactly over what it aliases, which its producer reads, or copies over."""
    makers = {name: task for task in program.tasks for name in task.outputs}
    registers = {register.name: register for register in program.registers}
    for register in program.registers:
        if not register.aliases:
            continue
        target, task = tensors[register.aliases], makers[register.name]
        what = f"program {program.name}: register {register.name} of {label(task)}"
        if target.name not in task.inputs and task.kind != H2D:
            raise VerifyError(f"{what} aliases {target.name}, which {label(task)} does not read")
        place, wanted = ((r.offset, r.nbytes, r.slots, r.rewound) for r in (register, target))
        if place != wanted or register.space != target.space:
            raise VerifyError(
                f"{what} aliases {target.name}, but lies at {_place(register)} and "
                f"{target.name} at {_place(target)}"
            )
        chain = [register.name]
        while (following := registers[chain[-1]].aliases) in registers:
            if following in chain:
                raise VerifyError(f"{what} aliases {target.name}, which aliases it in turn")
            chain.append(following)


def _place(r: Register) -> str:
    where = f" of {r.space} memory" if r.space else ""
    return f"bytes {r.offset}..{r.offset + r.slots * r.nbytes}{where} ({r.slots} x {r.nbytes})"


def _writers(step: Step) -> dict[str, list[int]]:
    """The tasks that write a variable, or a register over it."""
    over = {r.name: r.aliases for r in step.program.registers if r.aliases}
    found: dict[str, list[int]] = {}
    for i, task in enumerate(step.tasks):
        for name in task.outputs:
            found.setdefault(over.get(name, name), []).append(i)
    return found


def _check_variable(variable: Variable, writers: list[int], step: Step, order: Order) -> None:
    what = f"program {step.program.name}: variable {variable.name}"
    if not writers:
        return
    writer = label(step.tasks[writers[0]])
    if len(writers) > 1:
        other = label(step.tasks[writers[1]])
        raise VerifyError(f"{what} is written by {writer} and by {other}; one may write it")
    if step.tasks[writers[0]].stream in AHEAD:
        raise VerifyError(f"{what} is written by {writer}, which runs ahead of the step")
    if step.looped(writers[0]):
        raise VerifyError(f"{what} is written by {writer} once a micro-batch; once a step")
    for reader in step.users.get(variable.name, ()):
        use = step.stream[reader], step.last(reader)
        if reader != writers[0] and not order.before(use, step.number(writers[0], 0)):
            raise VerifyError(
                f"{what} may be overwritten by {writer} before {label(step.tasks[reader])} has read"
                " it; nothing orders the two"
            )


def _pieces(variables: Iterable[Variable], step: Step, order: Order) -> Iterator[Piece]:
    for v in variables:
        if v.nbytes:
            yield Piece(
                f"variable {v.name}", v.space, (v.name, 0), ("", 0), v.offset, v.offset + v.nbytes,
                -1, -1, (), alone=True, lasting=True,
            )  # fmt: skip
    names = {v.name for v in variables}
    kept = {output.register for output in step.program.outputs}
    for r in step.program.registers:
        if r.nbytes:
            yield from _pieces_of(r, step, order, r.name in kept or r.aliases in names)
    for i, task in enumerate(step.tasks):
        start, nbytes = task.workspace
        alone, what = task.stream in (*AHEAD, WRITE), f"the workspace of {label(task)}"
        for micro in range(step.count if step.looped(i) else 1) if nbytes else ():
            first = step.number(i, micro)
            yield Piece(
                what, workspace_space(task.route), ("", 0), ("", 0), start, start + nbytes, first,
                order.place[first], ((step.stream[i], first),), alone, lasting=False,
            )  # fmt: skip


def _pieces_of(r: Register, step: Step, order: Order, lasting: bool) -> Iterator[Piece]:
    """A piece for each micro-batch that has a register of its own; what is read ahead is one."""
    maker = step.makers[r.name]
    tasks = [maker, *step.users.get(r.name, ())]
    ahead = step.tasks[maker].stream in AHEAD
    alone = ahead or any(step.tasks[i].stream == WRITE for i in tasks)
    parts = step.in_parts(r) and not ahead
    target = step.registers.get(r.aliases)
    apart = target is not None and step.in_parts(target)
    for micro in range(step.count if parts else 1):
        uses: dict[int, int] = {}
        for i in tasks:
            number = step.number(i, micro) if parts else step.last(i)
            stream = step.stream[i]
            uses[stream] = max(uses.get(stream, -1), number)
        first = step.number(maker, micro)
        slot, slots = (micro % r.slots, 1) if r.rewound else (0, r.slots)
        start = r.offset + slot * r.nbytes
        yield Piece(
            f"register {r.name}", r.space, (r.name, micro), (r.aliases, micro if apart else 0),
            start, start + slots * r.nbytes, first, order.place[first], tuple(uses.items()),
            alone, lasting,
        )  # fmt: skip


def _sweep(pieces: list[Piece], step: Step, order: Order) -> None:
    """Compare the pieces over each byte with their neighbours in the order of first firings."""
    events = [(p.space, p.start, 1, p.place, i) for i, p in enumerate(pieces)]
    events += [(p.space, p.stop, 0, p.place, i) for i, p in enumerate(pieces)]
    live: list[tuple[int, int]] = []  # place and number of pieces
    for _, _, opens, place, i in sorted(events):
        at = bisect_left(live, (place, i))
        if not opens:
            del live[at]
            continue
        if at:
            _compare(pieces[live[at - 1][1]], pieces[i], step, order)
        if at < len(live):
            _compare(pieces[i], pieces[live[at][1]], step, order)
        live.insert(at, (place, i))


def _compare(a: Piece, b: Piece, step: Step, order: Order) -> None:
    """Raise unless all accesses of `a` are complete when the first firing of `b` starts."""
    declared = bool(b.aliases[0]) and b.aliases == a.name
    update = declared and a.first < 0  # writing over a variable is allowed; see _check_variable
    alone = b.alone or (a.alone and not update)
    late = [
        number
        for stream, number in a.uses
        if not (order.before((stream, number), b.first) or (declared and number == b.first))
    ]
    if not (alone or late or a.first == b.first or (a.lasting and not update)):
        return
    shared = (
        f"program {step.program.name}: {a.what} and {b.what} share bytes"
        f" {max(a.start, b.start)}..{min(a.stop, b.stop)}"
    )
    users = [step.label(p.first) for p in (a, b) if p.first >= 0]
    if alone:
        raise VerifyError(
            f"{shared} (written by {' and '.join(users)}), but {(a if a.alone else b).what} is in"
            " use beyond the step and keeps its memory to itself"
        )
    if a.first == b.first:
        raise VerifyError(f"{shared}: {users[-1]} uses both at once")
    if a.lasting and not update:
        raise VerifyError(
            f"{shared}: {users[-1]} overwrites {a.what}, which is needed until the step ends"
        )
    user = max(late, key=order.place.__getitem__)
    who = "it" if user == b.first else step.label(user)
    raise VerifyError(f"{shared}: {users[-1]} may write {b.what} while {who} still uses {a.what}")
