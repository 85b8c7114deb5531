"""Ops that compute 16-bit floats in float32.

NumPy's own 16-bit products are slow, and round after every addition. So on the CPU such a kernel
copies its inputs to float32, computes, and rounds the result once. A GPU does the same within a
product, on the arrays as they are: an array module that does says so by `wide_sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpiflow.graph.op import REGISTRY, Op, ShardView
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import is_narrow
from mpiflow.ops.work import carve, carved


class Wide(Op):
    """Base of products, which take the 16-bit precision of a job; subclasses write `compute`."""

    precision = "low"
    unit = "matrix"
    one_product = False
    """Whether `compute` is a single matmul, and may take 16-bit arrays where `wide_sums` is set."""

    def scratch(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        """The workspace of `compute`, in bytes."""
        return 0

    def compute(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        """The call that a step makes, on arrays of float32 or float64."""
        raise NotImplementedError(self.name)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        if not is_narrow(dtype):
            return self.scratch(inputs, outputs, dtype)
        copies = carved(*((shape, "float32") for shape in (*inputs, *outputs)))
        return copies + self.scratch(inputs, outputs, "float32")

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        if out.dtype.itemsize > 2 or (self.one_product and getattr(shard.xp, "wide_sums", False)):
            return self.compute(shard, out, *arrays)
        pieces = [(array.shape, "float32") for array in (*arrays, out)]
        *wide, result = carve(shard.work, *pieces)
        call = self.compute(_Rest(shard, shard.work[carved(*pieces) :]), result, *wide)
        copies = list(zip(wide, arrays, strict=True))
        return partial(_round_once, shard.xp.copyto, copies, call, out, result)

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        self.bind(shard, out, *arrays)()


def needs_no_copies(op: str, dtype: str) -> bool:
    """Whether accelerators do without the workspace of this op, which is for copies in float32."""
    return is_narrow(dtype) and getattr(REGISTRY[op], "one_product", False)


class _Rest:
    """A shard with what is left of its workspace."""

    def __init__(self, shard: ShardView, work: Any) -> None:
        self.xp, self.work = shard.xp, work
        self.start, self.first = shard.start, shard.first


def _round_once(
    copy: Any, copies: list[tuple[Any, Any]], call: Callable[[], Any], out: Any, result: Any
) -> None:
    for target, source in copies:
        copy(target, source, casting="unsafe")
    call()
    copy(out, result, casting="unsafe")
