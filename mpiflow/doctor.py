"""Doctor: what mpiflow needs of this machine, and what it finds."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpiflow.plan.text import size_text
from mpiflow.threads import usable_cpus
from mpiflow.version import __version__

_OLDEST = {"numpy": (1, 26), "h5py": (3, 10), "mpi4py": (4, 1)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at; `advice` says what to do where it is not well."""

    what: str
    found: str
    ok: bool = True
    advice: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"{'ok' if self.ok else 'NO':4}{self.what:12}{self.found}"
        return text if self.ok else f"{text}\n{' ' * 16}{self.advice}"


def examine() -> list[Finding]:
    """Everything that a run needs, in the order in which a start would stumble over it."""
    python = sys.version_info >= (3, 11)
    return [
        Finding("mpiflow", f"{__version__} in {Path(__file__).parent}"),
        Finding("Python", platform.python_version(), python, "install Python 3.11 or later"),
        *(_package(name, oldest) for name, oldest in _OLDEST.items()),
        _mpi(),
        _launcher(),
        _threads(),
        _disk(),
    ]


def _package(name: str, oldest: tuple[int, ...]) -> Finding:
    wanted = ".".join(map(str, oldest))
    try:
        version = importlib.import_module(name).__version__
    except ImportError as error:
        return Finding(name, str(error), False, f"pip install '{name}>={wanted}'")
    found = tuple(int(part) for part in version.split(".")[: len(oldest)])
    return Finding(name, version, found >= oldest, f"pip install --upgrade '{name}>={wanted}'")


def _mpi() -> Finding:
    """Asked of a process of its own, as the MPI library may end the one that loads it."""
    code = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0][:70])"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "OMPI_", "PMIX_"))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=clean
        )
    except subprocess.TimeoutExpired:
        return Finding("MPI", "did not start within 60 s", False, "try it under mpiexec -n 1")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("MPI", last, False, "pip install 'mpiflow[mpi]', or load the site's MPI")
    return Finding("MPI", done.stdout.strip())


def _launcher() -> Finding:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec") or shutil.which("srun")
    return Finding(
        "launcher",
        found or "neither mpiexec nor srun",
        found is not None,
        "pip install 'mpiflow[mpi]' brings mpiexec; on a cluster load its MPI or use srun",
    )


def _threads() -> Finding:
    limit = os.environ.get("OMP_NUM_THREADS", "not set")
    return Finding("CPUs", f"{usable_cpus()} usable, OMP_NUM_THREADS {limit}")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    writable = os.access(Path.cwd(), os.W_OK)
    return Finding(
        "folder",
        f"{Path.cwd()}: {size_text(free)} free" + ("" if writable else ", not writable"),
        writable,
        "runs are written below the current folder, or where --out says",
    )
