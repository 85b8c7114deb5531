"""How many threads a rank may use, settled before NumPy loads.

Each rank's BLAS takes all cores unless told otherwise, so that ranks on one host would fight for
them. Imports nothing but the standard library: the command line calls it first of all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

# Step ids from here on are Slurm's own (batch script, interactive shell), not of an srun.
_FIRST_SPECIAL_STEP = 0xFFFFFFFA


def usable_cpus() -> int:
    """The CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def in_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether an srun started this process, rather than a batch script or a shell in a job."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def local_ranks(environment: Mapping[str, str]) -> int:
    """The ranks on this host, as the launcher says; 1 where none does."""
    for name in _LOCAL_SIZES:
        if environment.get(name, "").isdecimal():
            return max(1, int(environment[name]))
    if in_slurm_step(environment):
        for name in _SLURM_TASKS:
            # As in 2(x3),1: two tasks on each of three hosts, one on the last.
            counts = re.findall(r"(?:^|,)(\d+)", environment.get(name, ""))
            if counts:
                return max(1, *map(int, counts))
    return 1


def threads_per_rank(environment: Mapping[str, str]) -> int:
    """The threads that a rank may use: what Slurm gives each task, or its part of the CPUs."""
    given = environment.get("SLURM_CPUS_PER_TASK", "")
    if in_slurm_step(environment) and given.isdecimal():
        return max(1, min(int(given), usable_cpus()))
    return max(1, usable_cpus() // local_ranks(environment))


def limit_threads(environment: MutableMapping[str, str] | None = None) -> None:
    """Set the limits of the numeric libraries where the user has not; before NumPy is imported.

    Does nothing where a rank may use all CPUs: the limit would be inherited by what it starts.
    """
    environment = os.environ if environment is None else environment
    threads = threads_per_rank(environment)
    if threads < usable_cpus():
        for name in _LIMITS:
            environment.setdefault(name, str(threads))


def describe_threads(environment: Mapping[str, str]) -> str:
    """What a rank computes with, and why, for the user."""
    own = threads_per_rank(environment)
    given = environment.get(_LIMITS[0], str(own))
    threads = f"each rank computes with {given} thread{'' if given == '1' else 's'}"
    if given != str(own):
        return f"{threads}, as {_LIMITS[0]} says; its share of the CPUs is {own}"
    cpus, ranks = usable_cpus(), local_ranks(environment)
    return (
        f"{threads} ({cpus} CPU{'s'[: cpus > 1]} for {ranks} rank{'s'[: ranks > 1]} of this host;"
        f" {_LIMITS[0]} overrides it)"
    )
