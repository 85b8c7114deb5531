"""The cuda device: arenas, streams and copies of one GPU, on the calls of a driver.

    stream of the plan      stream of the GPU
    compute                 kernels, of the least priority
    h2d, d2h, h2d.read      copies between pinned memory and the GPU
    one a communicator      NCCL

The host submits segments and never waits: where a segment needs what another stream does, the GPU
waits for that stream's event. What the host itself waits for, such as a copy that MPI sends on, it
sees by the events that it polls.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiflow.errors import LaunchError, PlanError
from mpiflow.exec import cuda
from mpiflow.exec.cuda_arrays import Arrays
from mpiflow.exec.cuda_driver import Driver
from mpiflow.exec.device import Wanted, host_dtype, resident_bytes
from mpiflow.exec.direct import DirectGroup
from mpiflow.exec.nccl import NcclGroup, NcclStages
from mpiflow.exec.placement import shared_gpus, take_gpu
from mpiflow.exec.proof import prove
from mpiflow.exec.segments import Call, Events, Segment, task_at
from mpiflow.exec.transport import Group, Message, Request, Transport, on_all_ranks
from mpiflow.plan.places import ACCELERATOR, CUDA_MPI, NCCL, PINNED
from mpiflow.plan.records import COMPUTE, Task

if TYPE_CHECKING:
    from mpiflow.exec.hazards import Hazards

_LEAST_PRIORITY, _HIGHER_PRIORITY = 0, -1
"""What moves data goes before kernels, as others wait for it."""
_LOOKS = 1024
"""How often the host finds nothing to do between two questions to NCCL whether it failed."""


def open_gpu(wanted: Wanted, transport: Transport) -> CudaDevice:
    """Collective. The GPU of this rank; LaunchError where a rank has none, or none for itself."""
    driver = cuda.load()
    shared = shared_gpus(take_gpu(transport, driver, os.environ, share=wanted.share))
    if shared and NCCL in wanted.routes:
        ranks = ", ".join(str(placement.rank) for placement in shared[0])
        raise on_all_ranks(
            LaunchError(
                f"ranks {ranks} share a GPU, which NCCL refuses; make the plan with --route staged"
            )
        )
    device = CudaDevice(driver, strict=wanted.strict)
    if CUDA_MPI in wanted.routes:
        prove(transport, device)
    return device


class CudaStream:
    """A stream of the GPU; see `exec.segments.Stream`.

    `seconds` counts from when it has something to do until the host sees that it has no more.
    """

    polled = True

    def __init__(self, driver: Driver, name: str, *, strict: bool = False) -> None:
        """`strict`: a segment that was done before may not allocate, nor wait for the GPU."""
        self._driver, self._strict = driver, strict
        self._known: set[int] = set()
        priority = _LEAST_PRIORITY if name == COMPUTE else _HIGHER_PRIORITY
        self._handle = driver.stream(priority)
        self._done = 0
        self.failure: tuple[Task, BaseException] | None = None
        self.seconds = self.ended = 0.0
        self.thread: int | None = None
        self._pending: deque[tuple[Any, Segment]] = deque()
        self._idle: list[Any] = []
        self._began = 0.0
        self._owner = threading.get_ident()

    @property
    def submitted(self) -> int:
        """Those that are seen to be done, and the others."""
        return self._done + len(self._pending)

    def submit(self, segment: Segment, after: Events = ()) -> None:
        """Give the GPU its calls, behind the events of what they need."""
        if not self._pending:
            self._began = time.perf_counter()
        for stream, count in after:
            assert isinstance(stream, CudaStream)
            event = stream.event(count)
            if event is not None:
                self._driver.wait(self._handle, event)
        with self._driver.on(self._handle), self._care(segment):
            calls = iter(segment.calls)
            try:
                for call in calls:
                    call()
            except Exception as error:
                self.failure = task_at((segment, calls)), error
                return
        event = self._idle.pop() if self._idle else self._driver.event()
        self._driver.record(event, self._handle)
        self._pending.append((event, segment))

    def _care(self, segment: Segment) -> AbstractContextManager[Any]:
        """What a segment is submitted within."""
        if not self._strict:
            return nullcontext()
        known = id(segment) in self._known  # segments are bound once, and live as long as streams
        self._known.add(id(segment))
        return self._driver.strict() if known else nullcontext()

    def event(self, count: int) -> Any:
        """The event behind so many segments; None where they are done, or never will be."""
        place = count - self._done - 1
        return self._pending[place][0] if 0 <= place < len(self._pending) else None

    @property
    def done(self) -> int:
        """How many segments are done; only the thread that submits asks the GPU."""
        if threading.get_ident() != self._owner:
            return self._done
        while self._pending and self._is_done(*self._pending[0]):
            event, _ = self._pending.popleft()
            self._idle.append(event)  # may be recorded again: who waits for it is waiting already
            self._done += 1
            if not self._pending:
                self.ended = time.perf_counter()
                self.seconds += self.ended - self._began
        return self._done

    def _is_done(self, event: Any, segment: Segment) -> bool:
        """Whether the GPU has come to an event; what it failed in was behind the one before."""
        try:
            return self._driver.is_done(event)
        except Exception as error:
            self.failure = self.failure or (segment.tasks[0], error)
            return False

    def task(self) -> Task | None:
        """The first task of the oldest segment that is not seen to be done."""
        try:
            return self._pending[0][1].tasks[0]
        except IndexError:  # it has ended meanwhile, on the other thread
            return None

    def clock(self) -> float:
        """The time, when the GPU has done all that it was given; the host waits for it."""
        event = self._driver.event()
        self._driver.record(event, self._handle)
        self._driver.finish(event)
        return time.perf_counter()

    def close(self) -> None:
        """Forget what was submitted."""
        self._pending.clear()


class _Marked(Request):
    """Done when the GPU has come to an event, which is then free again."""

    def __init__(self, driver: Driver, event: Any, idle: list[Any]) -> None:
        self._driver, self._event, self._idle = driver, event, idle

    def test(self) -> bool:
        """Whether it has."""
        if self._event is not None:
            if not self._driver.is_done(self._event):
                return False
            self._idle.append(self._event)
            self._event = None
        return True


class CudaSide:
    """What a GPU does between messages of MPI; see `exec.direct.Side`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._stream = driver.stream(_HIGHER_PRIORITY)
        self._idle: list[Any] = []
        self.pending = False

    def copy(self, target: Any, source: Any) -> None:
        """A kernel."""
        self.pending = True
        with self._driver.on(self._stream):
            self._driver.arrays.copyto(target, source)

    def combine(self, ufunc: str, x: Any, y: Any, out: Any) -> None:
        """A kernel."""
        self.pending = True
        with self._driver.on(self._stream):
            getattr(self._driver.arrays, ufunc)(x, y, out=out)

    def mark(self) -> Request:
        """An event."""
        self.pending = False
        event = self._idle.pop() if self._idle else self._driver.event()
        self._driver.record(event, self._stream)
        return _Marked(self._driver, event, self._idle)


