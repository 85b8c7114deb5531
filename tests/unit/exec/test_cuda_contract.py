"""What mpiflow calls of CuPy, cuBLAS and NCCL is in the installed CuPy, with those arguments.

None of it needs a GPU, nor the libraries of CUDA: CuPy's modules for them hold the signatures of
their functions as text.
"""

import ast
import inspect
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpiflow.errors import LaunchError
from mpiflow.exec import cuda, cuda_arrays
from mpiflow.exec.cuda_driver import Driver

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of libraries that are not installed
    cupy = pytest.importorskip("cupy", reason="cupy is not installed: pip install cupy-cuda12x")

SOURCE = Path(cuda.__file__).read_text()


def signatures(module):
    """The signatures that a compiled module of CuPy holds, by name."""
    import cupy_backends

    folder = Path(cupy_backends.__file__).parent / "cuda" / "libs"
    (file,) = folder.glob(f"{module}.*.so")
    found = {}
    for text in re.findall(rb"([A-Za-z_.]+\([ -\'*-~]*\))", file.read_bytes()):
        name, _, arguments = text.decode().rstrip(")").partition("(")
        found.setdefault(name.removeprefix("NcclCommunicator."), arguments.split(", "))
    return found


def calls_of(owner):
    """In exec/cuda.py: how many arguments each method of `owner` is given."""
    found = {}
    for node in ast.walk(ast.parse(SOURCE)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if ast.unparse(node.func.value) == owner:
            found[node.func.attr] = len(node.args) + len(node.keywords)
    return found


@pytest.mark.parametrize("name", cuda_arrays.FORWARDED)
def test_cupy_has_what_is_forwarded(name):
    if name == "divmod":
        assert (cupy.divmod.nin, cupy.divmod.nout) == (2, 2)
    elif name in cuda_arrays.UFUNCS:
        assert isinstance(getattr(cupy, name), cupy.ufunc)
        assert getattr(cupy, name).nout == 1
    assert hasattr(cupy, name)


def test_what_is_wrapped_has_the_keywords_that_are_used():
    assert {"casting", "where"} <= inspect.signature(cupy.copyto).parameters.keys()
    assert {"mode"} <= inspect.signature(cupy.put).parameters.keys()
    assert [*inspect.signature(cupy.max).parameters] == ["a", "axis", "out", "keepdims"]
    assert {"axis", "out"} <= inspect.signature(cupy.argmax).parameters.keys()
    for ufunc in (cupy.add, cupy.multiply, cupy.maximum):
        assert isinstance(ufunc, cupy.ufunc)
    assert cupy.ndarray.sum.__doc__.startswith(
        "_ndarray_base.sum(self, axis=None, dtype=None, out=None, keepdims=False)"
    )
    assert cupy.ndarray.cumsum.__doc__.startswith(
        "_ndarray_base.cumsum(self, axis=None, dtype=None, out=None)"
    )


def test_ufuncs_know_no_keyword_of_numpys_that_is_wrapped():
    with pytest.raises(TypeError, match="Wrong arguments"):
        cupy.add(1, 2, where=True)
    assert "mode" not in inspect.signature(cupy.take).parameters
    assert not hasattr(cupy, "vecdot")


def test_the_runtime_has_the_functions_that_are_called():
    calls = calls_of("self._runtime")
    assert {"getDeviceCount", "memcpyAsync", "setDevice"} <= calls.keys()
    for name, count in calls.items():
        called = getattr(cupy.cuda.runtime, name)
        if isinstance(called, type):
            continue
        text = called.__doc__
        arguments = [a for a in text[text.index("(") + 1 : text.index(")")].split(", ") if a]
        assert len(arguments) == count, f"{name}: {text}"
    for constant in ("memcpyHostToDevice", "memcpyDeviceToHost", "memcpyDeviceToDevice"):
        assert isinstance(getattr(cupy.cuda.runtime, constant), int)
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, Exception)


@pytest.mark.parametrize(("status", "done"), [(0, True), (600, False)])
def test_an_event_is_done_or_not(status, done):
    driver = cuda.CupyDriver(cupy, None)
    driver._runtime = SimpleNamespace(eventQuery=lambda pointer: status)
    assert driver.is_done(SimpleNamespace(ptr=7)) is done


