"""SBP: how the parts of a tensor on the ranks of one mesh axis make up the whole.

    S(dim)   split      each rank holds one span of `dim`
    B        broadcast  each rank holds all of it
    P        partial    the whole is the sum (or the maximum) of what the ranks hold; P(union): a
                        list of entries, of which each rank holds those of the rows that it has of
                        a table, with padding behind them

A layout is one SBP per mesh axis, outermost axis first; where two axes split the same dim, the
inner one splits the span that the outer one left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpiflow.errors import SbpError


@dataclass(frozen=True, slots=True)
class S:
    """Split along `dim`; every span is a multiple of `unit` (the width of a head, say)."""

    dim: int
    unit: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.unit == 1 else f"S({self.dim},unit={self.unit})"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every rank holds the whole; write it `B`."""

    def __str__(self) -> str:
        return "B"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Partial:
    """The whole is the sum, the maximum or the union over the ranks; write the sum `P`."""

    reduce: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P({self.reduce})"

    __repr__ = __str__


Sbp = S | Broadcast | Partial
Layout = tuple[Sbp, ...]
B = Broadcast()
P = Partial()
UNION = Partial("union")

_TEXT = re.compile(r"S\((\d+)(?:,unit=(\d+))?\)|B|P(?:\((sum|max|union)\))?")


def parse(text: str) -> Sbp:
    """The SBP that `str` of it gave."""
    match = _TEXT.fullmatch(text)
    if not match:
        raise SbpError(f"{text!r} is no SBP; write S(dim), B, P or P(max)")
    dim, unit, reduce = match.groups()
    if text.startswith("S"):
        return S(int(dim), int(unit or 1))
    return B if text == "B" else Partial(reduce or "sum")


def layout_text(layout: Layout) -> str:
    """A layout as the plan writes it: `S(0) B`."""
    return " ".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    """The layout that `layout_text` wrote."""
    return tuple(parse(part) for part in text.split())


def span(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` when `size` elements are divided into `parts`.

    The first `size % parts` parts are one longer; where `size < parts` the last ones are empty.
    """
    base, extra = divmod(size, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def unit_span(size: int, unit: int, parts: int, index: int) -> tuple[int, int]:
    """`span` in multiples of `unit`."""
    if size % unit:
        raise SbpError(f"a dim of {size} cannot be split in units of {unit}")
    start, stop = span(size // unit, parts, index)
    return start * unit, stop * unit


Box = tuple[tuple[int, int], ...]


def shard_box(
    shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...], coordinates: tuple[int, ...]
) -> Box:
    """(start, stop) of each dim that the rank at `coordinates` of a mesh of `sizes` holds."""
    box = [(0, n) for n in shape]
    for sbp, parts, index in zip(layout, sizes, coordinates, strict=True):
        if isinstance(sbp, S):
            first, last = box[sbp.dim]
            start, stop = unit_span(last - first, sbp.unit, parts, index)
            box[sbp.dim] = first + start, first + stop
    return tuple(box)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)
