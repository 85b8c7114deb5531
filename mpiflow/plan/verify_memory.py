"""Verify, part three: no byte is overwritten before its last reader, whatever the timing.

Two pieces of memory may share bytes where all accesses of one are complete before the task that
first writes the other starts. That relation is transitive, so the pieces over any byte, sorted by
their first task, need only be compared with their neighbours: a sweep over the arena makes two
comparisons a piece. Compute and communication drain at the end of a step, so comparing within one
step is enough; what the `read` and `write` streams touch outlives it and shares with nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter

from mpiflow.errors import VerifyError
from mpiflow.plan.places import AHEAD, H2D, workspace_space
from mpiflow.plan.records import WRITE, Plan, Program, Register, Variable
from mpiflow.plan.verify_layout import kind_of, label
from mpiflow.plan.verify_order import Order


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a space's arena, the task that first writes them, and all that use it.

    `accesses` has a bit for each task. `alone` pieces share with nothing, before or after;
    `lasting` ones are needed until the step ends. A variable has first = -1.
    """

    what: str
    name: str
    aliases: str
    start: int
    stop: int
    first: int
    accesses: int
    key: tuple[int, int]
    alone: bool
    lasting: bool
    space: str


def check_memory(plan: Plan, program: Program, order: Order) -> None:
    """Variables have one writer, after all readers; aliases and shared bytes are in order."""
    readers, writers = _uses(program)
    tensors = plan.tensors(program)
    for register in program.registers:
        if register.aliases:
            _check_alias(register, tensors, program, writers)
            if isinstance(tensors[register.aliases], Variable):
                writers[register.aliases].extend(writers[register.name])
    for variable in plan.variables:
        _check_variable(variable, readers[variable.name], writers[variable.name], program, order)
    pieces = _pieces(plan, program, order, readers, writers)
    for space in {piece.space: None for piece in pieces}:
        _sweep([piece for piece in pieces if piece.space == space], program, order)


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


Uses = defaultdict[str, list[int]]


def _uses(program: Program) -> tuple[Uses, Uses]:
    """The tasks that read and that write each tensor."""
    readers: Uses = defaultdict(list)
    writers: Uses = defaultdict(list)
    for i, task in enumerate(program.tasks):
        for name in task.inputs:
            readers[name].append(i)
        for name in task.outputs:
            writers[name].append(i)
    return readers, writers


def _check_variable(
    variable: Variable, readers: list[int], writers: list[int], program: Program, order: Order
) -> None:
    what = f"program {program.name}: variable {variable.name}"
    if not writers:
        return
    if len(writers) > 1:
        first, second = (label(program.tasks[i]) for i in writers[:2])
        raise VerifyError(f"{what} is written by {first} and by {second}; one may write it")
    writer = program.tasks[writers[0]]
    if writer.stream in AHEAD:
        raise VerifyError(f"{what} is written by {label(writer)}, which runs ahead of the step")
    for reader in readers:
        if reader != writers[0] and not order.before[writers[0]] >> reader & 1:
            raise VerifyError(
                f"{what} may be overwritten by {label(writer)} before "
                f"{label(program.tasks[reader])} has read it; nothing orders the two"
            )


def _check_alias(
    register: Register, tensors: dict[str, Register], program: Program, writers: Uses
) -> None:
    """The register lies exactly over what it aliases, which its producer reads, or copies over."""
    target = tensors[register.aliases]
    producer = program.tasks[writers[register.name][0]]
    what = f"program {program.name}: register {register.name} of {label(producer)}"
    if target.name not in producer.inputs and producer.kind != H2D:
        raise VerifyError(f"{what} aliases {target.name}, which {label(producer)} does not read")
    place, wanted = ((r.offset, r.nbytes, r.slots, r.rewound) for r in (register, target))
    if place != wanted or register.space != target.space:
        raise VerifyError(
            f"{what} aliases {target.name}, but lies at {_place(register)} and "
            f"{target.name} at {_place(target)}"
        )


def _place(r: Register) -> str:
    where = f" of {r.space} memory" if r.space else ""
    return f"bytes {r.offset}..{r.offset + r.slots * r.nbytes}{where} ({r.slots} x {r.nbytes})"


