"""What a machine can do, in numbers; every task is priced from these.

    Machine         nodes and devices, what a device computes, its host link, its storage
      ├─ Kernel     an op, as it was measured there
      └─ Link       `inner` between ranks of one node, `outer` between those of several
           └─ Measured    a collective on so many members, as it was measured there

The figures are in TOML files, see `machinefile`; those of `mpiflow/machines` are built in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from mpiflow.errors import UsageError

MATRIX, VECTOR = "matrix", "vector"
"""What a kernel's operations are: those of products, which have units or libraries of their own,
and all others. `Op.unit` says which."""


@dataclass(frozen=True, slots=True)
class Piece:
    """From `start` bytes on: `seconds` there, and `each` for every byte more."""

    start: float
    seconds: float
    each: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by bytes, straight in pieces; the first starts at 0, the last has no end."""

    pieces: tuple[Piece, ...]

    def seconds(self, nbytes: float) -> float:
        """What so many bytes take."""
        index = bisect_right(self.pieces, nbytes, key=lambda piece: piece.start) - 1
        piece = self.pieces[index]
        return piece.seconds + (nbytes - piece.start) * piece.each


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a collective on `members` ranks by the bytes of the tensor, joint over them."""

    kind: str
    members: int
    curve: Curve


@dataclass(frozen=True, slots=True)
class Link:
    """What joins ranks: seconds of a message, bytes a second that a rank sends while all do, and
    `call`, the seconds of starting and completing a collective.

    `messages`, where they were measured, has the seconds of messages one behind another, by bytes,
    and `overhead` the seconds that sending or receiving one takes from kernels of the same rank.
    """

    latency: float
    bandwidth: float
    call: float = 0.0
    measured: tuple[Measured, ...] = ()
    messages: Curve | None = None
    overhead: Curve | None = None

    def message(self, nbytes: float) -> float:
        """Seconds of a message of so many bytes, before the next may follow it."""
        if self.messages is None:
            return self.latency + nbytes / self.bandwidth
        return self.messages.seconds(nbytes)

    def with_overhead(self, seconds: float) -> Link:
        """The link whose messages take so much more from kernels, whatever their bytes."""
        known = self.overhead or Curve((Piece(0.0, 0.0, 0.0),))
        pieces = tuple(replace(piece, seconds=piece.seconds + seconds) for piece in known.pieces)
        return replace(self, overhead=Curve(pieces))


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel of an op: `seconds` of a call, and how many times the roofline it takes."""

    seconds: float
    factor: float


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """One rank's device, its links, its storage; compared by identity, as it keys caches.

    Rates are per second: operations by dtype, bytes for memory and storage. `launch` is the fixed
    cost of a kernel call, `read_latency` that of one read request, in seconds. `process_bytes` is
    the memory of a rank before it has allocated anything: Python, NumPy, MPI and HDF5.
    `nodes` is 0 where their number is not fixed, `devices_per_node` where all ranks share a node,
    `memory_bytes` where a device's memory is not known. A `hierarchical` collective reduces within
    the nodes first; otherwise a group on several nodes runs at the speed of the outer link.
    `route` is how devices reach one another, "" where that is through the host.
    `overlap` says whether collectives progress while the rank computes, or only while it waits.
    `kernels` has the ops that were measured, by name. `crowding` is how many times longer kernels
    take in steps, by how many ranks are at work on a node.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    memory: float
    launch: float
    inner: Link
    outer: Link
    storage: float
    read_latency: float
    process_bytes: int
    vector_flops: tuple[tuple[str, float], ...] = ()
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    memory_bytes: int = 0
    nodes: int = 0
    devices_per_node: int = 0
    hierarchical: bool = False
    overlap: bool = True
    host_link: Link | None = None
    route: str = ""
    crowding: tuple[tuple[int, float], ...] = ()

    def with_ranks(self, ranks: int) -> Machine:
        """The machine while so many ranks are at work: between counts that are known, in line."""
        if not self.crowding:
            return self
        busy = min(ranks, self.devices_per_node or ranks)
        counts, factors = zip(*sorted(self.crowding), strict=True)
        by = float(np.interp(busy, counts, factors))
        return replace(
            self,
            flops=tuple((dtype, rate / by) for dtype, rate in self.flops),
            vector_flops=tuple((dtype, rate / by) for dtype, rate in self.vector_flops),
            memory=self.memory / by,
            launch=self.launch * by,
            kernels={op: Kernel(k.seconds * by, k.factor) for op, k in self.kernels.items()},
            crowding=(),
        )

    def peak(self, dtype: str, unit: str = MATRIX) -> float:
        """Operations a second on a dtype; where it has no figure, those of the slowest."""
        rates = self.vector_flops if unit == VECTOR and self.vector_flops else self.flops
        for known, rate in rates:
            if known == dtype:
                return rate
        return min(rate for _, rate in rates)

    @property
    def ranks(self) -> int | None:
        """How many ranks it takes; None where that is not fixed."""
        return self.nodes * self.devices_per_node or None


FOLDER = Path(__file__).parent.parent / "machines"


def built_in() -> tuple[str, ...]:
    """The names of the machines that come with mpiflow."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def find_machine(name: str) -> Machine:
    """The built-in machine of that name, or that of a file, FILE.toml. UsageError otherwise."""
    if name.endswith(".toml"):
        return _load(Path(name))
    if name not in built_in():
        raise UsageError(
            f"there is no machine {name!r}; built in are {', '.join(built_in())}, others are files,"
            " FILE.toml, as `mpiflow calibrate` writes"
        )
    return _built_in(name)


@cache
def _built_in(name: str) -> Machine:
    return _load(FOLDER / f"{name}.toml", built_in=True)


def _load(path: Path, *, built_in: bool = False) -> Machine:
    from mpiflow.compiler.machinefile import load  # which needs the records above

    return load(path, built_in=built_in)
