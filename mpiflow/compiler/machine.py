"""What a machine can do, in numbers; every task is priced from these.

    Machine         nodes and devices, what a device computes, its host link, its storage
      ├─ Link       `inner` between ranks of one node, `outer` between those of several
      │    └─ Measured    a collective on so many members, as it was measured there
      └─ Curve      seconds by bytes or by operations, straight in pieces

The figures are in TOML files, see `machinefile`; those of `mpiflow/machines` are built in.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from mpiflow.errors import UsageError

Value = TypeVar("Value")

MATRIX, VECTOR = "matrix", "vector"
"""What a kernel's operations are: those of products, which have units or libraries of their own,
and all others. `Op.unit` says which."""


@dataclass(frozen=True, slots=True)
class Piece:
    """From the amount `start` on: `seconds` at its start, and `each` for every one more."""

    start: float
    seconds: float
    each: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by amount; the first piece starts at 0, the last one has no end."""

    pieces: tuple[Piece, ...]

    def seconds(self, amount: float) -> float:
        """What an amount takes."""
        index = bisect_right(self.pieces, amount, key=lambda piece: piece.start) - 1
        piece = self.pieces[index]
        return piece.seconds + (amount - piece.start) * piece.each


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a collective on `members` ranks by the bytes of the tensor, joint over them."""

    kind: str
    members: int
    curve: Curve


@dataclass(frozen=True, slots=True)
class Link:
    """What joins ranks: seconds of a message, bytes a second that a rank sends while all do, and
    `call`, the seconds of starting and completing a collective."""

    latency: float
    bandwidth: float
    call: float = 0.0
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """One rank's device, its links, its storage; compared by identity, as it keys caches.

    Rates are per second: operations by dtype, bytes for memory and storage. `launch` is the fixed
    cost of a kernel call, `read_latency` that of one read request, in seconds. `process_bytes` is
    the memory of a rank before it has allocated anything: Python, NumPy, MPI and HDF5.
    `nodes` is 0 where their number is not fixed, `devices_per_node` where all ranks share a node,
    `memory_bytes` where a device's memory is not known. A `hierarchical` collective reduces within
    the nodes first; otherwise a group on several nodes runs at the speed of the outer link.
    Where there is a curve, it takes the place of launch and rate.
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
    matrix_curves: tuple[tuple[str, Curve], ...] = ()
    memory_curve: Curve | None = None
    memory_bytes: int = 0
    nodes: int = 0
    devices_per_node: int = 0
    hierarchical: bool = False
    host_link: Link | None = None

    def peak(self, dtype: str, unit: str = MATRIX) -> float:
        """Operations a second on a dtype; where it has no figure, those of the slowest."""
        rates = self.vector_flops if unit == VECTOR and self.vector_flops else self.flops
        return _by_dtype(rates, dtype) or min(rate for _, rate in rates)

    def arithmetic(self, flops: int, dtype: str, unit: str) -> float:
        """Seconds of a kernel that is busy with operations."""
        curve = _by_dtype(self.matrix_curves, dtype) if unit == MATRIX else None
        return curve.seconds(flops) if curve else self.launch + flops / self.peak(dtype, unit)

    def traffic(self, nbytes: int) -> float:
        """Seconds of a kernel that is busy with reading and writing memory."""
        curve = self.memory_curve
        return curve.seconds(nbytes) if curve else self.launch + nbytes / self.memory

    @property
    def ranks(self) -> int | None:
        """How many ranks it takes; None where that is not fixed."""
        return self.nodes * self.devices_per_node or None


def _by_dtype(pairs: tuple[tuple[str, Value], ...], dtype: str) -> Value | None:
    for known, value in pairs:
        if known == dtype:
            return value
    return None


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
