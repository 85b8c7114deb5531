"""What a machine can do, in numbers; every task is priced from these."""

from __future__ import annotations

from dataclasses import dataclass

from mpiflow.errors import UsageError


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's device, its link to the other ranks, its storage.

    Rates are per second: `flops` by dtype, bytes for memory, link and storage. `launch` is the
    fixed cost of a kernel call, `latency` that of a message, `call` that of starting and
    completing a collective, `read_latency` that of one read request, all in seconds.
    `process_bytes` is the memory of a rank before it has allocated anything: Python, NumPy, MPI
    and HDF5.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    memory: float
    launch: float
    latency: float
    call: float
    link: float
    storage: float
    read_latency: float
    process_bytes: int

    def peak(self, dtype: str) -> float:
        """Operations a second on a dtype."""
        return dict(self.flops).get(dtype, min(rate for _, rate in self.flops))


MACHINES = {
    # One core of a current server, ranks on one node exchanging through shared memory. Measured
    # with NumPy and MPICH on a 2-core virtual machine; a calibrated file will be nearer elsewhere.
    "cpu": Machine(
        name="cpu",
        flops=(("float32", 6e10), ("float64", 3e10), ("int64", 1e9)),
        memory=8e9,
        launch=1.5e-6,
        latency=4e-6,
        call=1.2e-5,
        link=3e9,
        storage=5e8,
        read_latency=5e-5,
        process_bytes=75_000_000,
    )
}


def find_machine(name: str) -> Machine:
    """The built-in machine of that name."""
    if name not in MACHINES:
        raise UsageError(f"there is no machine {name!r}; known are {', '.join(MACHINES)}")
    return MACHINES[name]
