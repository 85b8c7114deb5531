"""What a cross entropy needs of the logits, in one pass over them; and back, in one.

That is two sums over the classes; where these are split over ranks, a maximum and these two of each
row travel. The exponentials are kept for the gradient, which is (softmax - target) dy; both may lie
where the logits were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import OUT, Op, ShardView, op
from mpiflow.graph.rule import Shape
from mpiflow.ops.base import Gradients, Tensors, apply, is_zero, require_float
from mpiflow.ops.blocks import BLOCK
from mpiflow.ops.index import address, address_bytes, require_index
from mpiflow.ops.reduction import reduce_sum
from mpiflow.ops.work import carve, carved, in_turn

Calls = list[Callable[[], Any]]


class Entropy(Op):
    """Base of both: of its target a row gives `label_share` to its label, `even_share` to each."""

    label_share: float
    even_share: float

    def check_inputs(self, floats: tuple[str, ...], label: str) -> None:
        """Raise unless the label is an index, and the others are of one dtype."""
        require_float(self, floats)
        require_index(self, label)
        if set(floats) - {floats[0]} or floats[0] not in ("float32", "float64"):
            raise GraphError(
                f"{self.name} takes float32 or float64, not {' and '.join(floats)}; cast them"
            )

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return 4 * max(map(prod, (*inputs, *outputs)))


@op
class EntropySums(Entropy):
    """x (..., c), highest (...), label (...) -> e^z, its sum, and z of the target.

    z is x - highest; that of the target is label_share z[label] + even_share sum(z).
    """

    label_share: float = 1.0
    even_share: float = 0.0
    rule = "... c, ..., ... -> ... c, ..., ..."
    inplace = ((0, 0),)
    indexes = ((2, 0, -1),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        self.check_inputs(dtypes[:2], dtypes[2])
        return dtypes[:1] * 3

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return address_bytes(inputs[2])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (x, _, label), (exponential, sums, _), (dy, ds, dt) = inputs, outputs, dys
        op = EntropySumsGrad(self.label_share, self.even_share)
        dx = apply(op, ds, dt, exponential, label)
        down = ds * sums + dt * (self.label_share + self.even_share * x.shape[-1])
        if not is_zero(dy):
            more = dy * exponential
            dx, down = dx + more, down + reduce_sum(more, -1)
        return dx, -down, None

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        xp, (x, highest, label) = shard.xp, arrays
        sums, target = out[1].reshape(-1), out[2].reshape(-1)
        if not x.size:
            return in_turn([partial(sums.fill, 0), partial(target.fill, 0)])
        columns, highest = x.shape[-1], highest.reshape(-1)
        x, z = x.reshape(-1, columns), out[0].reshape(-1, columns)
        find, flat, mine, scratch = address(
            xp, shard.work, label, columns, shard.start(0, label.ndim)
        )
        # The labels come first: z may lie on x.
        calls: Calls = [
            find,
            partial(xp.take, x.reshape(-1), flat, None, target, "clip"),
            partial(xp.subtract, target, highest, target),
            partial(xp.logical_not, mine, mine),
            # Not a product with the mask: an infinity held elsewhere must not become NaN here.
            partial(xp.copyto, target, 0, where=mine),
        ]
        even = scratch.view(x.dtype)[: len(x)]
        calls.append(partial(self._exponentials, xp, z, x, highest, even, sums))
        if self.label_share != 1:
            calls.append(partial(xp.multiply, target, self.label_share, target))
        if self.even_share:
            calls.append(partial(xp.multiply, even, self.even_share, even))
            calls.append(partial(xp.add, target, even, target))
        return in_turn(calls)

    def _exponentials(self, xp: Any, z: Any, x: Any, highest: Any, even: Any, sums: Any) -> None:
        for rows in _blocks(x):
            part = xp.subtract(x[rows], highest[rows, None], z[rows])
            if self.even_share:
                xp.add.reduce(part, 1, None, even[rows])
            xp.exp(part, part)
            xp.add.reduce(part, 1, None, sums[rows])

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        self.bind(shard, out, *arrays)()


@op
class EntropySumsGrad(Entropy):
    """The gradient for x: ds, dt, e^z, label -> ds e^z + dt of the target's shares."""

    label_share: float = 1.0
    even_share: float = 0.0
    rule = "..., ..., ... c, ... -> ... c"
    linear = ((0, 1),)
    inplace = ((2, 0),)
    indexes = ((3, 2, -1),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        self.check_inputs(dtypes[:3], dtypes[3])
        return dtypes[:1]

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return carved((inputs[0], dtype), ((address_bytes(inputs[3]),), "uint8"))

    def bind(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        if not out.size:
            return in_turn([])
        xp, columns = shard.xp, out.shape[-1]
        (ds, dt), label = (a.reshape(-1) for a in arrays[:2]), arrays[3]
        z, dx = arrays[2].reshape(-1, columns), out.reshape(-1, columns)
        share, work = carve(
            shard.work, ((len(z),), z.dtype), ((address_bytes(label.shape),), "uint8")
        )
        find, flat, mine, scratch = address(xp, work, label, columns, shard.start(OUT, label.ndim))
        picked = scratch.view(z.dtype)[: len(z)]
        calls: Calls = [
            partial(xp.multiply, dt, self.even_share, share),
            partial(self._softmax, xp, dx, z, ds, share),
            find,
            partial(xp.multiply, dt, self.label_share, share),
            partial(xp.multiply, share, mine, share),
            partial(xp.take, dx.reshape(-1), flat, None, picked, "clip"),
            partial(xp.add, picked, share, picked),
            partial(xp.put, dx, flat, picked),
        ]
        return in_turn(calls)

    def _softmax(self, xp: Any, dx: Any, z: Any, ds: Any, share: Any) -> None:
        for rows in _blocks(z):
            part = xp.multiply(z[rows], ds[rows, None], dx[rows])
            if self.even_share:
                xp.add(part, share[rows, None], part)

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        self.bind(shard, out, *arrays)()


def _blocks(x: Any) -> Iterator[slice]:
    step = max(1, BLOCK // x.shape[1])
    for first in range(0, len(x), step):
        yield slice(first, first + step)
