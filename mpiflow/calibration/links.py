"""What joins the ranks: messages and collectives by size, as the plans' groups do them.

    inner    ranks of one host: pairs of neighbours, and all of a host
    outer    a rank of each host: the first ones together, the second ones, and so on

All groups of a level are at work at once, as they are in a step, so that what they share is shared.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from mpiflow.calibration.fit import Fit, fit_curve, fit_line
from mpiflow.calibration.messages import bind_train, without_answer
from mpiflow.compiler.machine import Link, Measured
from mpiflow.errors import TaskError
from mpiflow.exec.device import host_bytes
from mpiflow.exec.transport import Group, Start, Transport

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(8 << 3 * i for i in range(8)) + (64 << 20,)
"""Bytes of the tensor that the members hold together: 8 B to 64 MiB."""
MESSAGE = "message"
"""The kind of a series of messages from one rank to another."""
QUICK_SIZES = (64, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
TURNS, _MOST_ROUNDS = 5, 20
_SWEEP_SECONDS = 0.03
"""What the calls of one size may take in a sweep, if more than one round fits."""
_FEWEST_SWEEPS, _MOST_SWEEPS = 2, 10


@dataclass(frozen=True, slots=True)
class Series:
    """Seconds of a collective, or message, on groups of some ranks by bytes, the median of all."""

    kind: str
    members: int
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]


def hosts_of(transport: Transport) -> list[list[int]]:
    """Collective. The ranks of each host, hosts in the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(transport.all_gather(transport.host.encode())):
        ranks.setdefault(host.decode(), []).append(rank)
    return list(ranks.values())


def partitions(hosts: Sequence[Sequence[int]]) -> dict[str, list[list[list[int]]]]:
    """By level, the ways to divide all ranks into groups that are measured.

    The first group is the one that counts; ranks without partners are groups of their own.
    """
    most = max(map(len, hosts))
    pairs = [list(ranks[i : i + 2]) for ranks in hosts for i in range(0, len(ranks), 2)]
    inner = [pairs] if most > 1 else []
    inner += [[list(ranks) for ranks in hosts]] if most > 2 else []
    across = [[ranks[i] for ranks in hosts if i < len(ranks)] for i in range(most)]
    outer = [[row[i : i + 2] for row in across for i in range(0, len(row), 2)]]
    outer += [across] if len(hosts) > 2 else []
    return {"inner": inner, "outer": outer if len(hosts) > 1 else []}


def measure_links(
    transport: Transport,
    hosts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    messages: Sequence[int],
) -> dict[str, list[Series]]:
    """Collective. By level, every collective at these sizes on groups of two ranks and of all.

    Then messages of these bytes within the groups of two.
    """
    with collective_memory(transport, max(sizes)) as memory:
        return {
            level: _measured(transport, level, ways, sizes, messages, memory)
            for level, ways in partitions(hosts).items()
        }


def _measured(
    transport: Transport,
    level: str,
    ways: Sequence[Sequence[Sequence[int]]],
    sizes: Sequence[int],
    messages: Sequence[int],
    memory: np.ndarray,
) -> list[Series]:
    """Collective. Those of a level."""
    found: list[Series] = []
    for number, way in enumerate(ways):
        members = next(group for group in way if transport.rank in group)
        group = transport.group(tuple(members), f"calibrate {level} {number}")
        most = max(map(len, way))
        found += [_series(transport, group, kind, most, sizes, memory) for kind in KINDS]
        if not number:
            found.append(_messages(transport, group, messages))
    return found


def _series(
    transport: Transport,
    group: Group,
    kind: str,
    members: int,
    sizes: Sequence[int],
    memory: np.ndarray,
) -> Series:
    """Collective. A collective by size."""
    starts = [bind_collective(group, kind, nbytes, memory) for nbytes in sizes]
    least = _least([partial(_time, transport, group, start) for start in starts])
    return Series(kind, members, tuple(sizes), tuple(least))


def _messages(transport: Transport, group: Group, sizes: Sequence[int]) -> Series:
    """Collective. Messages by size, in a train from the first member of each group."""
    trains = [bind_train(group, nbytes, transport.check) for nbytes in sizes]

    def together(train: Callable[[], float]) -> float:
        transport.barrier().wait(transport.check)
        return statistics.median(t for t in everyone(transport, train()) if t)

    least = _least([partial(together, train) for train in trains])
    return Series(MESSAGE, 2, tuple(sizes), tuple(without_answer(least)))


