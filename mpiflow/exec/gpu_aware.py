"""GPU-aware: whether the MPI library says that messages may be given memory of GPUs."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_VARIABLES = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "PSP_CUDA")


def takes_gpus(mpi: Any) -> bool:
    """Whether the library says that messages may be given memory of CUDA devices.

    By MPI 4.1's way to say so, by the functions that Open MPI, MPICH and Intel MPI have, or by the
    variables with which users of Cray's MPI, MVAPICH and ParaStation MPI ask for it.
    """
    info = mpi.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    asked = any(os.environ.get(name, "") == "1" for name in _VARIABLES)
    return "cuda" in kinds or asked or _asks_library()


def _asks_library() -> bool:
    """What `MPIX_Query_cuda_support` gives, of the library that this process has loaded."""
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line}
    for file in sorted(filter(os.path.exists, files)):  # none that was replaced meanwhile
        query = getattr(ctypes.CDLL(file), "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False
