"""Which tensors lie side by side in memory, without a gap: what one call takes as one buffer.

Those of a fused all_reduce have to, and what is copied to the host for one. What a kernel does the
same to is better so (see `graph.op.Op.abreast`), and lies apart where it cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from mpiflow.compiler.pack import align
from mpiflow.graph.op import build_op
from mpiflow.plan.places import D2H
from mpiflow.plan.records import COMPUTE, Program, Register, Variable

Names = tuple[str, ...]


def places_of(
    variables: Sequence[Variable], programs: Sequence[Program]
) -> tuple[dict[str, int], int]:
    """The offset of each variable, and where the last one ends, rounded up to a cache line."""
    nbytes = {v.name: v.nbytes for v in variables}
    groups = [group for program in programs for group in _abreast(program)]
    beside = {name: group for group in groups if nbytes.keys() >= set(group) for name in group}
    places: dict[str, int] = {}
    cursor = 0
    for name in nbytes:
        if name not in places:
            for member in beside.get(name, (name,)):
                places[member] = cursor
                cursor += nbytes[member]
            cursor = align(cursor)
    return places, cursor


def side_by_side(
    program: Program,
    registers: Mapping[str, Register],
    root: Mapping[str, str],
    lasting: Set[str],
) -> dict[str, list[str]]:
    """By register all that it lies beside, in order; of those that share memory, the first.

    `root` has that first one of each register, and `lasting` those that are placed before.
    """
    joined: dict[str, list[str]] = {}
    for group in _reduced(program):
        members = [root[name] for name in group]
        joined.update(dict.fromkeys(members, members))
    for group in _abreast(program):
        members = list(dict.fromkeys(root[name] for name in group if name in registers))
        if (
            len(members) == len(group)
            and joined.keys().isdisjoint(members)
            and lasting.isdisjoint(members)
            and all(registers[name].slots == 1 for name in members)
        ):
            joined.update(dict.fromkeys(members, members))
    return joined


def _reduced(program: Program) -> list[Names]:
    """The registers of each fused all_reduce, and those that are copied for one."""
    reduced = [t.inputs for t in program.tasks if len(t.outputs) > 1 and t.op == "all_reduce"]
    wanted = set(reduced)
    return reduced + [t.inputs for t in program.tasks if t.kind == D2H and t.outputs in wanted]


def _abreast(program: Program) -> list[Names]:
    """The tensors that a kernel takes as one array where it can."""
    found = []
    for task in program.tasks:
        if task.kind == COMPUTE:
            given, made = build_op(task.op, task.attributes).abreast()
            found += [tuple(task.inputs[i] for i in each) for each in given if len(each) > 1]
            found += [tuple(task.outputs[i] for i in each) for each in made if len(each) > 1]
    return found
