"""Device: where a rank's arrays live and its kernels run."""

from __future__ import annotations

import importlib
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from mpiflow.errors import LaunchError, PlanError
from mpiflow.exec.segments import HostStream, Stream
from mpiflow.plan.places import HOST

_ALIGNMENT = 64
"""Bytes: a cache line."""


class Device(Protocol):
    """What the engine asks of the hardware of one rank."""

    kind: str
    """The kind that a plan is made for, see `plan.places`."""
    xp: Any
    """The array module of kernels."""

    def allocate(self, nbytes: int) -> Any:
        """Zeroed bytes, flat and aligned. Called once an arena, never in a step."""

    def dtype(self, name: str) -> Any:
        """The array module's dtype of that name."""

    def stream(self, name: str, wake: Callable[[], None]) -> Stream:
        """What runs kernels beside the thread that submits them; see `exec.segments`.

        `wake` is called after each segment that somebody waits for, on any thread.
        """

    def quiet(self) -> AbstractContextManager[Any]:
        """While it lasts, kernels that overflow or divide by zero give inf and nan in silence."""

    def process_bytes(self) -> int:
        """The most memory that this process has had so far."""


class Cpu:
    """NumPy in the memory of the host."""

    kind: str = "host"
    xp: Any = np

    def allocate(self, nbytes: int) -> np.ndarray:
        """Zeroed bytes that begin at a cache line."""
        try:
            memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        except MemoryError:
            raise PlanError(
                f"the plan needs an arena of {nbytes} bytes, which this machine cannot give; plan"
                " for more ranks, or with a smaller batch"
            ) from None
        first = -memory.ctypes.data % _ALIGNMENT
        return memory[first : first + nbytes]

    def dtype(self, name: str) -> np.dtype[Any]:
        """NumPy's dtype; bfloat16 comes from ml_dtypes."""
        if name == "bfloat16":
            try:
                importlib.import_module("ml_dtypes")
            except ImportError:
                raise PlanError(
                    "the plan computes in bfloat16, which NumPy has from the package ml_dtypes;"
                    " pip install 'mpiflow[bfloat16]'"
                ) from None
        return np.dtype(name)

    def stream(self, name: str, wake: Callable[[], None]) -> HostStream:
        """A thread."""
        return HostStream(name, self.quiet, wake)

    def quiet(self) -> AbstractContextManager[Any]:
        """Without NumPy's warnings."""
        return np.errstate(all="ignore")

    def process_bytes(self) -> int:
        """The high-water mark of resident memory, as the kernel counts it (in KiB on Linux)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def open_device(name: str, kind: str) -> Device:
    """The device of that name (cpu, fake, cuda), for a plan of that kind.

    LaunchError where this rank has none, or mpiflow cannot run such a plan.
    """
    if name == "cpu" and kind == HOST:
        return Cpu()
    if name == "cuda":
        _find_gpu()
    raise LaunchError(
        f"the plan is for device {kind!r}; this mpiflow proves, prices and simulates such plans,"
        " and runs only those for the host: make the plan with --device cpu"
    )


def _find_gpu() -> None:
    """LaunchError, which says what was looked for, where there is no GPU that CuPy can use."""
    wanted = "--device cuda needs the Python package cupy, and a GPU that it can use: "
    instead = "; start the ranks where there is one, or make the plan with --device cpu"
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise LaunchError(f"{wanted}cupy cannot be imported ({error}){instead}") from error
    if not cupy.cuda.is_available():
        version = cupy.cuda.runtime.driverGetVersion()
        raise LaunchError(
            f"{wanted}cupy {cupy.__version__} is here and finds no GPU (version of the driver:"
            f" {version or 'there is none'}){instead}"
        )
