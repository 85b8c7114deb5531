"""From what the launcher started to ranks that can talk, or a refusal that says what to change."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from mpiflow.errors import LaunchError
from mpiflow.exec import mpi
from mpiflow.exec.local import LocalWorld
from mpiflow.exec.transport import Transport, on_all_ranks
from mpiflow.threads import in_slurm_step

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def connect() -> Transport:
    """Collective. The transport of this process: MPI where mpi4py works, else a single rank.

    Raises LaunchError where the ranks that a launcher started cannot see each other.
    """
    try:
        module = mpi.load()
    except (ImportError, RuntimeError) as error:
        return _single(error)
    _refuse_foreign_launcher(module, os.environ)
    send_large_segments(os.environ)
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")  # Open MPI 5.0 asks it first, and it complains
    mpi.start(module)
    check_world(module.COMM_WORLD.Get_size(), os.environ, mpi.implementation(module))
    return mpi.MpiTransport(module)


def send_large_segments(environment: MutableMapping[str, str]) -> None:
    """Let UCX, by which many an MPI talks TCP, pass 64 KiB with a call of the kernel, not 8 KiB.

    The kernels of the step have the core meanwhile. Before MPI starts; what the user has set stays.
    UCX warns of what it does not use, so nothing is set where it has been told not to talk TCP.
    """
    ways = environment.get("UCX_TLS", "all").split(",")
    if ("all" in ways or "tcp" in ways) and "UCX_NET_DEVICES" not in environment:
        for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
            environment.setdefault(name, "64k")


def check_ranks(transport: Transport, plan_ranks: int) -> None:
    """Raises LaunchError, alike on all ranks, unless as many were started as the plan names."""
    if transport.size != plan_ranks:
        were = "was" if transport.size == 1 else "were"
        raise on_all_ranks(
            LaunchError(
                f"the plan is for {_ranks(plan_ranks)}, {transport.size} {were} started; start "
                f"{plan_ranks} (mpiexec -n {plan_ranks} or srun -n {plan_ranks}), or make a plan "
                f"with --ranks {transport.size}"
            )
        )


def check_world(size: int, environment: Mapping[str, str], library: str) -> None:
    """Raises LaunchError where MPI sees `size` ranks and the launcher says that there are more."""
    started = expected_ranks(environment)
    if started is None or size >= started[0]:
        return
    raise LaunchError(
        f"this process sees an MPI world of {_ranks(size)}, but the launcher started "
        f"{started[0]} ({started[1]}): launcher and MPI library do not fit together\n"
        f"  mpi4py is linked to {library}\n  {_advice()}"
    )


def expected_ranks(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """How many ranks the launcher started, and the variable that says so; None without one.

    The variables of an MPI launcher come before those of the Slurm step around it. In a Slurm job
    but outside a step, a process was started by hand and is alone on purpose.
    """
    names = _SIZES + (_SLURM_SIZES if in_slurm_step(environment) else ())
    for name in names:
        value = environment.get(name, "")
        if value.isdecimal():
            return int(value), f"{name}={value}"
    rank = environment.get("PMIX_RANK", "")
    return (int(rank) + 1, f"PMIX_RANK={rank}") if rank.isdecimal() else None


def _single(reason: Exception) -> Transport:
    started = expected_ranks(os.environ)
    if started is not None and started[0] > 1:
        raise LaunchError(
            f"the launcher started {_ranks(started[0])} ({started[1]}), but mpi4py does not work "
            f"in {sys.executable}: {reason}\n  install mpi4py there, and an MPI library "
            "(pip install 'mpiflow[mpi]', or load the MPI module of the site)"
        ) from reason
    return LocalWorld(1).transports[0]


def _refuse_foreign_launcher(module: Any, environment: Mapping[str, str]) -> None:
    """Refuse Open MPI's launcher with another library, which would end the process in MPI_Init."""
    size = environment.get("OMPI_COMM_WORLD_SIZE", "")
    foreign = "PMI_SIZE" not in environment and module.get_vendor()[0] != "Open MPI"
    if foreign and size.isdecimal() and int(size) > 1:
        check_world(1, environment, mpi.implementation(module))


def _advice() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else "the mpiexec of that library"
    return (
        f"start the ranks with {mpiexec}, or under Slurm with srun --mpi=pmi2 (MPICH) or "
        "--mpi=pmix (Open MPI); srun --mpi=list shows what there is"
    )


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
