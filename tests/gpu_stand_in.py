"""A driver of no GPU: CuPy's functions as strict as CuPy's, on NumPy, and a list of all calls.

What CuPy lacks, or has under another keyword, fails here too. Streams do what they are given at
once, and communicators meet in the threads of the ranks; `calls` has every call in order.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpiflow.exec.cuda_arrays import ALLOCATING, UFUNCS, VALUES, VIEWS
from mpiflow.exec.cuda_driver import Gpu


class Waits(Exception):
    """The host would wait for the GPU here, where nothing may."""


_strict = threading.local()


def waits(what):
    """The host needs a value that the GPU may still have to compute."""
    if getattr(_strict, "on", False):
        raise Waits(what)


class DeviceArray(np.ndarray):
    """An array that NumPy cannot reach, nor an array of NumPy be mixed with, as one of CuPy."""

    def __int__(self):
        waits("int")
        return super().__int__()

    def __float__(self):
        waits("float")
        return super().__float__()

    def __bool__(self):
        waits("bool")
        return super().__bool__()

    def __index__(self):
        waits("index")
        return super().__index__()

    def tolist(self):
        waits("tolist")
        return super().tolist()

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        arrays = [a for a in (*inputs, *out, options.get("where")) if isinstance(a, np.ndarray)]
        assert all(isinstance(a, DeviceArray) for a in arrays), f"{ufunc}: memory of the host"
        options = {key: host(value) for key, value in options.items()}
        if out:
            options["out"] = tuple(host(a) for a in out)
        return device(getattr(ufunc, method)(*map(host, inputs), **options))

    def __array_function__(self, function, types, args, kwargs):
        raise TypeError(f"numpy.{function.__name__} of an array of the device")

    def __getitem__(self, key):
        parts = key if isinstance(key, tuple) else (key,)
        _refuse_host(parts)
        if any(isinstance(part, np.ndarray) and part.dtype == bool for part in parts):
            waits("a mask, of whose size nothing is known")
        return device(super().__getitem__(key))

    def __setitem__(self, key, value):
        _refuse_host((*(key if isinstance(key, tuple) else (key,)), value))
        super().__setitem__(key, value)

    def sort(self):
        self.view(np.ndarray).sort()


def _refuse_host(values):
    for value in values:
        if isinstance(value, np.ndarray):
            assert isinstance(value, DeviceArray), "an array of the host"


def host(value):
    """What is behind an array of the device."""
    return value.view(np.ndarray) if isinstance(value, DeviceArray) else value


def device(value):
    """Arrays as those of the device, and scalars too, of which CuPy knows none."""
    if isinstance(value, tuple | list):
        return type(value)(map(device, value))
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value).view(DeviceArray)
    return value


def on_device(function):
    """A function of NumPy that takes and gives arrays of the device alone."""

    def call(*args, **kwargs):
        _refuse_host((*args, *kwargs.values()))
        args = [tuple(map(host, a)) if isinstance(a, tuple) else host(a) for a in args]
        return device(function(*args, **{key: host(value) for key, value in kwargs.items()}))

    return call


class Ufunc:
    """A ufunc with the keywords of CuPy's: `_where`, and sums of `add` alone."""

    def __init__(self, name):
        self._name, self._ufunc = name, getattr(np, name)

    def __call__(self, *args, out=None, _where=None, dtype=None, casting="same_kind"):
        options = {} if _where is None else {"where": _where}
        if out is not None:
            assert len(args) == self._ufunc.nin, "out both by position and by name"
            options["out"] = out
        return self._ufunc(*args, dtype=dtype, casting=casting, **options)

    def reduce(self, array, axis=0, dtype=None, out=None, keepdims=False):
        assert self._name == "add", f"CuPy has no {self._name}.reduce"
        return on_device(np.sum)(array, axis=axis, dtype=dtype, out=out, keepdims=keepdims)

    def accumulate(self, array, axis=0, dtype=None, out=None):
        assert self._name == "add", f"CuPy has no {self._name}.accumulate"
        return on_device(np.cumsum)(array, axis=axis, dtype=dtype, out=out)

    def at(self, a, indices, b=None):
        assert self._name == "add"
        on_device(np.add.at)(a, indices, b)


