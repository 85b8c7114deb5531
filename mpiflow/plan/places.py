"""Places: which memory a plan has, what moves between them, and by which route ranks talk.

    host          kernels, MPI and HDF5 in one arena, "host"

    accelerator   kernels           arena "accelerator": the device's memory, space ""
                     ^  |
                 h2d |  | d2h       tasks that copy, on streams of their own
                     |  v
                  MPI, HDF5         arena "pinned": memory of the host that devices reach at once

A plan is made for one of these kinds of device. The route of what ranks send one another is that
of its task: `nccl` is started on the device, between its registers; `mpi` hands registers of the
device to an MPI that can take them; `staged` sends what copies have brought to pinned memory.
"""

from __future__ import annotations

HOST, ACCELERATOR = "host", "accelerator"
"""Kinds of devices; the arena of what kernels use has the same name."""
PINNED = "pinned"
"""The space, and the arena, that copies reach in the memory of the host."""
H2D, D2H = "h2d", "d2h"
"""Kinds of tasks that copy, and their streams: host to device, device to host."""
FEED = "h2d.read"
"""The stream of copies of what is read. It runs ahead of the step, as reads do."""
NCCL, CUDA_MPI, STAGED = "nccl", "mpi", "staged"
ROUTES = (NCCL, CUDA_MPI, STAGED)
AHEAD = ("read", FEED)
"""The streams that run ahead of the step."""


def arena_names(device: str) -> tuple[str, ...]:
    """The arenas of a plan for this kind of device, that of kernels first."""
    return (HOST,) if device == HOST else (ACCELERATOR, PINNED)


def arena_name(device: str, space: str) -> str:
    """The arena in which a space of registers lies."""
    return space or device


def workspace_space(route: str) -> str:
    """Where a task has its workspace: beside what it works on."""
    return PINNED if route == STAGED else ""
