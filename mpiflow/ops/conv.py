"""Convolutions in 1, 2, 3 or more dims: x (n, c, *size), w (out, c / groups, *kernel).

As everywhere in deep learning the kernel is not flipped. The three ops are the gradients of one
another, so they can be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import ModuleType
from typing import Any, ClassVar

from mpiflow.errors import GraphError
from mpiflow.graph.op import ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops import columns, depthwise
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.tiles import Geometry
from mpiflow.ops.wide import Wide
from mpiflow.ops.window import (
    Padding,
    PaddingLike,
    Windowed,
    count_windows,
    letters,
    pad_windows,
    per_dim,
)


class Convolution(Wide, Windowed):
    """Base of the three ops.

    Batch and channels may be split. With groups, a channel dim is groups x channels of one group,
    and what may be split is the groups. `roles` says which inputs, and which output, are x, w, y.
    """

    roles: ClassVar[str]
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    channel_groups: int
    linear = ((0,), (1,))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes)

    def sizes(self) -> dict[str, int]:
        groups = {"g": self.channel_groups} if self.channel_groups > 1 else {}
        letter = {"x": "s", "w": "k", "y": ""}[self.roles[2]]
        made = getattr(self, "size", ())
        return groups | {f"{letter}{i}": n for i, n in enumerate(made)}

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x[0] in "skt")

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        dims = len(self.stride)
        if any(len(shape) != dims + 2 for shape in shapes):
            raise GraphError(
                f"{self.name} over {dims} spatial dims takes operands of {dims + 2} dims, not"
                f" {' and '.join(map(str, shapes))}"
            )
        c, o = (("g", "c"), ("g", "o")) if self.channel_groups > 1 else (("c",), ("o",))
        operands = {
            "x": (("n",), c, *letters("s", dims)),
            "w": (o, ("c",), *letters("k", dims)),
            "y": (("n",), o, *letters("t", dims)),
        }
        first, second, made = (operands[role] for role in self.roles)
        return Rule((first, second), (made,))

    def windows(self, shapes: tuple[Shape, ...]) -> Shape:
        given = dict(zip(self.roles, shapes, strict=False))
        if "y" in given:
            return given["y"][2:]
        x, w = given["x"], given["w"]
        return count_windows(self.name, x[2:], w[2:], self.stride, self.padding, self.dilation)

    def geometry(self, *shapes: Shape) -> Geometry:
        """The convolution on local shapes of inputs and output; a rank may hold some groups."""
        named = dict(zip(self.roles, shapes, strict=True))
        x, w, y = (named[role] for role in "xwy")
        groups = w[0] and x[1] // w[1] if self.channel_groups > 1 and w[1] else 1
        at = Geometry(
            x[0], groups, w[1], w[0] // max(groups, 1), x[2:], w[2:], y[2:],
            self.stride, self.padding, self.dilation,
        )  # fmt: skip
        return (self.channel_groups > 1 and depthwise.depthwise(at)) or at

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        """A multiplication and an addition for every weight in every window."""
        named = dict(zip(self.roles, (*inputs, *outputs), strict=True))
        w, y = named["w"], named["y"]
        return 2 * prod(w) * y[0] * prod(y[2:])

    def copied(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        """The columns of all windows, written and read, and what rows of a kernel add up."""
        at = self.geometry(*inputs, *outputs)
        if at.pointwise:
            return 0
        at = replace(at, by_rows=at.kernel[0] > 1 and at.worth_rows())
        columns = at.groups * at.channels * prod(at.met)
        added = at.groups * at.outputs * (at.turns - 1)
        return 2 * (columns + added) * at.images * prod(at.windows)

    def scratch(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        at = self.geometry(*inputs, *outputs)
        way: Any = _way(at)
        bytes_of = {"x": way.input_workspace, "w": way.weight_workspace, "y": way.workspace}
        needed: int = bytes_of[self.roles[2]](at, dtype)
        return needed

    def adds_products(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> bool:
        """Not where each channel is a group: that makes no products of matrices."""
        if not all(map(prod, (*inputs, *outputs))):
            return False
        return _way(self.geometry(*inputs, *outputs)) is columns

    def compute(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        if not all(a.size for a in (*arrays, out)):
            return partial(out.fill, 0)
        at = self.geometry(*(a.shape for a in (*arrays, out)))
        way: Any = _way(at)
        run = {"x": way.input_gradient, "w": way.weight_gradient, "y": way.convolve}
        bound: Callable[[], Any] = run[self.roles[2]](shard.xp, shard.work, out, *arrays, at)
        return bound


def _way(at: Geometry) -> ModuleType:
    return depthwise if isinstance(at, depthwise.Depthwise) else columns


@op
class Conv(Convolution):
    """Every window of x (n, c, *size) times w (out, c / groups, *kernel) -> (n, out, *windows)."""

    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    channel_groups: int = 1
    roles = "xwy"

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (x, w), (dy,) = inputs, dys
        return _input_grad(self, dy, w, x.shape), _weight_grad(self, x, dy, w.shape)


@op
class ConvInputGrad(Convolution):
    """The gradient of `Conv` for x: dy (n, out, *windows), w -> (n, c, *size)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    channel_groups: int = 1
    roles = "ywx"

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (dy, w), (x,) = inputs, dys
        return _conv(self, x, w), _weight_grad(self, x, dy, w.shape)


@op
class ConvWeightGrad(Convolution):
    """The gradient of `Conv` for w: x, dy -> (out, c / groups, *size), size being the kernel's."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    channel_groups: int = 1
    roles = "xyw"

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (x, dy), (w,) = inputs, dys
        return _input_grad(self, dy, w, x.shape), _conv(self, x, w)


def _conv(like: Convolution, x: Tensor, w: Tensor) -> Tensor:
    return apply(Conv(like.stride, like.padding, like.dilation, like.channel_groups), x, w)


def _input_grad(like: Convolution, dy: Tensor, w: Tensor, x: Shape) -> Tensor:
    op = ConvInputGrad(x[2:], like.stride, like.padding, like.dilation, like.channel_groups)
    return apply(op, dy, w)


def _weight_grad(like: Convolution, x: Tensor, dy: Tensor, w: Shape) -> Tensor:
    op = ConvWeightGrad(w[2:], like.stride, like.padding, like.dilation, like.channel_groups)
    return apply(op, x, dy)


def conv(
    x: Tensor,
    w: Tensor,
    *,
    stride: int | Sequence[int] = 1,
    padding: PaddingLike = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve x (n, c, *size) with w (out, c / groups, *kernel); settings for all dims or each.

    `padding="same"` gives ceil(size / stride) windows.
    """
    dims = x.ndim - 2
    if dims < 1 or w.ndim != x.ndim:
        raise refusal(f"conv takes x (n, c, *size) and w (out, c / groups, *kernel), not {x}, {w}")
    if groups < 1 or x.shape[1] % groups or w.shape[0] % groups:
        raise refusal(
            f"conv: {groups} groups do not divide {x.shape[1]} channels and {w.shape[0]} outputs"
        )
    strides, dilations = per_dim(stride, dims, "stride"), per_dim(dilation, dims, "dilation")
    pairs = pad_windows(padding, x.shape[2:], w.shape[2:], strides, dilations)
    return apply(Conv(strides, pairs, dilations, groups), x, w)
