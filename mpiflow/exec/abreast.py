"""Joins the operands of a kernel that lie side by side: those of any length are one flat array.

On a rank whose parts are smaller than the largest there are gaps, and less is joined, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpiflow.exec.arena import Arena
from mpiflow.graph.op import Op
from mpiflow.plan.records import Register


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a task, and the array of what this rank has of it."""

    register: Register
    array: Any

    @property
    def stop(self) -> int:
        """Where it ends in its arena."""
        return self.register.offset + int(self.array.nbytes)

    def follows(self, other: Operand) -> bool:
        """Whether it begins where the other ends; slots of several firings are apart."""
        one, two = other.register, self.register
        alike = (one.space, one.dtype, one.slots) == (two.space, two.dtype, two.slots)
        return alike and two.slots == 1 and other.stop == two.offset


def joined(
    op: Op, inputs: Sequence[Operand], outputs: Sequence[Operand], arenas: dict[str, Arena]
) -> tuple[Op, list[Any], list[Any]]:
    """The op for as few tensors as its operands make, and their arrays."""
    given, made = op.abreast()
    rows = [[inputs[i] for i in each] for each in given]
    rows += [[outputs[i] for i in each] for each in made]
    if not rows or len(rows[0]) == 1:
        return op, [one.array for one in inputs], [one.array for one in outputs]
    runs = _runs(rows)
    return (
        op.joined(len(runs)),
        _arrays(inputs, given, runs, arenas),
        _arrays(outputs, made, runs, arenas),
    )


def _runs(rows: list[list[Operand]]) -> list[range]:
    """Which members follow one another in every row; a rank may have nothing of a member."""
    runs: list[range] = []
    last = -1
    for member in range(len(rows[0])):
        if not rows[0][member].array.size:
            continue
        if runs and all(row[member].follows(row[last]) for row in rows):
            runs[-1] = range(runs[-1].start, member + 1)
        else:
            runs.append(range(member, member + 1))
        last = member
    return runs or [range(1)]


def _arrays(
    operands: Sequence[Operand],
    rows: tuple[range, ...],
    runs: list[range],
    arenas: dict[str, Arena],
) -> list[Any]:
    """Those of the runs in the place of each row, and all others as they are."""
    starts = {row.start: row for row in rows}
    inside = {i for row in rows for i in row}
    arrays: list[Any] = []
    for i, operand in enumerate(operands):
        if i in starts:
            row = [operands[j] for j in starts[i]]
            arrays += [_one(row[run.start : run.stop], arenas) for run in runs]
        elif i not in inside:
            arrays.append(operand.array)
    return arrays


def _one(run: Sequence[Operand], arenas: dict[str, Arena]) -> Any:
    """The array of a run: flat, if it is of several."""
    if len(run) == 1:
        return run[0].array
    register = run[0].register
    count = sum(operand.array.size for operand in run)
    return arenas[register.space].view(register.offset, (count,), register.dtype)
