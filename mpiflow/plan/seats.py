"""Seats: the slots of registers that several segments of a pipeline stage share.

A stage that holds several pieces of a model keeps what their forward passes make until their
backward passes come. It keeps most of one piece while it keeps little of another, so registers of
one size, each of another piece, make up a pool: together they have as many slots as micro-batches
hold any of them at once, and each turn takes the lowest that is free. In which turn segments are
done is static, and so are the slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from mpiflow.plan.records import Program

Span = tuple[int, int]
"""The first and the last segment that use a register."""


def seats(program: Program) -> dict[str, tuple[int, ...]]:
    """By register of a pool, the slot of each micro-batch."""
    members = {r.name: r for r in program.registers if r.pool}
    if not members:
        return {}
    spans: dict[str, Span] = {}
    for task in program.tasks:
        for name in members.keys() & {*task.inputs, *task.outputs}:
            first, last = spans.get(name, (task.segment, task.segment))
            spans[name] = min(first, task.segment), max(last, task.segment)
    pools: dict[str, dict[str, Span]] = {}
    for name, span in spans.items():
        pools.setdefault(members[name].pool, {})[name] = span
    known: dict[tuple[Span, ...], list[dict[int, int]]] = {}
    found = {}
    for pool in pools.values():
        key = tuple(pool.values())
        if key not in known:
            known[key] = take_seats(program.sequence, dict(enumerate(key)))
        for name, taken in zip(pool, known[key], strict=True):
            slots = members[name].slots  # too few show as memory that two micro-batches share
            found[name] = tuple(taken[k] % slots for k in range(program.micro_batches))
    return found


def take_seats(
    sequence: tuple[tuple[int, int], ...], spans: Mapping[int, Span]
) -> list[dict[int, int]]:
    """Of each span, the seat of each micro-batch: the lowest that is free when its turn comes.

    A micro-batch has its seat from the first to the last segment of a span. There are as many
    seats as are taken at once.
    """
    found: list[dict[int, int]] = [{} for _ in spans]
    free: list[int] = []
    seats = 0
    for segment, micro in sequence:
        for i, (first, _) in spans.items():
            if segment == first:
                if not free:
                    free, seats = [seats], seats + 1
                found[i][micro] = heappop(free)
        for i, (_, last) in spans.items():
            if segment == last:
                heappush(free, found[i][micro])
    return found
