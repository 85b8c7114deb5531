"""Optimizer updates: one elementwise op a variable, which works on blocks that stay in cache.

Inputs are the weight, its gradient, scalars, then what the optimizer keeps; outputs are the next
weight and the next of what it keeps. The first scalar is the learning rate. With `clipped` the
last one is a factor for the gradient; with `ema` the last thing kept is an average of the weight,
average' = ema average + (1 - ema) weight'.

With several `members`, each of these but the scalars stands for so many tensors, one after another:
all weights, all gradients, the scalars, of each thing kept that of every weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op, ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.ops.base import require_float
from mpiflow.ops.gradnorm import add_squares
from mpiflow.ops.schedule import LINE, scratch

Arrays = list[Any]
_BLOCK = 1 << 15
"""Elements: what an update works on stays in cache, and cutting it costs little."""
_DEVICE_BLOCK = 1 << 22
"""On an accelerator, where each operation takes longer than it costs to ask for it."""


@dataclass(frozen=True)
class Update(Op):
    """Base of updates. Subclasses say how many scalars they take and arrays they keep."""

    clipped: bool = False
    ema: float = 0.0
    members: int = 1

    @property
    def scalars(self) -> int:
        """How many scalars come before the gradient's factor."""
        return 1

    @property
    def kept(self) -> int:
        """How many arrays like the weight are kept, without the average."""
        return 0

    @property
    def passes(self) -> int:
        """Operations on each element, for the price."""
        return 2

    @property
    def lanes(self) -> int:
        """Blocks of workspace."""
        return 2

    @property
    def inplace(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        """The weight, and what is kept beside it, change where they stand."""
        given, made = self.abreast()
        ranges = zip((given[0], *given[2:]), made, strict=True)
        return tuple(pair for i, j in ranges for pair in zip(i, j, strict=True))

    def abreast(self) -> tuple[tuple[range, ...], tuple[range, ...]]:
        count, scalars = self.members, self.scalars + self.clipped
        given = [0, count, *(scalars + count * (2 + i) for i in range(self._states))]
        made = [count * i for i in range(1 + self._states)]
        return (
            tuple(range(first, first + count) for first in given),
            tuple(range(first, first + count) for first in made),
        )

    def joined(self, members: int) -> Update:
        return replace(self, members=members)

    @property
    def _states(self) -> int:
        return self.kept + bool(self.ema)

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        if self.members < 1:
            raise GraphError(f"{self.name} is for 1 weight or more, not {self.members}")
        fulls = tuple(
            tuple((f"d{member}.{i}",) for i in range(len(shape)))
            for member, shape in enumerate(shapes[: self.members])
        )
        scalars = ((),) * (self.scalars + self.clipped)
        return Rule((*fulls, *fulls, *scalars, *fulls * self._states), self._results(fulls))

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        """Of several members all: they are joined when their layouts are known."""
        if self.members == 1:
            return super().unsplittable(rule)
        return frozenset(letter for dims in rule.inputs for letters in dims for letter in letters)

    def _results(self, fulls: tuple[Any, ...]) -> tuple[Any, ...]:
        return fulls * (1 + self._states)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return Op.dtypes(self, dtypes) * (self.members * (1 + self._states))

    def workspace(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return self._scratch(min(self._elements(inputs), _BLOCK), dtype)

    def device_workspace(
        self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str
    ) -> int:
        return self._scratch(min(self._elements(inputs), _DEVICE_BLOCK), dtype)

    def _scratch(self, block: int, dtype: str) -> int:
        """The workspace for blocks of so many elements."""
        return self.lanes * block * np.dtype(dtype).itemsize

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        extra = self.clipped + 3 * bool(self.ema)
        return self._elements(inputs) * (self.passes + extra)

    def _elements(self, inputs: tuple[Shape, ...]) -> int:
        """Of all weights together, which may be one array to the kernel."""
        return sum(prod(shape) for shape in inputs[: self.members])

    def kernel(self, shard: ShardView, out: Any, *arrays: Any) -> None:
        count = self.members
        first, last = 2 * count, 2 * count + self.scalars + self.clipped
        made = out if isinstance(out, tuple | list) else (out,)
        for member in range(count):
            new = [a.reshape(-1) for a in made[member::count]]
            old = [*arrays[member:first:count], *arrays[last + member :: count]]
            self._member(shard, new, [a.reshape(-1) for a in old], arrays[first:last])

    def _member(self, shard: ShardView, new: Arrays, old: Arrays, scalars: tuple[Any, ...]) -> None:
        w = old[0]
        if not w.size:
            return
        for part, lanes in _blocks(w.size, self._lanes(shard.work, w)):
            if part is None:
                self._block(shard.xp, new, old, scalars, lanes)
            else:
                blocks = [a[part] for a in new], [a[part] for a in old]
                self._block(shard.xp, *blocks, scalars, lanes)

    def _lanes(self, work: Any, w: Any) -> Arrays:
        """Scratch for blocks as large as the workspace allows."""
        nbytes = min(w.size, work.size // (self.lanes * w.itemsize)) * w.itemsize
        ends = range(nbytes, (self.lanes + 1) * nbytes, nbytes or 1)
        return [work[end - nbytes : end].view(w.dtype) for end in ends]

    def _block(
        self, xp: Any, new: Arrays, old: Arrays, scalars: tuple[Any, ...], lanes: Arrays
    ) -> None:
        if self.clipped:
            old[1] = xp.multiply(old[1], scalars[-1], out=lanes[0])
        self._update(xp, new, old, scalars, *lanes)
        if self.ema:
            average = xp.multiply(old[-1], self.ema, out=new[-1])
            share = xp.multiply(new[0], 1.0 - self.ema, out=lanes[0])
            xp.add(average, share, out=average)

    def _update(
        self, xp: Any, new: Arrays, old: Arrays, scalars: tuple[Any, ...], a: Any, b: Any
    ) -> None:
        """One block; the gradient, old[1], may stand in `a`."""
        raise NotImplementedError


def _blocks(size: int, lanes: Arrays) -> Iterator[tuple[slice | None, Arrays]]:
    """What to cut from the arrays, and scratch of that length; None where they are one block."""
    block = lanes[0].size
    if size <= block:
        yield None, lanes
        return
    for first in range(0, size, block):
        last = min(first + block, size)
        yield slice(first, last), [lane[: last - first] for lane in lanes]


def _decayed(xp: Any, w: Any, g: Any, decay: float, a: Any, b: Any) -> Any:
    """g + decay w, in `a`; g may stand there. `b` is scratch."""
    if not decay:
        return g
    return xp.add(xp.multiply(w, decay, out=b), g, out=a)


@op
class SgdUpdate(Update):
    """d = g + weight_decay w; m' = momentum m + d; w' = w - rate m'.

    With `nesterov`, w' = w - rate (d + momentum m'). Without momentum there is no m, and w' = w -
    rate d. The form is PyTorch's (no dampening).
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @property
    def kept(self) -> int:
        return int(bool(self.momentum))

    @property
    def passes(self) -> int:
        return 2 + 2 * bool(self.momentum) + 2 * bool(self.weight_decay) + 2 * self.nesterov

    def _update(
        self, xp: Any, new: Arrays, old: Arrays, scalars: tuple[Any, ...], a: Any, b: Any
    ) -> None:
        w = old[0]
        d = _decayed(xp, w, old[1], self.weight_decay, a, b)
        if self.momentum:
            m = xp.multiply(old[2], self.momentum, out=new[1])
            xp.add(m, d, out=m)
            d = xp.add(d, xp.multiply(m, self.momentum, out=b), out=a) if self.nesterov else m
        xp.multiply(d, scalars[0], out=b)
        xp.subtract(w, b, out=new[0])


@op
class LarsUpdate(Update):
    """m' = momentum m + rate (g + weight_decay w); w' = w - m' (You, Gitman, Ginsburg 2017)."""

    momentum: float = 0.9
    weight_decay: float = 0.0

    @property
    def kept(self) -> int:
        return 1

    @property
    def passes(self) -> int:
        return 4 + 2 * bool(self.weight_decay)

    def _update(
        self, xp: Any, new: Arrays, old: Arrays, scalars: tuple[Any, ...], a: Any, b: Any
    ) -> None:
        w = old[0]
        d = _decayed(xp, w, old[1], self.weight_decay, a, b)
        m = xp.multiply(old[2], self.momentum, out=new[1])
        xp.add(m, xp.multiply(d, scalars[0], out=b), out=m)
        xp.subtract(w, m, out=new[0])


@op
class AdagradUpdate(Update):
    """d = g + weight_decay w; s' = s + d^2; w' = w - rate d / (sqrt(s') + eps).

    Duchi, Hazan, Singer 2011, in PyTorch's form.
    """

    eps: float = 1e-10
    weight_decay: float = 0.0

    @property
    def kept(self) -> int:
        return 1

    @property
    def passes(self) -> int:
        return 7 + 2 * bool(self.weight_decay)

    def _update(
        self, xp: Any, new: Arrays, old: Arrays, scalars: tuple[Any, ...], a: Any, b: Any
    ) -> None:
        w = old[0]
        d = _decayed(xp, w, old[1], self.weight_decay, a, b)
        s = xp.add(old[2], xp.multiply(d, d, out=b), out=new[1])
        xp.add(xp.sqrt(s, out=b), self.eps, out=b)
        xp.divide(d, b, out=b)
        xp.multiply(b, scalars[0], out=b)
        xp.subtract(w, b, out=new[0])


@dataclass(frozen=True)
class _Moments(Update):
    """Base of what Adam's direction is part of; scalars are the rate and both corrections."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    @property
    def scalars(self) -> int:
        return 3

    @property
    def kept(self) -> int:
        return 2

    @property
    def passes(self) -> int:
        return 14 + 2 * bool(self.weight_decay)

    def _direction(
        self,
        xp: Any,
        moments: Arrays,
        old: Arrays,
        corrections: tuple[Any, ...],
        a: Any,
        b: Any,
    ) -> Any:
        """What times the rate is taken from the weight, in `a`; writes the next moments."""
        w, g, m, v = old[:4]
        first, second = corrections
        d = g if self.decoupled else _decayed(xp, w, g, self.weight_decay, a, b)
        m = xp.multiply(m, self.beta1, out=moments[0])
        xp.add(m, xp.multiply(d, 1.0 - self.beta1, out=b), out=m)
        xp.multiply(xp.multiply(d, d, out=b), 1.0 - self.beta2, out=b)
        v = xp.add(xp.multiply(v, self.beta2, out=moments[1]), b, out=moments[1])
        xp.sqrt(xp.multiply(v, second, out=b), out=b)
        xp.add(b, self.eps, out=b)
        xp.divide(xp.multiply(m, first, out=a), b, out=a)
        return _decayed(xp, w, a, self.weight_decay, a, b) if self.decoupled else a


@op
class AdamUpdate(_Moments):
    """m' = beta1 m + (1 - beta1) d; v' = beta2 v + (1 - beta2) d^2; w' = w - rate u with

    u = c1 m' / (sqrt(c2 v') + eps), where c1 and c2 are the corrections (Kingma, Ba 2014) and d = g
    + weight_decay w; `decoupled`, d = g and u has weight_decay w beside (Loshchilov, Hutter 2017).
    """

    def _update(
        self, xp: Any, new: Arrays, old: Arrays, scalars: tuple[Any, ...], a: Any, b: Any
    ) -> None:
        u = self._direction(xp, new[1:], old, scalars[1:3], a, b)
        xp.subtract(old[0], xp.multiply(u, scalars[0], out=b), out=new[0])


@op
class AdamSquares(_Moments):
    """The sum of squares of the direction u that AdamUpdate takes with the same inputs.

    LAMB's rate depends on it, so u is computed twice: that needs no memory for it, and takes as
    much traffic as to write and read it twice. It has no rate among its scalars.
    """

    @property
    def scalars(self) -> int:
        return 2

    @property
    def lanes(self) -> int:
        return 4

    @property
    def inplace(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        """Nothing changes here."""
        return ()

    def abreast(self) -> tuple[tuple[range, ...], tuple[range, ...]]:
        return (), ()

    def _results(self, fulls: tuple[Any, ...]) -> tuple[Any, ...]:
        return ((),)

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        super().dtypes(dtypes)
        return ("float64",)

    def _scratch(self, block: int, dtype: str) -> int:
        return LINE + self.lanes * block * 8

    def kernel(self, shard: ShardView, out: Any, w: Any, g: Any, *rest: Any) -> None:
        xp, part = shard.xp, scratch(shard, 0, w.dtype)
        count = self.scalars + self.clipped
        arrays = [a.reshape(-1) for a in (w, g, *rest[count:])]
        out.fill(0.0)
        if not w.size:
            return
        room = (shard.work.size - LINE) * w.itemsize // 8
        lanes = self._lanes(shard.work[LINE : LINE + room], w)
        for block, (a, b, *moments) in _blocks(w.size, lanes):
            old = [x[block] for x in arrays] if block else list(arrays)
            if self.clipped:
                old[1] = xp.multiply(old[1], rest[count - 1], out=a)
            add_squares(xp, self._direction(xp, moments, old, rest[:2], a, b), part, out)