class Elementwise:
    """The kernels that mpiflow writes, by what they are for."""

    def __init__(self, in_params, out_params, operation, name):
        self._run = getattr(self, name.removeprefix("mpiflow_"))
        named = inspect.signature(self._run).parameters
        given = (in_params + ", " + out_params).split(", ")
        assert [one.split()[-1] for one in given] == [name for name in named if name != "size"]
        self._integers = [n for n, one in enumerate(given) if one.startswith("int64")]

    def __call__(self, *args, size=None):
        assert all(isinstance(args[n], int) for n in self._integers), "numbers of the host"
        self._run(*args, **({} if size is None else {"size": size}))

    def sum_sorted(self, values, keys, place, count, width, shift, held, out, size):
        assert size == count * width == values.size
        assert keys.dtype == place.dtype == np.int64
        assert values.dtype == out.dtype, "T is one type"
        values, keys, place, out = map(host, (values, keys, place, out.reshape(-1, width)))
        for at, key in enumerate(keys):
            row = key >> shift
            if row < held and (at == 0 or keys[at - 1] >> shift != row):
                same = keys[(keys >> shift) == row] & ((1 << shift) - 1)
                out[place[at]] = np.cumsum(values.reshape(count, width)[same], axis=0)[-1]

    def put_rows(self, source, rows, width, held, out, size):
        assert size == source.size == rows.size * width
        assert rows.dtype == np.int64
        assert source.dtype == out.dtype, "T is one type"
        source, rows, out = map(host, (source.reshape(-1, width), rows, out.reshape(-1, width)))
        there = (rows >= 0) & (rows < held)
        out[rows[there]] = source[there]

    def take(self, source, index, rows, width, out):
        assert rows == source.shape[0]
        assert out.size == index.size * width
        assert out.dtype == source.dtype, "T is one type"
        flat = source.reshape(rows, width), index.reshape(-1)
        taken = on_device(np.take)(*flat, axis=0, mode="clip")
        out[...] = taken.reshape(out.shape)


class Reduction:
    """Sums of products."""

    def __init__(self, in_params, out_params, map_expr, reduce_expr, post_expr, identity, name):
        assert name == "mpiflow_sum_products"

    def __call__(self, x, y, out, axis=None, keepdims=False):
        assert x.dtype == y.dtype == out.dtype, "T is one type"
        out[...] = on_device(np.sum)(x * y, axis=axis, keepdims=keepdims)
        return out


def _copyto(dst, src, casting="same_kind", where=None):
    where = True if where is None else where
    on_device(np.copyto)(dst, src, casting=casting, where=where)


def _put(a, ind, v, mode="wrap"):
    assert mode != "raise", "it would wait for the GPU"
    on_device(np.put)(a, ind, v, mode=mode)


def _flatnonzero(a):
    waits("flatnonzero, whose size is not known before")
    return on_device(np.flatnonzero)(a)


def _asarray(a):
    if not isinstance(a, DeviceArray):
        waits("a copy from memory of the host that is not pinned")
    return on_device(np.asarray)(a)


def _max(a, axis=None, out=None, keepdims=False):
    return on_device(np.max)(a, axis=axis, out=out, keepdims=keepdims)


def _argmax(a, axis=None, dtype=None, out=None, keepdims=False):
    assert dtype is None
    return on_device(np.argmax)(a, axis=axis, out=out, keepdims=keepdims)


def _may_share_memory(a, b):
    return np.may_share_memory(host(a), host(b))


