"""Driver: the calls that the cuda device makes of CUDA, cuBLAS and NCCL, and no others.

`exec.cuda` makes them through CuPy. A stand-in for it records them in the tests, so that what is
asked of a GPU, and in which order, is known where there is none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpiflow.exec.cuda_gemm import Product


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process sees: its name, the UUID that no other has, and its memory."""

    name: str
    uuid: str
    nbytes: int


class Driver(Protocol):
    """One GPU, from one thread. Streams, events and communicators are opaque handles.

    Copies, products and what NCCL does go to the stream of `on`, as kernels do.
    """

    arrays: Any
    """CuPy, or what stands in for it."""

    def count(self) -> int:
        """How many GPUs this process sees."""

    def gpu(self, index: int) -> Gpu:
        """One of them."""

    def use(self, index: int) -> None:
        """Make all that follows, on the thread that calls, on this GPU."""

    def allocate(self, nbytes: int) -> Any:
        """An array of zeroed bytes in the memory of the GPU, by an allocation of its own."""

    def allocate_pinned(self, nbytes: int) -> Any:
        """A NumPy array of zeroed bytes that the GPU copies to and from by itself."""

    def stream(self, priority: int) -> Any:
        """A stream that does not wait for the default one; lower priorities are served first."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """While it lasts, kernels go to this stream."""

    def event(self) -> Any:
        """An event, which marks a place in a stream once it is recorded."""

    def record(self, event: Any, stream: Any) -> None:
        """Let the event mark what the stream has been given so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from now on waits for the event, on the GPU."""

    def is_done(self, event: Any) -> bool:
        """Whether everything that the event marks is done; raises what has gone wrong before it."""

    def finish(self, event: Any) -> None:
        """Wait, on the host, until everything that the event marks is done: not in steady steps."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy between pinned memory and the GPU, or on it; arrays that are alike, contiguous."""

    def fetch(self, array: Any) -> np.ndarray:
        """A copy of an array of the GPU in the memory of the host; waits for all before it."""

    def fill(self, array: Any, values: np.ndarray) -> None:
        """Copy values of the host to an array of the GPU; waits until they are there."""

    def multiply(self, product: Product, out: Any, left: Any, right: Any) -> None:
        """The product by cuBLAS."""

    def strict(self) -> AbstractContextManager[Any]:
        """While it lasts, a kernel that allocates or waits for the GPU raises."""

    def unique_id(self) -> bytes:
        """What the members of a new communicator of NCCL find each other by."""

    def communicator(self, size: int, unique_id: bytes, index: int) -> Any:
        """Collective. Join a communicator of NCCL."""

    def group(self) -> AbstractContextManager[Any]:
        """What is started while it lasts is started as one."""

    def all_reduce(self, comm: Any, out: Any, source: Any, reduce: str) -> None:
        """Collective. The sum or maximum of what all have; flat arrays, as in those below."""

    def reduce(self, comm: Any, out: Any, source: Any, reduce: str, root: int) -> None:
        """Collective. The same at member `root`; `out` counts there alone."""

    def broadcast(self, comm: Any, out: Any, source: Any, root: int) -> None:
        """Collective. What member `root` has; `source` counts there alone."""

    def all_gather(self, comm: Any, out: Any, source: Any) -> None:
        """Collective. What all have, equally much each, in the order of the members."""

    def reduce_scatter(self, comm: Any, out: Any, source: Any, reduce: str) -> None:
        """Collective. Part i of the sum or maximum at member i; parts are equal."""

    def send(self, comm: Any, source: Any, peer: int) -> None:
        """To member `peer`, which receives it in the same order."""

    def receive(self, comm: Any, out: Any, peer: int) -> None:
        """From member `peer`."""

    def error(self, comm: Any) -> str:
        """What went wrong in a communicator beside this thread; empty if nothing did."""

    def abort(self, comm: Any) -> None:
        """End what is under way in a communicator, and the communicator."""

    def destroy(self, comm: Any) -> None:
        """Give back a communicator in which nothing is under way."""
