"""The gradient of a convolution for x, as convolutions of dy with a stride of 1.

An element p of x is in window t at place k where p + before = t stride + k dilation. So the places
that reach p are those whose k dilation leaves the same remainder by the stride as p + before, and t
falls as k rises: what has one remainder is a convolution of dy with some of the weights, turned
round. With a stride of 1 there is one remainder, and it is all of dx.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd

from mpiflow.ops.tiles import Geometry


@dataclass(frozen=True, slots=True)
class Phase:
    """The elements of x at `places`, and the places in the window that reach them, falling.

    `at` is the convolution that gives them; None where no place does, so that they are zero.
    """

    places: tuple[slice, ...]
    taps: tuple[slice, ...]
    at: Geometry | None


@dataclass(frozen=True, slots=True)
class _Along:
    """The same along one dim, with how many there are of each; paddings may be negative."""

    places: slice
    taps: slice
    windows: int
    kernel: int
    dilation: int
    padding: tuple[int, int]


def phases(at: Geometry) -> Iterator[Phase]:
    """What dx of a convolution consists of."""
    for parts in product(*(list(_along(at, dim)) for dim in range(len(at.kernel)))):
        yield Phase(
            tuple(p.places for p in parts), tuple(p.taps for p in parts), _joined(at, parts)
        )


def _joined(at: Geometry, parts: tuple[_Along, ...]) -> Geometry | None:
    if not all(part.kernel for part in parts):
        return None
    return Geometry(
        at.images, at.groups, at.outputs, at.channels, at.windows,
        tuple(part.kernel for part in parts), tuple(part.windows for part in parts),
        (1,) * len(parts), tuple(part.padding for part in parts),
        tuple(part.dilation for part in parts), apart=any(part.places.step > 1 for part in parts),
    )  # fmt: skip


def _along(at: Geometry, dim: int) -> Iterator[_Along]:
    size, stride, dilation = at.size[dim], at.stride[dim], at.dilation[dim]
    before = at.padding[dim][0]
    for rest in range(stride):
        first = (rest - before) % stride
        windows = len(range(first, size, stride))
        taps = [k for k in range(at.kernel[dim]) if (k * dilation - rest) % stride == 0]
        if not windows:
            continue
        places = slice(first, size, stride)
        if not taps:
            yield _Along(places, slice(0, 0), windows, 0, 1, (0, 0))
            continue
        step, apart = stride // gcd(stride, dilation), dilation // gcd(stride, dilation)
        begin = (first + before - taps[-1] * dilation) // stride
        end = begin + windows + (len(taps) - 1) * apart
        stop = taps[0] - 1 if taps[0] else None
        yield _Along(places, slice(taps[-1], stop, -step), windows, len(taps), apart,
                     (-begin, end - at.windows[dim]))  # fmt: skip