def _least(timings: Sequence[Callable[[], float]]) -> list[float]:
    """Collective. By rising size, the least of several sweeps over all sizes.

    There are more sweeps, up to a limit, as long as something else disturbs the machine, which
    shows in bytes that took less time than fewer bytes.
    """
    least = [math.inf] * len(timings)
    for sweep in range(_MOST_SWEEPS):
        for i, timing in enumerate(timings):
            least[i] = min(least[i], timing())
        if sweep + 1 >= _FEWEST_SWEEPS and _rises(least):
            break
    return least


def _rises(seconds: Sequence[float]) -> bool:
    """Whether more bytes took more time, or nearly as much; alike on all ranks."""
    return all(b > 0.8 * a for a, b in pairwise(seconds))


def _time(transport: Transport, group: Group, start: Start) -> float:
    """Collective. The median seconds of the calmest of some rounds, the median over ranks."""
    slowest = max(everyone(transport, time_round(transport, start)))
    rounds = min(max(int(_SWEEP_SECONDS / TURNS / slowest), 1), _MOST_ROUNDS)
    calmest = min(time_round(transport, start) for _ in range(rounds))
    waited = everyone(transport, calmest if group.size > 1 else 0.0)
    return statistics.median(t for t in waited if t)


def time_round(transport: Transport, start: Start) -> float:
    """Collective. The median seconds of some calls, begun together."""
    transport.barrier().wait(transport.check)
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        start().wait(transport.check)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def everyone(transport: Transport, seconds: float) -> list[float]:
    """Collective. The figures of all ranks."""
    return [json.loads(data) for data in transport.all_gather(json.dumps(seconds).encode())]


@contextmanager
def collective_memory(transport: Transport, nbytes: int) -> Iterator[np.ndarray]:
    """Collective. What collectives of up to so many bytes work in, one at a time, as plans do."""
    room = nbytes + 8 * transport.size  # parts of two tensors are rounded
    memory = host_bytes(2 * room)
    transport.share(memory, [(0, memory.nbytes)])
    memory[:] = 0
    yield memory.view(np.float32)
    transport.unshare(memory)


def bind_collective(group: Group, kind: str, nbytes: int, memory: np.ndarray) -> Start:
    """Collective. A collective on a float32 tensor of so many bytes, or the next that is whole."""
    part = max(1, round(nbytes / 4 / group.size))
    counts = [part] * group.size
    first, second = memory[: memory.size // 2], memory[memory.size // 2 :]
    whole, own = first[: part * group.size], second[:part]
    match kind:
        case "all_reduce":
            return group.bind_all_reduce(whole)
        case "all_gather":
            return group.bind_all_gather(own, whole, counts)
        case "reduce_scatter":
            return group.bind_reduce_scatter(whole, own, counts)
    piece = [max(1, part // group.size)] * group.size
    sent, received = first[: sum(piece)], second[: sum(piece)]
    return group.bind_all_to_all(sent, piece, received, piece)


def fit_link(level: str, series: Sequence[Series]) -> tuple[Link, dict[str, Fit]]:
    """A link of what was measured on it, and how good the fits are."""
    fits: dict[str, Fit] = {}
    measured = []
    for one in (one for one in series if one.kind != MESSAGE):
        name = f"{one.kind} on {one.members} ranks, {level}"
        curve, fits[name] = fit_curve(name, one.nbytes, one.seconds)
        measured.append(Measured(one.kind, one.members, curve))
    sent = next(one for one in series if one.kind == MESSAGE)
    name = f"messages, {level}"
    messages, fits[name] = fit_curve(name, sent.nbytes, sent.seconds)
    alpha, beta = fit_line(sent.nbytes, sent.seconds)
    if not alpha or not beta:
        raise TaskError(
            f"messages between two ranks, {level}: no latency and bandwidth fit what was measured,"
            f" {list(sent.seconds)} s for {list(sent.nbytes)} bytes; repeat it when the machine is"
            " calmer"
        )
    return Link(alpha, 1 / beta, measured=tuple(measured), messages=messages), fits
