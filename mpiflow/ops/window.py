"""Windows that slide over the spatial dims of (n, c, *spatial): what conv and pooling share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from mpiflow.errors import GraphError
from mpiflow.graph.op import Op
from mpiflow.graph.rule import Shape
from mpiflow.ops.base import refusal

Padding = tuple[tuple[int, int], ...]
"""How many elements are added before and behind each spatial dim."""
PaddingLike = int | str | Sequence[int] | Sequence[tuple[int, int]]
"""For all dims, for each, (before, behind) for each, or "same": see `pad_windows`."""


class Windowed(Op):
    """Base of ops whose output has one window at each spatial place, letters t0, t1 ...

    The spatial dims are whole: a split one needs rows of its neighbours.
    """

    def windows(self, shapes: tuple[Shape, ...]) -> Shape:
        """The number of windows along each spatial dim, for logical input shapes."""
        raise NotImplementedError

    def infer(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        rule = self.pattern(shapes)
        sizes = rule.sizes(self.name, shapes, self.sizes())
        sizes.update((f"t{i}", n) for i, n in enumerate(self.windows(shapes)))
        return rule.output_shapes(sizes)


def letters(letter: str, dims: int) -> tuple[tuple[str, ...], ...]:
    """Rule letters of `dims` dims: s0, s1 ..."""
    return tuple((f"{letter}{i}",) for i in range(dims))


def count_windows(
    name: str, size: Shape, kernel: Shape, stride: Shape, padding: Padding, dilation: Shape
) -> Shape:
    """How many windows fit into each dim of a padded `size`."""
    counts = []
    for n, k, s, (before, behind), d in zip(size, kernel, stride, padding, dilation, strict=True):
        room = n + before + behind - (k - 1) * d - 1
        if room < 0:
            raise GraphError(
                f"{name}: a kernel of {kernel} with dilation {dilation} does not fit into"
                f" {size} with padding {padding}"
            )
        counts.append(room // s + 1)
    return tuple(counts)


def per_dim(value: int | Sequence[int], dims: int, what: str, least: int = 1) -> tuple[int, ...]:
    """One number for each of `dims` spatial dims."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) != dims or any(not isinstance(n, int) or n < least for n in values):
        raise refusal(f"{what} takes a whole number >= {least}, or {dims} of them, not {value!r}")
    return values


def pad_windows(
    value: PaddingLike, size: Shape, kernel: Shape, stride: Shape, dilation: Shape
) -> Padding:
    """(before, behind) for each dim.

    "same" gives ceil(size / stride) windows; an odd element goes behind.
    """
    dims = len(size)
    if value == "same":
        pairs = []
        for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
            missing = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            pairs.append((missing // 2, missing - missing // 2))
        return tuple(pairs)
    if isinstance(value, str):
        raise refusal(f'padding is numbers or "same", not {value!r}')
    if not isinstance(value, int) and all(isinstance(pair, Sequence) for pair in value):
        if len(value) != dims:
            raise refusal(f"padding takes {dims} pairs, not {value!r}")
        sides = (per_dim(pair, 2, "padding", 0) for pair in value)
        return tuple((before, behind) for before, behind in sides)
    flat = per_dim(value, dims, "padding", 0)  # type: ignore[arg-type]
    return tuple((n, n) for n in flat)


def offsets(kernel: Shape) -> list[tuple[int, ...]]:
    """Every place in a window, in row-major order."""
    return list(product(*map(range, kernel)))


def clipped(
    offset: Shape, size: Shape, windows: Shape, stride: Shape, padding: Padding
) -> tuple[Any, Any]:
    """(slices of x, slices of y): where windows have the element `offset` inside x.

    Leading dims are left whole.
    """
    xs, ys = [], []
    for i, n, t, s, (before, _) in zip(offset, size, windows, stride, padding, strict=True):
        first = max(0, -((i - before) // s))
        last = min(t - 1, (n - 1 - i + before) // s)
        last = max(last, first - 1)
        begin = first * s + i - before
        xs.append(slice(begin, begin + max((last - first) * s + 1, 0), s))
        ys.append(slice(first, last + 1))
    return (..., *xs), (..., *ys)
