"""Device: where a rank's arrays live and its kernels run."""

from __future__ import annotations

import importlib
import mmap
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpiflow.errors import PlanError
from mpiflow.exec.direct import DirectGroup, HostSide
from mpiflow.exec.segments import Call, HostStream, Stream
from mpiflow.exec.transport import Group, Message, Transport
from mpiflow.plan.places import HOST

if TYPE_CHECKING:
    from mpiflow.exec.hazards import Hazards

_LARGE_BYTES = 4 << 20
"""What has so many or more is in large pages, if the system has any."""


class Device(Protocol):
    """What the engine asks of the hardware of one rank."""

    kind: str
    """The kind that a plan is made for, see `plan.places`."""
    xp: Any
    """The array module of kernels."""
    hazards: Hazards | None
    """What checks every use of memory, if anything does."""

    def allocate(self, nbytes: int, space: str = "") -> Any:
        """Bytes of a space of `plan.places`, flat and aligned. Once an arena, never in a step."""

    def dtype(self, name: str) -> Any:
        """The array module's dtype of that name."""

    def stream(self, name: str, wake: Callable[[], None]) -> Stream:
        """What runs kernels beside the thread that submits them; see `exec.segments`.

        `wake` is called after each segment that somebody waits for, on any thread, unless the
        stream is `polled`.
        """

    def copier(self, target: Any, source: Any) -> Call:
        """A call for segments: copies an array to one of the other space, or of the same."""

    def message(self, message: Message) -> Call:
        """A call for segments: a collective, send or receive that is started on the device."""

    def fetch(self, array: Any) -> np.ndarray:
        """What an array of the device holds between steps, in one of the host of its own."""

    def fill(self, array: Any, values: np.ndarray) -> None:
        """Let an array of the device hold these values, between steps."""

    def advance(self) -> bool:
        """The host can do nothing now but wait for the device; whether it need not wait."""

    def group(self, transport: Transport, group: Group, members: tuple[int, ...]) -> Group:
        """Collective over all ranks. What tasks of route nccl use instead of the host's group."""

    def links(
        self,
        transport: Transport,
        group: Group,
        stages: Sequence[int],
        links: Sequence[tuple[int, int]],
    ) -> Group:
        """Collective over all ranks. The same for messages between stages.

        `stages` has that of each rank, `links` which stage sends to which.
        """

    def direct(self, group: Group) -> Group:
        """What tasks of route mpi use instead: the same group, given memory of the device."""

    def close(self) -> None:
        """Collective. Give back what groups have of the device."""

    def quiet(self) -> AbstractContextManager[Any]:
        """While it lasts, kernels that overflow or divide by zero give inf and nan in silence."""

    def process_bytes(self) -> int:
        """The most memory that this process has had so far."""


class InHostMemory:
    """What devices whose arrays are NumPy's have in common."""

    def group(self, transport: Transport, group: Group, members: tuple[int, ...]) -> Group:
        """One of its own: what devices start has an order of its own beside that of the host."""
        return transport.group(members, group.label)

    def links(
        self,
        transport: Transport,
        group: Group,
        stages: Sequence[int],
        links: Sequence[tuple[int, int]],
    ) -> Group:
        """One of its own, of all ranks."""
        return transport.group(tuple(range(transport.size)), group.label)

    def direct(self, group: Group) -> Group:
        """The same messages and sums as between devices."""
        return DirectGroup(group, HostSide())

    def close(self) -> None:
        """There is nothing to give back."""

    def quiet(self) -> AbstractContextManager[Any]:
        """Without NumPy's warnings."""
        return np.errstate(all="ignore")

    def process_bytes(self) -> int:
        """The high-water mark of resident memory."""
        return resident_bytes()


class Cpu(InHostMemory):
    """NumPy in the memory of the host."""

    kind: str = "host"
    xp: Any = np
    hazards: Hazards | None = None

    def allocate(self, nbytes: int, space: str = "") -> np.ndarray:
        """Zeroed bytes that begin at a page."""
        return host_bytes(nbytes)

    def dtype(self, name: str) -> np.dtype[Any]:
        """NumPy's dtype; bfloat16 comes from ml_dtypes."""
        return host_dtype(name)

    def stream(self, name: str, wake: Callable[[], None]) -> HostStream:
        """A thread."""
        return HostStream(name, self.quiet, wake)

    def copier(self, target: np.ndarray, source: np.ndarray) -> Call:
        """A copy; plans for the host have none."""
        return partial(np.copyto, target, source)

    def fetch(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array

    def fill(self, array: np.ndarray, values: np.ndarray) -> None:
        """Nothing to do where they are the same array."""
        np.copyto(array, values)

    def message(self, message: Message) -> Call:
        """No message is started on the device; `plan.verify` refuses such plans for the host."""
        raise NotImplementedError(type(self).__name__)

    def advance(self) -> bool:
        """Threads advance by themselves."""
        return False


def host_bytes(nbytes: int) -> np.ndarray:
    """Zeroed bytes of the host, in pages that hold nothing else."""
    try:
        memory = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise PlanError(
            f"the plan needs an arena of {nbytes} bytes, which this machine cannot give; plan"
            " for more ranks, or with a smaller batch"
        ) from None
    if nbytes >= _LARGE_BYTES:
        with suppress(OSError, AttributeError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


def host_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        try:
            importlib.import_module("ml_dtypes")
        except ImportError:
            raise PlanError(
                "the plan computes in bfloat16, which NumPy has from the package ml_dtypes;"
                " pip install 'mpiflow[bfloat16]'"
            ) from None
    return np.dtype(name)


def resident_bytes() -> int:
    """The most memory of this process so far, as the kernel counts it (in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a device is opened for: `kind` and `routes` of the plan, and how it was asked for.

    `seed` is for fake; `share`, several ranks on a GPU, and `strict` are for cuda.
    """

    kind: str
    routes: frozenset[str] = frozenset()
    seed: int | str = 0
    share: bool = False
    strict: bool = False


def open_device(name: str, wanted: Wanted, transport: Transport) -> Device:
    """Collective. The device of that name (cpu, fake, cuda).

    LaunchError where a rank has none.
    """
    if wanted.kind == HOST:
        return Cpu()
    if name == "fake":
        from mpiflow.exec.fake import Fake

        return Fake(wanted.seed)
    from mpiflow.exec.cuda_device import open_gpu

    return open_gpu(wanted, transport)
