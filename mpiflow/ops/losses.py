"""Losses, composed of other ops, so that they are right under any layout.

Each gives one number a row, whose mean over the batch is the loss to train on: `mf.mean(rows)`,
or `mf.weighted_mean(rows, weight)` where rows do not count alike.
"""

from __future__ import annotations

from math import cos, pi, sin

from mpiflow.graph.tensor import Tensor, is_narrow
from mpiflow.ops.activation import absolute, softplus
from mpiflow.ops.base import refusal
from mpiflow.ops.elementwise import divide, log, scale, sqrt, square
from mpiflow.ops.entropy import EntropySums
from mpiflow.ops.index import pick
from mpiflow.ops.random import fill
from mpiflow.ops.reduction import mean, reduce_max, reduce_sum
from mpiflow.ops.scatter import add_at
from mpiflow.ops.select import clip, greater, keep, not_equal, where
from mpiflow.ops.shape import cast, stop_gradient


def cross_entropy(
    logits: Tensor,
    label: Tensor,
    *,
    smoothing: float = 0.0,
    ignore: int | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """-log softmax(logits)[label] of each row: logits (..., c), label (...) integers -> (...).

    `smoothing` gives that share of the label evenly to all classes. Rows whose label is `ignore`
    get zero, and rows are multiplied by `weight` (...). Split over the classes, only one maximum,
    one sum and one picked entry a row travel.
    """
    if not 0 <= smoothing < 1:
        raise refusal(f"cross_entropy: smoothing is a share from 0 to below 1, not {smoothing!r}")
    with logits.graph.scope("cross_entropy"):
        counted = None
        if ignore is not None:
            counted = not_equal(label, ignore)
            label = where(counted, label, 0)
        if is_narrow(logits.dtype):
            logits = cast(logits, "float32")
        highest = stop_gradient(reduce_max(logits, -1))
        op = EntropySums(1.0 - smoothing, smoothing / logits.shape[-1])
        _, sums, target = logits.graph.add(op, logits, highest, label)
        rows = log(sums) - target
        if counted is not None:
            rows = keep(rows, counted)
        return rows if weight is None else rows * weight


def mean_cross_entropy(
    logits: Tensor,
    label: Tensor,
    *,
    smoothing: float = 0.0,
    ignore: int | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """The mean of `cross_entropy` over the rows that count, weighted by `weight`.

    What the rows count together depends on labels and weights only.
    """
    rows = cross_entropy(logits, label, smoothing=smoothing, ignore=ignore)
    with logits.graph.scope("mean_cross_entropy"):
        if ignore is not None:
            counted = cast(not_equal(label, ignore), rows.dtype)
            weight = counted if weight is None else weight * counted
        return mean(rows) if weight is None else weighted_mean(rows, weight)


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """The sum of x times weight, over the sum of the weights; zero where that is zero.

    `weight`, of the shape of x and without a gradient, must follow from the inputs of the model.
    """
    if x.shape != weight.shape:
        raise refusal(f"weighted_mean: {x} needs a weight of its shape, not {weight}")
    weight = stop_gradient(cast(weight, x.dtype))
    total = reduce_sum(weight)
    none = not_equal(total, 0.0)
    return divide(reduce_sum(x * weight), where(none, total, 1.0))


def binary_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """-log of the probability of targets from 0 to 1 of the same shape, a mean of each row."""
    return _row_mean(softplus(logits) - logits * _target(logits, target))


def mse(x: Tensor, y: Tensor) -> Tensor:
    """The squared difference, a mean of each row: (n, ...), (n, ...) -> (n,)."""
    return _row_mean(square(x - _target(x, y)))


def l1(x: Tensor, y: Tensor) -> Tensor:
    """The absolute difference, a mean of each row: (n, ...), (n, ...) -> (n,)."""
    return _row_mean(absolute(x - _target(x, y)))


def huber(x: Tensor, y: Tensor, *, delta: float = 1.0) -> Tensor:
    """d^2/2 for differences d up to delta, then delta (|d| - delta/2); a mean of each row."""
    if delta <= 0:
        raise refusal(f"huber: delta is above 0, not {delta!r}")
    d = absolute(x - _target(x, y))
    near = clip(d, high=float(delta))
    return _row_mean(near * (d - scale(near, 0.5)))


def _target(x: Tensor, target: Tensor) -> Tensor:
    if x.shape != target.shape:
        raise refusal(f"the loss compares {x} with {target}; their shapes must be equal")
    return cast(target, x.dtype)


def _row_mean(x: Tensor) -> Tensor:
    return mean(x, tuple(range(1, x.ndim))) if x.ndim > 1 else x


def cos_margin(
    cosines: Tensor, label: Tensor, *, margin: float = 0.35, scale_by: float = 64.0
) -> Tensor:
    """CosFace (Wang et al. 2018): logits s cos, with s (cos - margin) at the label.

    `cosines` (n, classes) are products of normalised features and class weights; see `normalise`.
    """
    offset = fill(label.shape, -margin, cosines.dtype)
    return scale(add_at(cosines, offset, label), scale_by)


def arc_margin(
    cosines: Tensor, label: Tensor, *, margin: float = 0.5, scale_by: float = 64.0
) -> Tensor:
    """ArcFace (Deng et al. 2019): logits s cos(angle), with s cos(angle + margin) at the label.

    Where the angle plus the margin passes pi, cos - margin sin(margin) takes over, which keeps
    falling. `cosines` (n, classes) are products of normalised features and class weights.
    """
    if not 0 <= margin < pi:
        raise refusal(f"arc_margin: the margin is an angle from 0 to below pi, not {margin!r}")
    with cosines.graph.scope("arc_margin"):
        cosine = pick(cosines, label)
        # Rounding can take a cosine past 1, and at 1 the root has no finite gradient.
        sine = sqrt(clip(1.0 - square(cosine), low=1e-9))
        turned = scale(cosine, cos(margin)) - scale(sine, sin(margin))
        past = cosine - margin * sin(pi - margin)
        target = where(greater(cosine, cos(pi - margin)), turned, past)
        return scale(add_at(cosines, target - cosine, label), scale_by)
