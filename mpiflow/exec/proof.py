"""Proof that MPI takes memory of devices: bytes that went from one to another, and are as sent.

A library that does not, or that was built without it, reads such memory as if it were the host's:
the process dies, or something else is sent. So it is asked first, and then tried before the first
step, between ranks of a host and between hosts, in messages of three sizes, as libraries send small
and large ones in different ways.
"""

from __future__ import annotations

import json
import time
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiflow.errors import LaunchError, TaskError
from mpiflow.exec.transport import Group, Transport, on_all_ranks

if TYPE_CHECKING:
    from mpiflow.exec.device import Device

_SIZES = (64, 1 << 16, (4 << 20) + 3)
"""Bytes of a message: one that is sent at once, one after a handshake, one in pieces."""
_SECONDS = 30.0
"""What has not come by then is lost."""
_UNWRITTEN = 0xFF


def prove(transport: Transport, device: Device) -> None:
    """Collective. LaunchError, alike on all ranks, unless memory of their devices can be sent."""
    refused = transport.takes_device_memory()
    _agree(transport, refused)
    group = transport.group(tuple(range(transport.size)), "proof")
    hosts = [data.decode() for data in transport.all_gather(transport.host.encode())]
    rings = _ring_on_host(hosts, transport.rank), _ring_of_hosts(hosts, transport.rank)
    for ring, (tag, size) in product(rings, enumerate(_SIZES)):
        problem = ""
        if ring is not None:
            before, after = ring
            try:
                problem = _try(transport, device, group, before, after, tag, size)
            except TaskError as error:
                problem = str(error)
        _agree(transport, problem)  # or a rank would wait for another that has given up


def _ring_on_host(hosts: list[str], rank: int) -> tuple[int, int] | None:
    """The ranks before and after a rank among those of its host; None where it is alone."""
    return _beside([r for r, host in enumerate(hosts) if host == hosts[rank]], rank)


def _ring_of_hosts(hosts: list[str], rank: int) -> tuple[int, int] | None:
    """The same among the ranks that have its number on their hosts."""
    number = [hosts[:r].count(host) for r, host in enumerate(hosts)]
    return _beside([r for r, own in enumerate(number) if own == number[rank]], rank)


def _beside(ring: list[int], rank: int) -> tuple[int, int] | None:
    place = ring.index(rank)
    return (ring[place - 1], ring[(place + 1) % len(ring)]) if len(ring) > 1 else None


def _try(
    transport: Transport, device: Device, group: Group, before: int, after: int, tag: int, size: int
) -> str:
    """Send to one rank and receive from another; what is wrong with what came, "" if nothing."""
    memory = device.allocate(2 * size)
    sent, came = memory[:size], memory[-size:]
    device.fill(sent, _pattern(transport.rank, size))
    device.fill(came, np.full(size, _UNWRITTEN, np.uint8))
    requests = [group.bind_receive(came, before, tag)(), group.bind_send(sent, after, tag)()]
    began = time.perf_counter()
    while not all([request.test() for request in requests]):
        if transport.check is not None:
            transport.check()
        if time.perf_counter() - began > _SECONDS:
            return (
                f"{size:,} bytes from rank {before}, or those to rank {after}, were still under"
                f" way after {_SECONDS:.0f} s"
            )
    found, expected = device.fetch(came), _pattern(before, size)
    wrong = np.flatnonzero(found != expected)
    if not wrong.size:
        return ""
    at = int(wrong[0])
    return (
        f"of {size:,} bytes from rank {before}, {wrong.size:,} differ: byte {at} is"
        f" {found[at]}, where {expected[at]} was sent"
    )


def _pattern(rank: int, size: int) -> np.ndarray:
    """Bytes that differ by rank and place, and are never those of memory without any."""
    return ((np.arange(size) * 7 + 31 * rank) % 251).astype(np.uint8)


def _agree(transport: Transport, problem: str) -> None:
    """Collective. LaunchError on all ranks where one has a problem."""
    mine = json.dumps([problem, transport.host]).encode()
    found: list[Any] = [json.loads(data) for data in transport.all_gather(mine)]
    bad = [(rank, host, text) for rank, (text, host) in enumerate(found) if text]
    if bad:
        rank, host, text = bad[0]
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise on_all_ranks(
            LaunchError(
                "the plan hands memory of GPUs to MPI (route mpi), which cannot be: rank"
                f" {rank} on {host}{more}: {text}; make the plan with --route nccl or --route"
                " staged"
            )
        )