def cupy():
    """What mpiflow uses of CuPy."""
    made = {name: getattr(np, name) for name in (*VALUES, *VIEWS)}
    made |= {name: on_device(getattr(np, name)) for name in (*ALLOCATING, *VIEWS)}
    made |= {name: Ufunc(name) for name in (*UFUNCS, "add", "multiply", "maximum")}
    made |= {
        "flatnonzero": _flatnonzero, "asarray": _asarray,
        "may_share_memory": _may_share_memory, "copyto": _copyto, "put": _put, "max": _max,
        "argmax": _argmax,
        "ElementwiseKernel": Elementwise, "ReductionKernel": Reduction,
    }  # fmt: skip
    return SimpleNamespace(**made)


class World:
    """The GPUs of a job whose ranks are threads, and where its communicators meet."""

    def __init__(self, gpus=1):
        self.gpus = gpus
        self._lock = threading.Condition()
        self._made = 0
        self._boxes = {}
        self._sent = defaultdict(list)

    def unique_id(self):
        with self._lock:
            self._made += 1
            return self._made.to_bytes(128, "big")

    def exchange(self, key, size, index, item):
        """Every member's item."""
        with self._lock:
            box = self._boxes.setdefault(key, {})
            box[index] = item
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: len(box) == size, timeout=20), f"{key}: {box.keys()}"
            return [box[i] for i in range(size)]

    def put(self, key, item):
        with self._lock:
            self._sent[key].append(item)
            self._lock.notify_all()

    def take(self, key):
        with self._lock:
            assert self._lock.wait_for(lambda: self._sent[key], timeout=20), f"{key}: nothing sent"
            return self._sent[key].pop(0)


