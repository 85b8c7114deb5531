"""Clocks: how the clock of each host differs from that of rank 0, by ping-pong.

    rank 0     t0 ----.            .---> t2        the leader's clock is ahead by
    leader             `--> t1 ---'                t1 - (t0 + t2) / 2, give or take (t2 - t0) / 2

Of several rounds the shortest tells most. The ranks of a host share one clock, so only the first
rank of each takes part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np

from mpiflow.exec.transport import Group, Start, Transport
from mpiflow.plan.tracefile import SAME, Offset

_ROUNDS = 16
_PING, _PONG = 1, 2


class Clocks:
    """Collective. The first ranks of all hosts, which compare their clocks with that of rank 0."""

    def __init__(
        self,
        transport: Transport,
        host: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._transport, self._clock = transport, clock
        hosts = [data.decode() for data in transport.all_gather((host or transport.host).encode())]
        first = {name: rank for rank, name in reversed(list(enumerate(hosts)))}
        self._leaders = tuple(sorted(first.values()))
        self._mine = self._leaders.index(first[hosts[transport.rank]])
        self._ping, self._pong = np.zeros(1), np.zeros(1)
        self._exchanges: list[tuple[Start, Start]] = []
        if len(self._leaders) > 1:
            leads = transport.rank in self._leaders
            rest = tuple(rank for rank in range(len(hosts)) if rank not in self._leaders)
            group = transport.group(self._leaders if leads else rest, "hosts")
            self._exchanges = self._bound(group) if leads else []

    def _bound(self, group: Group) -> list[tuple[Start, Start]]:
        """What a leader does in a round: with each of the others, or with rank 0."""
        if group.index == 0:
            return [
                (group.bind_send(self._ping, i, _PING), group.bind_receive(self._pong, i, _PONG))
                for i in range(1, group.size)
            ]
        receive = group.bind_receive(self._ping, 0, _PING)
        return [(receive, group.bind_send(self._pong, 0, _PONG))]

    def compare(self) -> Offset:
        """Collective. How the clock of this host differs from that of rank 0, now."""
        if len(self._leaders) == 1:
            return SAME.before
        found = [[0.0, 0.0, 0.0]]
        for first, second in self._exchanges:
            if self._transport.rank == 0:
                found.append(self._measured(first, second))
            else:
                self._answer(first, second)
        data = json.dumps(found).encode() if self._transport.rank == 0 else None
        return Offset(*json.loads(self._transport.broadcast(data))[self._mine])

    def _measured(self, send: Start, receive: Start) -> list[float]:
        """Of the shortest round: the leader's time, how far it is ahead, the uncertainty."""
        rounds = []
        for _ in range(_ROUNDS):
            began = self._clock()
            send().wait(self._transport.check)
            receive().wait(self._transport.check)
            rounds.append((self._clock() - began, began, float(self._pong[0])))
        trip, began, theirs = min(rounds)
        return [theirs, theirs - (began + trip / 2), trip / 2]

    def _answer(self, receive: Start, send: Start) -> None:
        for _ in range(_ROUNDS):
            receive().wait(self._transport.check)
            self._pong[0] = self._clock()
            send().wait(self._transport.check)
