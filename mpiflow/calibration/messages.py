"""Messages from one rank to another, one behind the other, as a pipeline stage sends them.

    first    n bytes ->           n bytes ->           n bytes ->
    second              <- 1 byte            <- 1 byte            <- 1 byte

A network may let some bytes pass faster than it can go on with, and other sizes may take another
way through it. So of each size the pace counts that a train of messages has in its second half.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from mpiflow.exec.transport import Check, Group, Start

SIZES = tuple(8 << 2 * i for i in range(11))
"""Bytes of a message: 8 B to 8 MiB."""
QUICK_SIZES = (64, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
_TRAIN_BYTES = 8 << 20
_FEWEST, _MOST = 4, 64
_THERE, _BACK = 0, 1


def bind_train(group: Group, nbytes: int, check: Check | None) -> Callable[[], float]:
    """Collective. A train of messages of that many bytes from the first member to the second.

    Each call of what is given is one train, a collective, and gives the first member the seconds of
    a message and of its answer; other members get 0.
    """
    whole, answer = np.zeros(nbytes, np.uint8), np.zeros(1, np.uint8)
    count = min(max(_TRAIN_BYTES // nbytes, _FEWEST), _MOST)
    if group.index > 1 or group.size == 1:
        return lambda: 0.0
    if group.index == 1:
        back = (group.bind_receive(whole, 0, _THERE), group.bind_send(answer, 0, _BACK))
        return lambda: _second_half(count, back, check) * 0.0
    there = (group.bind_send(whole, 1, _THERE), group.bind_receive(answer, 1, _BACK))
    return lambda: _second_half(count, there, check)


def _second_half(count: int, calls: tuple[Start, ...], check: Check | None) -> float:
    """The median seconds of all calls, one after another, in the second half of so many times."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        for call in calls:
            call().wait(check)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[count // 2 :])


def without_answer(seconds: list[float]) -> list[float]:
    """What messages take of what they and their answers do, by rising sizes.

    An answer takes half of what the smallest message and its answer do.
    """
    return [each - seconds[0] / 2 for each in seconds]
