"""Ops that compute 16-bit floats in float32.

NumPy's own 16-bit products are slow, and round after every addition. So on the CPU such a kernel
copies its inputs to float32, computes, and rounds the result once. A GPU does the same within a
product, on the arrays as they are: an array module that does says so by `wide_sums`. What adds up
several products there does so in float32 too, and rounds the result once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpiflow.graph.op import Op, ShardView
from mpiflow.graph.rule import Shape
from mpiflow.graph.tensor import is_narrow
from mpiflow.ops.work import carve, carved


class Wide(Op):
    """Base of products, which take the 16-bit precision of a job; subclasses write `compute`."""

    precision = "low"
    unit = "matrix"
    one_product = False
    """Whether `compute` is a single matmul, which writes 16-bit arrays where `wide_sums` is set."""

    def scratch(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        """The workspace of `compute`, in bytes."""
        return 0

    def compute(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        """The call that a step makes, on arrays of float32 or float64."""
        raise NotImplementedError(self.name)

    def adds_products(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> bool:
        """Whether `compute` adds up matmuls, of 16-bit arrays in float32 where `wide_sums` is."""
        return False

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        if not is_narrow(dtype):
            return self.scratch(inputs, outputs, dtype)
        copies = carved(*((shape, "float32") for shape in (*inputs, *outputs)))
        return copies + self.scratch(inputs, outputs, "float32")

    def device_workspace(
        self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str
    ) -> int:
        if is_narrow(dtype) and self.one_product:
            return 0
        if is_narrow(dtype) and self.adds_products(inputs, outputs):
            copy = carved(*((shape, "float32") for shape in outputs))
            return copy + self.scratch(inputs, outputs, "float32")
        return self.workspace(inputs, outputs, dtype)

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        summed = getattr(shard.xp, "wide_sums", False)
        if out.dtype.itemsize > 2 or (self.one_product and summed):
            return self.compute(shard, out, *arrays)
        shapes = tuple(array.shape for array in arrays)
        copied = () if summed and self.adds_products(shapes, (out.shape,)) else arrays
        pieces = [(array.shape, "float32") for array in (*copied, out)]
        *wide, result = carve(shard.work, *pieces)
        taken = wide or arrays
        call = self.compute(_Rest(shard, shard.work[carved(*pieces) :]), result, *taken)
        copies = list(zip(wide, copied, strict=True))
        return partial(_round_once, shard.xp.copyto, copies, call, out, result)

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        self.bind(shard, out, *arrays)()


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
