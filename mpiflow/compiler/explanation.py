"""What `mpiflow plan --explain` shows: its records, as text and as plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import inf, isinf
from typing import Any

from mpiflow.compiler.domains import Choice
from mpiflow.graph.sbp import Layout, layout_text
from mpiflow.plan.text import size_text, table, time_text

NOT_HINTED = "not as hinted"
"""The remark on a candidate that a hint forbids."""
_WIDTH = 100  # characters of a line
_LEAST = 20  # of which layouts, or names, get these at least
_SAME = 1e-9  # the share of a total that is but rounding


@dataclass(frozen=True, slots=True)
class Candidate:
    """Layouts that a node or source could have.

    Seconds are of a step: of its kernels, and of the conversions around it to what the others have
    chosen. `nbytes` is what a rank keeps. `total` is of the whole program, if it has to have this
    one and all others may change; infinite where that is impossible, and None where it was not
    solved. `remark` says why it is not possible, or not allowed.
    """

    layouts: Choice
    kernels: float
    conversions: float
    nbytes: int
    total: float | None
    chosen: bool
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One task of a conversion; `nbytes` and `seconds` are of all its firings in a step."""

    op: str
    axis: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a tensor comes from the layout in which it is made to the one in which it is taken.

    `share` of its seconds counts where nobody waits for it soon.
    """

    tensor: str
    maker: str
    reader: str
    source: Layout
    target: Layout
    share: float
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """What it counts for in the choice of layouts."""
        return self.share * sum(step.seconds for step in self.steps)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `mpiflow plan --explain` shows; candidates best first.

    `total` is that of the layouts chosen, and none has less than `lower`. `left_out` are
    candidates that were not solved for and are not listed.
    """

    program: str
    kind: str
    name: str
    op: str
    where: str
    tensors: tuple[str, ...]
    axes: tuple[str, ...]
    total: float
    lower: float
    candidates: tuple[Candidate, ...]
    left_out: int
    takes: tuple[Conversion, ...]
    gives: tuple[Conversion, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*_heading(self), "", *_candidates(self), "", *_conversions(self)])

    def plain(self) -> dict[str, Any]:
        """For --json; a total that cannot be, or was not found, is null."""
        return {
            "program": self.program,
            "kind": self.kind,
            "name": self.name,
            "op": self.op,
            "where": self.where,
            "tensors": list(self.tensors),
            "axes": list(self.axes),
            "seconds": self.total,
            "lower_seconds": self.lower,
            "candidates": [
                {
                    "inputs": [layout_text(x) for x in c.layouts.inputs],
                    "outputs": [layout_text(x) for x in c.layouts.outputs],
                    "kernel_seconds": c.kernels,
                    "conversion_seconds": _finite(c.conversions),
                    "bytes": c.nbytes,
                    "total_seconds": _finite(c.total),
                    "chosen": c.chosen,
                    "remark": c.remark,
                }
                for c in self.candidates
            ],
            "not_solved": self.left_out,
            "takes": [_plain_conversion(c, c.maker) for c in self.takes],
            "gives": [_plain_conversion(c, c.reader) for c in self.gives],
            "notes": list(self.notes),
        }


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or isinf(seconds) else seconds


def _plain_conversion(conversion: Conversion, other: str) -> dict[str, Any]:
    return {
        "tensor": conversion.tensor,
        "with": other,
        "source": layout_text(conversion.source),
        "target": layout_text(conversion.target),
        "share": conversion.share,
        "seconds": conversion.seconds,
        "steps": [
            {"op": s.op, "axis": s.axis, "bytes_sent": s.nbytes, "seconds": s.seconds}
            for s in conversion.steps
        ],
    }