class StandIn:
    """Stands in for `exec.cuda.CupyDriver`."""

    def __init__(self, world=None, *, blind=False, late=False):
        """`blind`: what NCCL is asked for is noted, and not done. `late`: see `settle`."""
        self.world, self.blind, self.late = world or World(), blind, late
        self._where, self._open = {}, set()
        self.arrays = cupy()
        self.calls = []
        self.failure = ""
        self._streams = 0
        self._events = 0
        self._current = []

    def _note(self, *words):
        self.calls.append(" ".join(map(str, words)))

    def count(self):
        return self.world.gpus

    def gpu(self, index):
        return Gpu("Stand-in", f"uuid{index}", 1 << 30)

    def use(self, index):
        self._note("use", index)

    def allocate(self, nbytes):
        self._note("allocate", nbytes)
        return device(np.zeros(nbytes, np.uint8))

    def allocate_pinned(self, nbytes):
        self._note("allocate_pinned", nbytes)
        return np.zeros(nbytes, np.uint8)

    def stream(self, priority):
        self._streams += 1
        self._note("stream", self._streams, "priority", priority)
        return f"stream{self._streams}"

    @contextmanager
    def on(self, stream):
        self._current.append(stream)
        yield
        self._current.pop()

    @property
    def _on(self):
        return self._current[-1] if self._current else "no stream"

    def fetch(self, array):
        self._note("fetch", array.nbytes)
        return host(array).copy()

    def fill(self, array, values):
        self._note("fill", array.nbytes)
        host(array)[...] = values

    def event(self):
        self._events += 1
        return f"event{self._events}"

    def record(self, event, stream):
        self._note("record", stream)
        self._where[event] = stream
        self._open.add(event)

    def wait(self, stream, event):
        self._note("wait", stream, "for", self._where[event])

    def is_done(self, event):
        return not self.late or event not in self._open

    def finish(self, event):
        self._note("finish", self._where[event])
        self._open.discard(event)

    def settle(self):
        """Events that were recorded are done, which they are not before where they are `late`."""
        self._open.clear()

    def copy(self, target, source):
        self._note("copy", source.nbytes, self._on)
        assert target.nbytes == source.nbytes
        host(target)[...] = host(source)

    def multiply(self, product, out, left, right):
        """As cuBLAS would: from addresses, leading dims and steps alone, 16-bit sums in float32."""
        sizes = f"{product.m}x{product.k}x{product.n}"
        self._note("product", sizes, *[product.count][: product.count > 1], self._on)
        assert self._current or not self._streams, "on no stream"
        out, left, right = host(out), host(left), host(right)
        if product.exchanged:
            left, right = right, left
        m, n, k = product.m, product.n, product.k
        for starts in product.starts:
            a, b, c = (
                _batch(array, start, operand, shape, product.count)
                for array, start, operand, shape in zip(
                    (left, right, out), starts, (product.left, product.right, product.out),
                    ((m, k), (k, n), (m, n)), strict=True,
                )
            )  # fmt: skip
            assert a.dtype == b.dtype
            if a.itemsize == 2:
                a, b = a.astype(np.float32), b.astype(np.float32)
            c[...] = np.matmul(a, b)

    @contextmanager
    def strict(self):
        _strict.on = True
        try:
            yield
        finally:
            _strict.on = False

    def unique_id(self):
        self._note("unique_id")
        return self.world.unique_id()

    def communicator(self, size, unique_id, index):
        self._note("communicator", f"{index} of {size}")
        return SimpleNamespace(id=unique_id, size=size, index=index, count=0)

    @contextmanager
    def group(self):
        self._note("group {")
        self._late = []
        yield
        late, self._late = self._late, None
        for call in late:
            call()
        self._note("}")

    _late = None

    def _meet(self, comm, item):
        if self.blind:
            return [host(item)] * comm.size
        comm.count += 1
        return self.world.exchange((comm.id, comm.count), comm.size, comm.index, host(item).copy())

    def all_reduce(self, comm, out, source, reduce):
        self._note("all_reduce", reduce, out.size, out.dtype, self._on)
        host(out)[...] = _reduced(self._meet(comm, source), reduce)

    def reduce(self, comm, out, source, reduce, root):
        self._note("reduce", reduce, source.size, source.dtype, "to", root, self._on)
        found = self._meet(comm, source)
        if root == comm.index:
            host(out)[...] = _reduced(found, reduce)

    def broadcast(self, comm, out, source, root):
        self._note("broadcast", out.size, out.dtype, "from", root, self._on)
        host(out)[...] = self._meet(comm, source)[root]

    def all_gather(self, comm, out, source):
        self._note("all_gather", source.size, source.dtype, self._on)
        host(out)[...] = np.concatenate(self._meet(comm, source))

    def reduce_scatter(self, comm, out, source, reduce):
        self._note("reduce_scatter", reduce, out.size, out.dtype, self._on)
        whole = _reduced(self._meet(comm, source), reduce)
        host(out)[...] = np.split(whole, comm.size)[comm.index]

    def send(self, comm, source, peer):
        self._note("send", source.size, source.dtype, "to", peer, self._on)
        if not self.blind:
            self.world.put((comm.id, comm.index, peer), host(source).copy())

    def receive(self, comm, out, peer):
        self._note("receive", out.size, out.dtype, "from", peer, self._on)

        def take():
            host(out)[...] = self.world.take((comm.id, peer, comm.index))

        if self.blind:
            host(out)[...] = 1
        elif self._late is None:
            take()
        else:
            self._late.append(take)

    def error(self, comm):
        return self.failure

    def abort(self, comm):
        self._note("abort")

    def destroy(self, comm):
        self._note("destroy")


def _reduced(items, reduce):
    return {"sum": np.add, "max": np.maximum}[reduce].reduce(items)


def _batch(array, start, operand, shape, count):
    """`count` matrices as cuBLAS sees them from the address at which an array begins."""
    size = array.itemsize
    along = (operand.leading * size, size)
    if operand.turned:
        along = along[::-1]
    base = np.ndarray((), array.dtype, buffer=_bytes_from(array, start * size))
    return as_strided(base, (count, *shape), (operand.step * size, *along))


def _bytes_from(array, offset):
    """The memory behind an address in an array, which the views above stay within."""
    owner = array
    while owner.base is not None and isinstance(owner.base, np.ndarray):
        owner = owner.base
    flat = np.lib.stride_tricks.as_strided(
        np.ndarray((), np.uint8, buffer=owner.reshape(-1).view(np.uint8) if owner.size else b"\0"),
        (owner.nbytes,), (1,),
    )  # fmt: skip
    first = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0] + offset
    return flat[first:]
