"""Convolutions in 1, 2, 3 or more dims: x (n, c, *size), w (out, c / groups, *kernel).

As everywhere in deep learning the kernel is not flipped. The three ops are the gradients of one
another, so they can be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import ShardView, op
from mpiflow.graph.rule import Rule, Shape
from mpiflow.graph.tensor import Tensor
from mpiflow.ops.base import Gradients, Tensors, apply, refusal, require_float
from mpiflow.ops.im2col import (
    Geometry,
    convolve,
    input_gradient,
    input_workspace,
    weight_gradient,
    weight_workspace,
)
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
    and what may be split is the groups.
    """

    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    channel_groups: int
    linear = ((0,), (1,))

    def dtypes(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        require_float(self, dtypes)
        return super().dtypes(dtypes)

    def sizes(self) -> dict[str, int]:
        return {"g": self.channel_groups} if self.channel_groups > 1 else {}

    def unsplittable(self, rule: Rule) -> frozenset[str]:
        return frozenset(x for x in rule.letters if x[0] in "skt")

    def operands(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """The dims of x, w and y."""
        dims = len(self.stride)
        c, o = (("g", "c"), ("g", "o")) if self.channel_groups > 1 else (("c",), ("o",))
        return (
            (("n",), c, *letters("s", dims)),
            (o, ("c",), *letters("k", dims)),
            (("n",), o, *letters("t", dims)),
        )

    def run(self, shard: ShardView, out: Any, x: Any, y: Any) -> None:
        """The kernel on arrays of float32 or float64."""
        raise NotImplementedError(self.name)

    def compute(self, shard: ShardView, out: Any, *arrays: Any) -> Callable[[], Any]:
        return partial(self.run, shard, out, *arrays)

    def check_rank(self, shapes: tuple[Shape, ...]) -> None:
        """Raise unless all operands have a batch, a channel and the spatial dims."""
        if any(len(shape) != len(self.stride) + 2 for shape in shapes):
            raise GraphError(
                f"{self.name} over {len(self.stride)} spatial dims takes operands of"
                f" {len(self.stride) + 2} dims, not {' and '.join(map(str, shapes))}"
            )

    def geometry(self, x: Shape, w: Shape, y: Shape) -> Geometry:
        """The convolution on local shapes; a rank may hold some of the groups."""
        groups = w[0] and x[1] // w[1] if self.channel_groups > 1 and w[1] else 1
        outputs = w[0] // max(groups, 1)
        return Geometry(
            x[0], groups, w[1], outputs, x[2:], w[2:], y[2:],
            self.stride, self.padding, self.dilation,
        )  # fmt: skip


@op
class Conv(Convolution):
    """Every window of x (n, c, *size) times w (out, c / groups, *kernel) -> (n, out, *windows)."""

    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    channel_groups: int = 1

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        self.check_rank(shapes)
        x, w, y = self.operands()
        return Rule((x, w), (y,))

    def windows(self, shapes: tuple[Shape, ...]) -> Shape:
        x, w = shapes
        return count_windows(self.name, x[2:], w[2:], self.stride, self.padding, self.dilation)

    def scratch(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        at = self.geometry(*inputs, *outputs)
        return 0 if at.pointwise else at.workspace(dtype)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return _flops(inputs[1], outputs[0])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (x, w), (dy,) = inputs, dys
        return _input_grad(self, dy, w, x.shape), _weight_grad(self, x, dy, w.shape)

    def run(self, shard: ShardView, out: Any, x: Any, w: Any) -> None:
        if not x.size or not w.size or not out.size:
            out.fill(0)
            return
        convolve(shard.xp, shard.work, out, x, w, self.geometry(x.shape, w.shape, out.shape))


@op
class ConvInputGrad(Convolution):
    """The gradient of `Conv` for x: dy (n, out, *windows), w -> (n, c, *size)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    channel_groups: int = 1

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        self.check_rank(shapes)
        x, w, y = self.operands()
        return Rule((y, w), (x,))

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {f"s{i}": n for i, n in enumerate(self.size)}

    def windows(self, shapes: tuple[Shape, ...]) -> Shape:
        return shapes[0][2:]

    def scratch(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return input_workspace(self.geometry(outputs[0], inputs[1], inputs[0]), dtype)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return _flops(inputs[1], inputs[0])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (dy, w), (x,) = inputs, dys
        return _conv(self, x, w), _weight_grad(self, x, dy, w.shape)

    def run(self, shard: ShardView, out: Any, dy: Any, w: Any) -> None:
        if not dy.size or not w.size or not out.size:
            out.fill(0)
            return
        at = self.geometry(out.shape, w.shape, dy.shape)
        input_gradient(shard.xp, shard.work, out, dy, w, at)


@op
class ConvWeightGrad(Convolution):
    """The gradient of `Conv` for w: x, dy -> (out, c / groups, *size), size being the kernel's."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    channel_groups: int = 1

    def pattern(self, shapes: tuple[Shape, ...]) -> Rule:
        self.check_rank(shapes)
        x, w, y = self.operands()
        return Rule((x, y), (w,))

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {f"k{i}": n for i, n in enumerate(self.size)}

    def windows(self, shapes: tuple[Shape, ...]) -> Shape:
        return shapes[1][2:]

    def scratch(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], dtype: str) -> int:
        return weight_workspace(self.geometry(inputs[0], outputs[0], inputs[1]), dtype)

    def flops(self, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> int:
        return _flops(outputs[0], inputs[1])

    def grad(self, inputs: Tensors, outputs: Tensors, dys: Tensors) -> Gradients:
        (x, dy), (w,) = inputs, dys
        return _input_grad(self, dy, w, x.shape), _conv(self, x, w)

    def run(self, shard: ShardView, out: Any, x: Any, dy: Any) -> None:
        if not x.size or not dy.size or not out.size:
            out.fill(0)
            return
        at = self.geometry(x.shape, out.shape, dy.shape)
        weight_gradient(shard.xp, shard.work, out, x, dy, at)


def _flops(w: Shape, y: Shape) -> int:
    """A multiplication and an addition for every weight in every window."""
    return 2 * prod(w) * y[0] * prod(y[2:])


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
