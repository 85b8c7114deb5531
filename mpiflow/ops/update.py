"""Optimizer updates: one elementwise op a variable."""

from __future__ import annotations

from typing import Any

from mpiflow.graph.op import ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.ops.elementwise import FloatElementwise

_BLOCK = 1 << 16


@op
class SgdUpdate(FloatElementwise):
    """w, g [, m] -> w' [, m'] with m' = momentum m + g + weight_decay w, w' = w - lr m'.

    With `nesterov`, w' = w - lr (g + weight_decay w + momentum m'). Without momentum there is no
    m. The form is PyTorch's (no dampening).
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def groups(self, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(len(dtypes))),)

    @property
    def inplace(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        """The weight and its momentum are updated where they stand."""
        return ((0, 0), (2, 1)) if self.momentum else ((0, 0),)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        full = tuple((f"d{i}",) for i in range(len(shapes[0])))
        return Rule((full,) * (3 if self.momentum else 2), (full,) * (2 if self.momentum else 1))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return super().dtypes(dtypes) * (2 if self.momentum else 1)

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        size = 8
        for n in inputs[0]:
            size *= n
        return 2 * min(size, 8 * _BLOCK)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        size = 1
        for n in inputs[0]:
            size *= n
        return size * (2 + 2 * bool(self.momentum) + 2 * bool(self.weight_decay))

    def kernel(self, shard: ShardView, out: Any, w: Any, g: Any, m: Any = None) -> None:
        outs = out if self.momentum else (out,)
        arrays = [a.reshape(-1) for a in ((w, g, m) if self.momentum else (w, g))]
        flat = [a.reshape(-1) for a in outs]
        size = min(w.size, _BLOCK)
        work = shard.work[: 2 * size * w.itemsize].view(w.dtype)
        for first in range(0, w.size, _BLOCK):
            part = slice(first, first + _BLOCK)
            n = min(_BLOCK, w.size - first)
            pieces = [a[part] for a in arrays]
            self._update(shard.xp, [a[part] for a in flat], pieces, work[:n], work[size:][:n])

    def _update(self, xp: Any, out: list[Any], arrays: list[Any], work: Any, scratch: Any) -> None:
        w, d = arrays[:2]
        if self.weight_decay:
            xp.multiply(w, self.weight_decay, out=work)
            d = xp.add(work, d, out=work)
        if self.momentum:
            m = xp.multiply(arrays[2], self.momentum, out=out[1])
            xp.add(m, d, out=m)
            if self.nesterov:
                xp.multiply(m, self.momentum, out=scratch)
                d = xp.add(d, scratch, out=work)
            else:
                d = m
        xp.multiply(d, self.lr, out=scratch)
        xp.subtract(w, scratch, out=out[0])