class CudaDevice:
    """One GPU, which the driver uses."""

    kind: str = ACCELERATOR
    hazards: Hazards | None = None

    def __init__(self, driver: Driver, *, strict: bool = False) -> None:
        self.driver, self._strict = driver, strict
        self.xp: Any = Arrays(driver)
        self._groups: list[NcclGroup | NcclStages] = []
        self._looks = 0

    def allocate(self, nbytes: int, space: str = "") -> Any:
        """Zeroed bytes of the GPU, or pinned ones of the host."""
        if space == PINNED:
            return self.driver.allocate_pinned(nbytes)
        return self.driver.allocate(nbytes)

    def dtype(self, name: str) -> np.dtype[Any]:
        """CuPy's dtypes are NumPy's; bfloat16 comes from ml_dtypes in both."""
        return host_dtype(name)

    def stream(self, name: str, wake: Callable[[], None]) -> CudaStream:
        """A stream of the GPU, which wakes nobody."""
        return CudaStream(self.driver, name, strict=self._strict)

    def copier(self, target: Any, source: Any) -> Call:
        """A call for segments, which copies a whole array to the other memory."""
        if not (target.flags.c_contiguous and source.flags.c_contiguous):
            raise PlanError(
                f"a copy of {source.shape} to {target.shape} between host and device is not of"
                " contiguous memory"
            )
        return partial(self.driver.copy, target, source)

    def message(self, message: Message) -> Call:
        """A call for segments, which gives the stream all that the message does, in order."""
        return partial(_begin_and_end, message)

    def group(self, transport: Transport, group: Group, members: tuple[int, ...]) -> Group:
        """Collective over all ranks. A communicator of NCCL."""
        made = NcclGroup(transport, self.driver, members, group.label)
        self._groups.append(made)
        return made

    def links(
        self,
        transport: Transport,
        group: Group,
        stages: Sequence[int],
        links: Sequence[tuple[int, int]],
    ) -> Group:
        """Collective over all ranks. A communicator of NCCL for each link."""
        made = NcclStages(transport, self.driver, stages, links)
        self._groups.append(made)
        return made

    def direct(self, group: Group) -> Group:
        """The group of the host, with a stream for what the GPU does between its messages."""
        return DirectGroup(group, CudaSide(self.driver))

    def close(self) -> None:
        """Collective. Give back the communicators."""
        for group in self._groups:
            group.free()
        self._groups.clear()

    def fetch(self, array: Any) -> np.ndarray:
        """What an array holds between steps."""
        return array if type(array) is np.ndarray else self.driver.fetch(array)

    def fill(self, array: Any, values: np.ndarray) -> None:
        """Let an array hold these values, between steps."""
        self.driver.fill(array, values)

    def advance(self) -> bool:
        """The GPU advances by itself; what NCCL does beside it may have failed."""
        self._looks += 1
        if self._looks % _LOOKS == 0:
            for group in self._groups:
                group.check()
        return False

    def quiet(self) -> AbstractContextManager[Any]:
        """A GPU gives inf and nan in silence; scalars of the host do not."""
        return np.errstate(all="ignore")

    def process_bytes(self) -> int:
        """The high-water mark of resident memory of the host."""
        return resident_bytes()


def _begin_and_end(message: Message) -> None:
    message.start()
    message.test()  # puts what has come in its place, behind it on the stream
