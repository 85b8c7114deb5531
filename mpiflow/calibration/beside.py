"""Messages beside kernels: whether they hide, and what they take of the kernels' core.

As in a step, kernels run on a thread of their own, and this one looks at the messages at times.

    kernels   ================================          alone
    kernels   ==== ====== ==== ====== ==== ======       beside messages: longer by their overhead
    messages  <--->       <--->       <--->
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from mpiflow.calibration.fit import Fit, fit_line, fit_of
from mpiflow.calibration.links import (
    TURNS,
    bind_collective,
    collective_memory,
    everyone,
    partitions,
    time_round,
)
from mpiflow.compiler.machine import Curve, Link, Piece
from mpiflow.exec.engine import LONGEST_SLEEP_SECONDS, Bell
from mpiflow.exec.segments import HostStream, Segment
from mpiflow.exec.transport import Group, Start, Transport

OVERHEAD = "messages beside kernels"
"""What messages take from kernels of the same rank, in the table of what was measured."""
OVERHEAD_SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 21)
"""Bytes of a message whose overhead is measured: 1 KiB to 2 MiB."""
QUICK_OVERHEAD_SIZES = OVERHEAD_SIZES[::2]
_OVERLAP_BYTES = 8 << 20
_MOST_KERNELS = 10_000
_HIDDEN = 0.5
"""From which part on messages count as hidden."""
_SERIES_SECONDS, _MOST_MESSAGES = 0.03, 64
_LEAST_SECONDS = 1e-7
"""What is less is nothing: the core of the messages is not that of the kernels."""


def measure_overlap(transport: Transport, hosts: Sequence[Sequence[int]]) -> bool:
    """Collective. Whether an all_reduce hides beside kernels; between hosts, if there are several.

    Hidden is what both take alone less what they take side by side, as part of what is shorter.
    """
    group = _pairs(transport, hosts, "overlap")
    with collective_memory(transport, _OVERLAP_BYTES) as memory:
        start = bind_collective(group, "all_reduce", _OVERLAP_BYTES, memory)
        alone = max(everyone(transport, time_round(transport, start)))
        beside = Beside(transport)
        try:
            hidden = beside.hidden(start, alone)
        finally:
            beside.close()
    every = everyone(transport, hidden if group.size > 1 else 1.0)
    return min(every) > _HIDDEN


def measure_overhead(
    transport: Transport, hosts: Sequence[Sequence[int]], sizes: Sequence[int] = OVERHEAD_SIZES
) -> list[tuple[int, float]]:
    """Collective. By bytes, the seconds that sending or receiving a message takes from kernels.

    The "o" of the LogP model (Culler and others 1993), between hosts if there are several; the
    median over ranks.
    """
    group = _pairs(transport, hosts, "overhead")
    beside, found = Beside(transport), []
    try:
        for nbytes in sizes:
            taken = everyone(transport, beside.overhead(_both_ways(group, nbytes)))
            found.append((nbytes, max(statistics.median(taken), _LEAST_SECONDS)))
    finally:
        beside.close()
    return found


def fit_overhead(
    level: str, found: tuple[Link, dict[str, Fit]], points: Sequence[tuple[int, float]]
) -> tuple[Link, dict[str, Fit]]:
    """The link, and how good its fits are, with what its messages take from kernels."""
    link, fits = found
    sizes, seconds = zip(*points, strict=True)
    alpha, beta = fit_line(sizes, seconds)
    fit = fit_of([alpha + beta * n for n in sizes], seconds)
    curve = Curve((Piece(0.0, alpha, beta),))
    return replace(link, overhead=curve), {**fits, f"{OVERHEAD}, {level}": fit}


def _pairs(transport: Transport, hosts: Sequence[Sequence[int]], what: str) -> Group:
    """Collective. The pair of ranks that this one is of: of two hosts, if there are several."""
    ways = partitions(hosts)
    way = (ways["outer"] or ways["inner"])[0]
    members = next(group for group in way if transport.rank in group)
    return transport.group(tuple(members), f"calibrate {what}")


def _both_ways(group: Group, nbytes: int) -> tuple[Start, ...]:
    """A message to the other member of a pair, and one from it; none for who has no partner."""
    if group.size == 1:
        return ()
    sent, received = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    other = 1 - group.index
    return (
        group.bind_send(sent, other, group.index),
        group.bind_receive(received, other, other),
    )


class Beside:
    """Kernels on a stream, and messages that are looked at while they run."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.rank = transport, transport.rank
        self._bell = Bell()
        self._stream = HostStream("calibrate", nullcontext, self._bell.ring)
        matrix = np.full((256, 256), 0.5, np.float32)
        self._kernel = partial(np.matmul, matrix, matrix, out=np.empty_like(matrix))

    def hidden(self, start: Start, seconds: float) -> float:
        """Collective. What part is hidden of a message that takes about so long alone."""
        calls, starts = self._kernels_for(2 * seconds), (start,)
        ways = ((calls, (), 0), ((), starts, 1), (calls, starts, 1))
        turns = [[self._took(*way) for way in ways] for _ in range(TURNS)]
        kernels, alone, both = map(statistics.median, zip(*turns, strict=True))
        return (kernels + alone - both) / min(kernels, alone)

    def overhead(self, starts: tuple[Start, ...]) -> float:
        """Collective. Seconds that each of these messages takes from kernels, on average.

        They are sent again and again, each time when all of the last time are done. 0 for a rank
        that has none.
        """
        once = max(everyone(self._transport, self._took((), starts, 2) / 2))
        times = min(max(round(_SERIES_SECONDS / once), 2), _MOST_MESSAGES)
        calls = self._kernels_for(2 * times * once)
        turns = [
            self._took(calls, starts, times) - self._took(calls, (), 0) for _ in range(TURNS)
        ]  # fmt: skip
        return statistics.median(turns) / times / max(len(starts), 1) if starts else 0.0

    def _kernels_for(self, seconds: float) -> tuple[Callable[[], object], ...]:
        """Collective. As many kernels, alike on all ranks, as take about so long."""
        count = math.ceil(seconds / max(min(map(self._once, range(TURNS))), 1e-6))
        most = round(max(everyone(self._transport, count)))
        return (self._kernel,) * min(most, _MOST_KERNELS)

    def _once(self, _turn: int) -> float:
        """The seconds of a kernel."""
        began = time.perf_counter()
        self._kernel()
        return time.perf_counter() - began

    def _took(
        self, kernels: tuple[Callable[[], object], ...], starts: tuple[Start, ...], times: int
    ) -> float:
        """Collective. The seconds of the kernels, and of the messages beside them."""
        self._transport.barrier().wait(self._transport.check)
        began, last = time.perf_counter(), self._stream.done + 1
        left = times if starts else 0
        under_way = [start() for start in starts]
        self._stream.submit(Segment(kernels, (), awaited=True))
        while under_way or self._stream.done < last:
            self._bell.wait(LONGEST_SLEEP_SECONDS)
            under_way = [request for request in under_way if not request.test()]
            if not under_way and left > 1:
                left -= 1
                under_way = [start() for start in starts]
        return time.perf_counter() - began

    def close(self) -> None:
        """End the thread of the kernels."""
        self._stream.close()