def _pieces(
    plan: Plan, program: Program, order: Order, readers: Uses, writers: Uses
) -> list[Piece]:
    pieces: list[Piece] = []
    variables = {variable.name for variable in plan.variables}
    kept = {output.register for output in program.outputs}
    ahead = {i for i, task in enumerate(program.tasks) if task.stream in AHEAD}
    behind = {i for i, task in enumerate(program.tasks) if task.stream == WRITE}

    def add(what: str, name: str, aliases: str, start: int, nbytes: int, first: int,
            tasks: list[int], alone: bool, lasting: bool, space: str) -> None:  # fmt: skip
        if nbytes:
            accesses = sum(1 << i for i in set(tasks))
            key = (order.position[first] if first >= 0 else -1, len(pieces))
            pieces.append(
                Piece(what, name, aliases, start, start + nbytes, first, accesses, key, alone,
                      lasting, space)
            )  # fmt: skip

    for r in (*plan.variables, *program.registers):
        uses = readers[r.name] + writers[r.name]
        if r.micro and ahead & set(writers[r.name]):
            continue  # one piece for all slots
        variable = r.name in variables
        slot, slots = (r.micro % r.slots, 1) if r.rewound else (0, r.slots)
        add(
            f"{kind_of(r)} {r.name}", r.name, r.aliases, r.offset + slot * r.nbytes,
            slots * r.nbytes,
            -1 if variable else writers[r.name][0], uses,
            alone=variable or bool(ahead & set(writers[r.name])) or bool(behind & set(uses)),
            lasting=variable or r.name in kept or r.aliases in variables, space=r.space,
        )  # fmt: skip
    for i, task in enumerate(program.tasks):
        start, nbytes = task.workspace
        alone = i in ahead or i in behind
        add(f"the workspace of {label(task)}", "", "", start, nbytes, i, [i], alone, False,
            workspace_space(task.route))  # fmt: skip
    return pieces


def _sweep(pieces: list[Piece], program: Program, order: Order) -> None:
    """Compare the pieces over each byte with their neighbours in the order of first tasks."""
    events = [(p.start, 1, i) for i, p in enumerate(pieces)]
    events += [(p.stop, 0, i) for i, p in enumerate(pieces)]
    live: list[Piece] = []
    for _, opens, i in sorted(events):
        piece = pieces[i]
        place = bisect_left(live, piece.key, key=attrgetter("key"))
        if not opens:
            del live[place]
            continue
        if place:
            _compare(live[place - 1], piece, program, order)
        if place < len(live):
            _compare(piece, live[place], program, order)
        live.insert(place, piece)


def _compare(a: Piece, b: Piece, program: Program, order: Order) -> None:
    """Raise unless all accesses of `a` are complete when the first task of `b` starts."""
    declared = bool(b.aliases) and b.aliases == a.name
    update = declared and a.first < 0  # writing over a variable is allowed; see _check_variable
    shared = f"{a.what} and {b.what} share bytes {max(a.start, b.start)}..{min(a.stop, b.stop)}"
    if b.alone or (a.alone and not update):
        keeper = a if a.alone else b
        raise VerifyError(
            f"program {program.name}: {shared}{_users(a, b, program)}, but {keeper.what} is in "
            "use beyond the step and keeps its memory to itself"
        )
    writer = label(program.tasks[b.first])
    if a.first == b.first:
        raise VerifyError(f"program {program.name}: {shared}: {writer} uses both at once")
    late = a.accesses & ~order.before[b.first]
    if declared:
        late &= ~(1 << b.first)
    if a.lasting and not update:
        raise VerifyError(
            f"program {program.name}: {shared}: {writer} overwrites {a.what}, which is needed "
            "until the step ends"
        )
    if late:
        user = order.last(late)
        who = "it" if user == b.first else label(program.tasks[user])
        raise VerifyError(
            f"program {program.name}: {shared}: {writer} may write {b.what} "
            f"while {who} still uses {a.what}"
        )


def _users(a: Piece, b: Piece, program: Program) -> str:
    names = [label(program.tasks[p.first]) for p in (a, b) if p.first >= 0]
    return f" (written by {' and '.join(names)})" if names else ""
