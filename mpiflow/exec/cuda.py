"""CUDA, cuBLAS and NCCL through CuPy: the only file that imports it, and only where it is used.

Everything that mpiflow asks of a GPU is a method of `CupyDriver`, the `Driver` of
`exec.cuda_driver`. None of them waits for the GPU but those that make something, before the first
step.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from mpiflow.errors import LaunchError, PlanError
from mpiflow.exec.cuda_driver import Gpu
from mpiflow.exec.cuda_gemm import Product

_PLAIN, _TRANSPOSED = 0, 1
_DEFAULT_ALGORITHM = -1
_NOT_READY = 600
"""cudaErrorNotReady."""
_COMPUTE_FLOAT32, _COMPUTE_FLOAT64 = 68, 70
_GEMM_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
"""cudaDataType."""
_NCCL_TYPES = {
    "bool": "UINT8", "uint8": "UINT8", "int32": "INT32", "int64": "INT64", "uint32": "UINT32",
    "uint64": "UINT64", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32",
    "float64": "FLOAT64",
}  # fmt: skip
_NCCL_REDUCTIONS = {"sum": "NCCL_SUM", "max": "NCCL_MAX"}


def load() -> CupyDriver:
    """CuPy with at least one GPU; LaunchError, which says what was looked for, where there is none.

    The libraries that CuPy needs for it are tried too, as CuPy looks for each when it is used.
    """
    wanted = "--device cuda needs the Python package cupy, and a GPU that it can use: "
    instead = "; start the ranks where there is one, or make the plan with --device cpu"
    # So that the number of a GPU is the same in all tools of a host.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Streams that share a queue of the hardware wait for each other: with the default of 8, a
    # receive of NCCL could keep back what the other end waits for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
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
    try:
        cublas = importlib.import_module("cupy_backends.cuda.libs.cublas")
    except ImportError as error:
        raise LaunchError(
            f"{wanted}cupy {cupy.__version__} finds no cuBLAS ({error}); pip install"
            " 'cupy-cuda12x[ctk]' (or 13x), or load the CUDA module of the site"
        ) from error
    return CupyDriver(cupy, cublas)


class CupyDriver:
    """One GPU through CuPy."""

    def __init__(self, cupy: Any, cublas: Any) -> None:
        self.arrays = cupy
        self._cuda, self._runtime, self._cublas = cupy.cuda, cupy.cuda.runtime, cublas
        self._strict = False
        self._one = {name: np.ones((), name) for name in ("float32", "float64")}
        self._zero = {name: np.zeros((), name) for name in ("float32", "float64")}

    def count(self) -> int:
        """How many GPUs this process sees."""
        return self._runtime.getDeviceCount()

    def gpu(self, index: int) -> Gpu:
        """One of them."""
        properties = self._runtime.getDeviceProperties(index)
        # CuPy cuts a UUID at its first zero byte, and parts of one GPU (MIG) have one bus id.
        uuid = f"{bytes(properties['uuid']).hex()} {self._runtime.deviceGetPCIBusId(index)}"
        return Gpu(properties["name"].decode(), uuid, properties["totalGlobalMem"])

    def use(self, index: int) -> None:
        """Make all that follows on this GPU, scratch memory from a pool of its own."""
        self._runtime.setDevice(index)
        self._pool = self._cuda.MemoryPool()
        self._cuda.set_allocator(self._scratch)
        self._handle = self._cuda.device.get_cublas_handle()

    def _scratch(self, nbytes: int) -> Any:
        """Memory that a kernel of CuPy asks for; it is used again in the order of its stream."""
        if not self._strict:
            return self._pool.malloc(nbytes)
        before = self._pool.total_bytes()
        memory = self._pool.malloc(nbytes)
        if self._pool.total_bytes() > before:
            raise PlanError(
                f"a kernel asked the GPU for {nbytes} bytes in a step; the plan gives it all that"
                " it may use"
            )
        return memory

    def allocate(self, nbytes: int) -> Any:
        """Zeroed bytes of the GPU, by a plain allocation."""
        cupy = self.arrays
        try:
            memory = self._cuda.Memory(max(nbytes, 1))
        except self._runtime.CUDARuntimeError as error:
            free, total = self._runtime.memGetInfo()
            raise PlanError(
                f"the plan needs an arena of {nbytes:,} bytes, of which the GPU gives {free:,}"
                f" (it has {total:,}); plan for more ranks, with --memory, or a smaller batch"
            ) from error
        array = cupy.ndarray((nbytes,), cupy.uint8, self._cuda.MemoryPointer(memory, 0))
        array.fill(0)
        self._runtime.deviceSynchronize()
        return array

    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        """Zeroed bytes of the host that cannot be swapped out."""
        try:
            memory = self._cuda.PinnedMemory(max(nbytes, 1))
        except self._runtime.CUDARuntimeError as error:
            raise PlanError(
                f"the plan needs a pinned arena of {nbytes:,} bytes, which this host cannot give"
                f" ({error}); see ulimit -l, or plan with a smaller batch"
            ) from error
        pointer = self._cuda.PinnedMemoryPointer(memory, 0)
        array = np.frombuffer(pointer, np.uint8, nbytes)
        array.fill(0)
        return array

    def stream(self, priority: int) -> Any:
        """A stream that does not wait for the default one."""
        return self._cuda.Stream(non_blocking=True, priority=priority)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """While it lasts, kernels go to this stream."""
        return stream

    def event(self) -> Any:
        """An event without a clock."""
        return self._cuda.Event(disable_timing=True)

    def record(self, event: Any, stream: Any) -> None:
        """Let the event mark what the stream has been given so far."""
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from now on waits for the event, on the GPU."""
        stream.wait_event(event)

    def is_done(self, event: Any) -> bool:
        """Whether everything that the event marks is done; raises what has gone wrong before it."""
        # Not `event.done`, which is False for ever after an error.
        status = self._runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return status == 0

    def finish(self, event: Any) -> None:
        """Wait, on the host, until everything that the event marks is done: not in steady steps."""
        event.synchronize()

    @property
    def _stream(self) -> int:
        """The stream of `on`."""
        return self._cuda.get_current_stream().ptr

    def copy(self, target: Any, source: Any) -> None:
        """Copy between pinned memory and the GPU, or on it."""
        kinds = {
            (True, False): self._runtime.memcpyHostToDevice,
            (False, True): self._runtime.memcpyDeviceToHost,
            (False, False): self._runtime.memcpyDeviceToDevice,
        }
        kind = kinds[isinstance(source, np.ndarray), isinstance(target, np.ndarray)]
        if source.nbytes:
            self._runtime.memcpyAsync(
                _address(target), _address(source), source.nbytes, kind, self._stream
            )

    def fetch(self, array: Any) -> np.ndarray:
        """A copy in the memory of the host; waits for all before it."""
        self._runtime.deviceSynchronize()
        return array.get()

    def fill(self, array: Any, values: np.ndarray) -> None:
        """Copy values of the host to an array of the GPU; waits until they are there."""
        array.set(values)
        self._runtime.deviceSynchronize()

    def multiply(self, product: Product, out: Any, left: Any, right: Any) -> None:
        """The product by cuBLAS, on the current stream; it takes matrices in column order.

        16-bit floats go to tensor cores and are summed in float32, which the result may be in;
        float32 is never cut to TF32.
        """
        if product.exchanged:
            left, right = right, left
        taken, made = _GEMM_TYPES[left.dtype.name], _GEMM_TYPES[out.dtype.name]
        wide = "float64" if out.dtype.name == "float64" else "float32"
        compute = _COMPUTE_FLOAT64 if wide == "float64" else _COMPUTE_FLOAT32
        one, zero = self._one[wide].ctypes.data, self._zero[wide].ctypes.data
        a, b, c = product.left, product.right, product.out
        turned = [_TRANSPOSED if operand.turned else _PLAIN for operand in (b, a)]
        for starts in product.starts:
            first, second, target = (
                array.data.ptr + start * array.itemsize
                for array, start in zip((left, right, out), starts, strict=True)
            )
            if product.count == 1:
                self._cublas.gemmEx(
                    self._handle, turned[0], turned[1], product.n, product.m, product.k,
                    one, second, taken, b.leading, first, taken, a.leading,
                    zero, target, made, c.leading, compute, _DEFAULT_ALGORITHM,
                )  # fmt: skip
                continue
            self._cublas.gemmStridedBatchedEx(
                self._handle, turned[0], turned[1], product.n, product.m, product.k,
                one, second, taken, b.leading, b.step, first, taken, a.leading, a.step,
                zero, target, made, c.leading, c.step,
                product.count, compute, _DEFAULT_ALGORITHM,
            )  # fmt: skip

    @contextmanager
    def strict(self) -> Iterator[None]:
        """While it lasts, a kernel that allocates or waits for the GPU raises."""
        allow = importlib.import_module("cupyx").allow_synchronize
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it may go, and sees only what CuPy does
            forbidden = allow(False)
            forbidden.__enter__()
        self._strict = True
        try:
            yield
        finally:
            self._strict = False
            forbidden.__exit__(None, None, None)

    @property
    def _nccl(self) -> Any:
        try:
            return importlib.import_module("cupy_backends.cuda.libs.nccl")
        except ImportError as error:
            raise LaunchError(
                "the plan's ranks reach one another by NCCL, which cupy does not find"
                f" ({error}); pip install nvidia-nccl-cu12 (or cu13), or plan with --route staged"
            ) from error

    def unique_id(self) -> bytes:
        """128 bytes."""
        return self._nccl.get_unique_id()

    def communicator(self, size: int, unique_id: bytes, index: int) -> Any:
        """Collective. Join a communicator of NCCL."""
        return self._nccl.NcclCommunicator(size, unique_id, index)

    @contextmanager
    def group(self) -> Iterator[None]:
        """What is started while it lasts is started as one."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def all_reduce(self, comm: Any, out: Any, source: Any, reduce: str) -> None:
        """Collective. The sum or maximum of what all have."""
        comm.allReduce(
            _address(source),
            _address(out),
            out.size,
            self._type(out),
            self._op(reduce),
            self._stream,
        )

    def reduce(self, comm: Any, out: Any, source: Any, reduce: str, root: int) -> None:
        """Collective. The sum or maximum of what all have, at member `root`."""
        kind, op = self._type(source), self._op(reduce)
        comm.reduce(_address(source), _address(out), source.size, kind, op, root, self._stream)

    def broadcast(self, comm: Any, out: Any, source: Any, root: int) -> None:
        """Collective. What member `root` has."""
        comm.broadcast(
            _address(source), _address(out), out.size, self._type(out), root, self._stream
        )

    def all_gather(self, comm: Any, out: Any, source: Any) -> None:
        """Collective. What all have, equally much each."""
        kind = self._type(source)
        comm.allGather(_address(source), _address(out), source.size, kind, self._stream)

    def reduce_scatter(self, comm: Any, out: Any, source: Any, reduce: str) -> None:
        """Collective. Part i of the sum or maximum at member i."""
        comm.reduceScatter(
            _address(source),
            _address(out),
            out.size,
            self._type(out),
            self._op(reduce),
            self._stream,
        )

    def send(self, comm: Any, source: Any, peer: int) -> None:
        """To member `peer`."""
        comm.send(_address(source), source.size, self._type(source), peer, self._stream)

    def receive(self, comm: Any, out: Any, peer: int) -> None:
        """From member `peer`."""
        comm.recv(_address(out), out.size, self._type(out), peer, self._stream)

    def error(self, comm: Any) -> str:
        """What went wrong in a communicator; CuPy raises where there is something."""
        try:
            comm.check_async_error()
        except self._nccl.NcclError as error:
            return str(error)
        return ""

    def abort(self, comm: Any) -> None:
        """End what is under way in a communicator, and the communicator."""
        comm.abort()

    def destroy(self, comm: Any) -> None:
        """Give back a communicator in which nothing is under way."""
        comm.destroy()

    def _type(self, array: Any) -> int:
        return getattr(self._nccl, f"NCCL_{_NCCL_TYPES[array.dtype.name]}")

    def _op(self, reduce: str) -> int:
        return getattr(self._nccl, _NCCL_REDUCTIONS[reduce])


def _address(array: Any) -> int:
    """Where an array begins, in either memory."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