def test_an_event_tells_what_has_gone_wrong():
    driver = cuda.CupyDriver(cupy, None)
    runtime = cupy.cuda.runtime
    driver._runtime = SimpleNamespace(
        eventQuery=lambda pointer: 700, CUDARuntimeError=runtime.CUDARuntimeError
    )
    with pytest.raises(runtime.CUDARuntimeError, match="an illegal memory access"):
        driver.is_done(SimpleNamespace(ptr=7))


def test_memory_streams_and_events_have_what_is_used():
    assert "Memory(size_t size)" in cupy.cuda.Memory.__doc__
    assert "size" in cupy.cuda.PinnedMemory.__doc__
    stream = inspect.signature(cupy.cuda.Stream.__init__)
    assert {"non_blocking", "priority"} <= stream.parameters.keys()
    assert hasattr(cupy.cuda.Stream, "wait_event")
    assert "disable_timing" in cupy.cuda.Event.__doc__
    assert "ptr" in cupy.cuda.Event.__doc__
    assert hasattr(cupy.cuda.Event, "record")
    for name in ("MemoryPool", "MemoryPointer", "PinnedMemoryPointer", "set_allocator"):
        assert hasattr(cupy.cuda, name)
    assert callable(cupy.cuda.device.get_cublas_handle)


def test_a_strict_step_is_entered_and_left_without_a_warning():
    driver = cuda.CupyDriver(cupy, None)
    with driver.strict():
        pass


def test_cublas_takes_the_products_that_it_is_given():
    arguments = signatures("cublas")["gemmStridedBatchedEx"]
    assert [a.split()[-1] for a in arguments] == [
        "handle", "transa", "transb", "m", "n", "k", "alpha", "A", "Atype", "lda", "strideA", "B",
        "Btype", "ldb", "strideB", "beta", "C", "Ctype", "ldc", "strideC", "batchCount",
        "computeType", "algo",
    ]  # fmt: skip
    single = signatures("cublas")["gemmEx"]
    assert [a.split()[-1] for a in single] == [
        a.split()[-1] for a in arguments if not a.split()[-1].startswith(("stride", "batch"))
    ]
    assert calls_of("self._cublas") == {
        "gemmStridedBatchedEx": len(arguments),
        "gemmEx": len(single),
    }


def test_nccl_has_the_functions_that_are_called():
    known = signatures("nccl")
    for name, count in calls_of("comm").items():
        arguments = [a for a in known[name] if a != "self"]
        assert len(arguments) == count, f"{name}({known[name]})"
    for name, count in calls_of("self._nccl").items():
        arguments = [a for a in known[name] if a and "=None" not in a]
        assert len(arguments) == count, f"{name}({known[name]})"


def test_nccl_has_the_types_and_reductions():
    import cupy_backends

    folder = Path(cupy_backends.__file__).parent / "cuda" / "libs"
    (file,) = folder.glob("nccl.*.so")
    text = file.read_bytes()
    for name in (*cuda._NCCL_TYPES.values(), "SUM", "MAX"):
        assert f"NCCL_{name}\0".encode() in text


def test_every_method_of_the_driver_is_there():
    methods = {name for name in vars(Driver) if not name.startswith("_")}
    for name in methods:
        theirs = inspect.signature(getattr(cuda.CupyDriver, name))
        assert [*theirs.parameters] == [*inspect.signature(getattr(Driver, name)).parameters]


@pytest.mark.skipif(cupy.is_available(), reason="there is a GPU")
def test_cupy_without_a_gpu_says_so():
    with pytest.raises(LaunchError, match=r"cupy .* finds no GPU \(version of the driver"):
        cuda.load()


def test_views_of_an_arena_lie_as_numpys_do():
    memory = cupy.cuda.UnownedMemory(1 << 20, 4096, None, 0)
    arena = cupy.ndarray((4096,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    view = arena[256 : 256 + 240].view(np.dtype("float32")).reshape(3, 4, 5)
    same = np.zeros(4096, np.uint8)[256 : 256 + 240].view("float32").reshape(3, 4, 5)
    assert view.strides == same.strides
    assert view.swapaxes(1, 2).strides == same.swapaxes(1, 2).strides
    assert view.data.ptr == (1 << 20) + 256