def _heading(e: Explanation) -> list[str]:
    op = f", {e.op}" if e.op else ""
    best = "proven best" if e.lower >= e.total else f"none below {time_text(e.lower)}"
    line = f" ({e.where})" if e.where else ""
    notes = [line for note in e.notes for line in _wrapped(note, "  - ", "    ")]
    return [
        *_wrapped(f"{e.kind} {e.name} of program {e.program}{op}{line}", "", "  "),
        *_wrapped("; ".join(e.tensors), "  ", "  "),
        f"  layouts are by axis: {', '.join(e.axes)}",
        f"  the program: {time_text(e.total)}, the sum of its kernels and conversions, {best}",
        *notes,
    ]


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Lines that begin so; no word is broken, as names are words."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _candidates(e: Explanation) -> list[str]:
    """The table of candidates; layouts that are too long, and remarks, go on below."""
    heads = ("", "layouts", ">kernels", ">conversions", ">kept", ">program", ">more")
    rows = [_candidate(c, e.total) for c in e.candidates]
    figures = [(mark, "layouts", *rest) for mark, _, *rest in rows]
    room = max(_WIDTH - max(map(len, table(figures, heads))) + len("layouts"), _LEAST)
    lines: list[tuple[str, ...]] = []
    for (mark, layouts, *rest), candidate in zip(rows, e.candidates, strict=True):
        first, *more = (text.replace("\0", " ") for text in textwrap.wrap(layouts, room))
        if mark == "x":
            more += textwrap.wrap(f"({candidate.remark})", room)
        lines += [(mark, first, *rest), *(("", text, *[""] * 5) for text in more)]
    shown = table(lines, heads)
    if e.left_out:
        shown.append(
            f"  ... and {e.left_out} more, which cost more with what the others have chosen"
        )
    marks = {"*": "* chosen", "h": f"h {NOT_HINTED}", "x": "x impossible"}
    used = [text for mark, text in marks.items() if any(row[0] == mark for row in rows)]
    return [f"candidates, best first ({', '.join(used)})", *shown]


def _candidate(c: Candidate, chosen: float) -> tuple[str, ...]:
    mark = "*" if c.chosen else "h" if c.remark == NOT_HINTED else "x" if c.remark else ""
    total = "?" if c.total is None else _seconds(c.total)
    more = ""
    if not c.chosen and c.total is not None and c.total < inf:
        change = c.total - chosen
        more = f"{'+' if change >= 0 else '-'}{time_text(abs(change))}"
        more = "same" if abs(change) <= _SAME * chosen else more
    return (
        mark, _choice(c.layouts), _seconds(c.kernels), _seconds(c.conversions),
        size_text(c.nbytes), total, more,
    )  # fmt: skip


def _seconds(seconds: float) -> str:
    return "-" if isinf(seconds) else time_text(seconds)


def _choice(choice: Choice) -> str:
    """`S(0) B, 2 of B B -> S(0) B`: equal layouts in a row are counted.

    The spaces in a layout, where no line may end, are zeros.
    """
    sides = [_layouts(choice.inputs), _layouts(choice.outputs)]
    return " -> ".join(side for side in sides if side)


def _layouts(layouts: Iterable[Layout]) -> str:
    runs = ((layout, len(list(run))) for layout, run in groupby(layouts))
    texts = ((f"{n} of " if n > 1 else "") + layout_text(layout) for layout, n in runs)
    return ", ".join(text.replace(" ", "\0") for text in texts)


def _conversions(e: Explanation) -> Iterator[str]:
    """What stands before and behind, with a line for each task of a conversion."""
    sides = [("takes", c.tensor, c) for c in e.takes] + [("gives", c.reader, c) for c in e.gives]
    rows = []
    for what, name, c in sides:
        first, *more = _steps(c)
        rows.append((what, name, f"{layout_text(c.source)} -> {layout_text(c.target)}", *first))
        rows += [("", "", "", *cells) for cells in more]
    heads = ("", "", "", "by", ">sent", ">time", ">counts")
    room = _WIDTH - max(map(len, table([(r[0], "", *r[2:]) for r in rows], heads)), default=0)
    yield "conversions: layouts as made -> as taken"
    yield from table([(r[0], _end(r[1], max(room, _LEAST)), *r[2:]) for r in rows], heads)


def _end(name: str, room: int) -> str:
    """The end of a name that is too long."""
    return name if len(name) <= room else f"...{name[3 - room :]}"


def _steps(conversion: Conversion) -> list[tuple[str, ...]]:
    if not conversion.steps:
        return [("as it is", "", "", "")]
    share = f"{conversion.share:.0%}" if conversion.share < 1 else ""
    return [
        (f"{s.op} {s.axis}".strip(), size_text(s.nbytes) if s.nbytes else "",
         time_text(s.seconds), share)
        for s in conversion.steps
    ]  # fmt: skip
