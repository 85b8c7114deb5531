"""Which GPU a rank takes: the one of its number on the host, of those that it sees.

    launcher          what says the number on the host
    Open MPI          OMPI_COMM_WORLD_LOCAL_RANK
    MPICH, Intel MPI  MPI_LOCALRANKID
    Cray              PALS_LOCAL_RANKID, PMI_LOCAL_RANK
    Slurm             SLURM_LOCALID, in a step that srun started

Slurm may show each rank other GPUs (--gpus-per-task, --gpu-bind), all numbered from 0. So the
number counts modulo the GPUs that are seen, CUDA_VISIBLE_DEVICES is never parsed, and the ranks
compare the UUIDs of what they took.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mpiflow.errors import LaunchError
from mpiflow.exec.cuda_driver import Driver
from mpiflow.exec.transport import Transport, on_all_ranks
from mpiflow.threads import in_slurm_step

_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK", "FLUX_TASK_LOCAL_ID", "JSM_NAMESPACE_LOCAL_RANK",
)  # fmt: skip
_SHOWN = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK", "SLURM_JOB_GPUS")
"""Variables that decide what a rank sees, for messages."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a rank took: GPU `index` of the `seen` that it sees, as number `local` on its host.

    `source` is what said that number.
    """

    rank: int
    host: str
    local: int
    source: str
    seen: int
    index: int
    name: str
    uuid: str

    def __str__(self) -> str:
        gpu = f"{self.name} {self.uuid}" if self.seen else "none"
        return (
            f"rank {self.rank} on {self.host}, there number {self.local} ({self.source}): GPU"
            f" {self.index} of {self.seen} that it sees, {gpu}"
        )


def local_rank(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """The number of this rank on its host, and the variable that says so; None without one.

    Those of an MPI launcher come before that of the Slurm step around it.
    """
    names = _LOCAL_RANKS + (("SLURM_LOCALID",) if in_slurm_step(environment) else ())
    for name in names:
        value = environment.get(name, "")
        if value.isdecimal():
            return int(value), f"{name}={value}"
    return None


def take_gpu(
    transport: Transport, driver: Driver, environment: Mapping[str, str], *, share: bool = False
) -> list[Placement]:
    """Collective. Make this rank use its GPU; gives what all ranks took, by rank.

    LaunchError, alike on all ranks, where one sees no GPU, or two took the same and may not
    `share` it.
    """
    hosts = [data.decode() for data in transport.all_gather(transport.host.encode())]
    before = hosts[: transport.rank].count(transport.host)
    local, source = local_rank(environment) or (before, "counted by host")
    seen = driver.count()
    index = local % seen if seen else 0
    name, uuid = "", ""
    if seen:
        gpu = driver.gpu(index)
        name, uuid = gpu.name, gpu.uuid
    shown = [f"{v}={environment[v]}" for v in _SHOWN if v in environment]
    source = ", ".join([source, *shown])
    mine = [transport.rank, transport.host, local, source, seen, index, name, uuid]
    placements = [
        Placement(*json.loads(data)) for data in transport.all_gather(json.dumps(mine).encode())
    ]
    check_placements(placements, share=share)
    driver.use(index)
    return placements


def check_placements(placements: list[Placement], *, share: bool) -> None:
    """Raise LaunchError where a rank sees no GPU, or two took the same and may not share it."""
    blind = [p for p in placements if not p.seen]
    if blind:
        raise _refusal(
            f"{_ranks(blind)} no GPU; ask the launcher for one a rank (srun --gpus-per-node), or"
            " make the plan with --device cpu",
            blind,
        )
    shared = shared_gpus(placements)
    if shared and not share:
        first = shared[0]
        ranks = sum(p.host == first[0].host for p in placements)
        raise _refusal(
            f"{len(first)} ranks took the same GPU; {first[0].host} has {ranks} ranks, and rank"
            f" {first[0].rank} sees {first[0].seen} GPUs there. Start one rank a GPU, or let ranks"
            " share one with --share-gpus",
            [p for group in shared for p in group],
        )


def shared_gpus(placements: list[Placement]) -> list[list[Placement]]:
    """The groups of ranks that took the same GPU."""
    groups: dict[tuple[str, str], list[Placement]] = {}
    for placement in placements:
        groups.setdefault((placement.host, placement.uuid), []).append(placement)
    return [group for group in groups.values() if len(group) > 1]


def _ranks(placements: list[Placement]) -> str:
    return f"{len(placements)} ranks see" if len(placements) > 1 else "1 rank sees"


def _refusal(what: str, placements: list[Placement], most: int = 8) -> LaunchError:
    listed = "".join(f"\n  {placement}" for placement in placements[:most])
    rest = len(placements) - most
    more = f"\n  and {rest} more" if rest > 0 else ""
    error = LaunchError(f"{what}:{listed}{more}")
    on_all_ranks(error)
    return error
