"""Two plans side by side: what the change of each figure is made of, and which layouts differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from mpiflow.graph.mesh import Mesh
from mpiflow.graph.sbp import B, Layout
from mpiflow.plan.breakdown import Breakdown, Item, breakdowns
from mpiflow.plan.diff import differences
from mpiflow.plan.records import Plan, Register
from mpiflow.plan.text import table

_SHOWN = 10
"""Items, layouts and lines of a kind that are told one by one."""
_WIDTH = 100  # characters of a line


_Kind = tuple[str, Iterable[Register], Mesh, Iterable[Register], Mesh]


@dataclass(frozen=True, slots=True)
class Relaid:
    """Variables, or tensors of the training step, whose layouts differ in the same way."""

    kind: str
    change: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `mpiflow diff` shows; `lines` are all differences, those of a kind together."""

    breakdowns: tuple[Breakdown, ...]
    layouts: tuple[Relaid, ...]
    lines: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        parts = [_breakdown(each) for each in self.breakdowns]
        parts.append(_layouts(self.layouts))
        parts.append(_lines(self.lines))
        return "\n\n".join("\n".join(part) for part in parts if part)

    def plain(self) -> dict[str, Any]:
        """For --json: items are counted in the quantum of their breakdown, so they add up."""
        return {
            "equal": False,
            "differences": [line for group in self.lines for line in group],
            "breakdowns": [
                {
                    "title": each.title,
                    "unit": each.unit,
                    "quantum": each.quantum,
                    "notes": list(each.notes),
                    "items": [_plain(item) for item in each.items],
                    "total": _plain(each.total),
                }
                for each in self.breakdowns
            ],
            "layouts": [
                {"kind": each.kind, "change": each.change, "names": list(each.names)}
                for each in self.layouts
            ],
        }


def compare(a: Plan, b: Plan) -> Comparison | None:
    """How two plans differ; None where they are equal."""
    lines = differences(a, b)
    if not lines:
        return None
    return Comparison(
        tuple(breakdowns(a, b)), tuple(relaid(a, b)), tuple(tuple(group) for group in lines)
    )  # fmt: skip


def relaid(a: Plan, b: Plan) -> list[Relaid]:
    """The variables and tensors that both plans have in different layouts, by what changes."""
    ours, theirs = a.program("train"), b.program("train")
    kinds: list[_Kind] = [("variable", a.variables, a.mesh, b.variables, b.mesh)]
    if ours and theirs:
        meshes = a.mesh_of(ours), b.mesh_of(theirs)
        kinds.append(
            ("tensor", _made(ours.registers), meshes[0], _made(theirs.registers), meshes[1])
        )
    found = []
    for kind, before, mesh_a, after, mesh_b in kinds:
        layouts = {register.name: register.layout for register in after}
        groups: dict[str, list[str]] = {}
        for register in before:
            if register.name in layouts:
                change = _change(register.layout, mesh_a, layouts[register.name], mesh_b)
                groups.setdefault(change, []).append(register.name)
        found += [Relaid(kind, how, tuple(names)) for how, names in groups.items() if how]
    return sorted(found, key=lambda each: (each.kind != "variable", -len(each.names)))


def _made(registers: Iterable[Register]) -> tuple[Register, ...]:
    """Without those of conversions, which are named after a layout."""
    return tuple(register for register in registers if ">" not in register.name)


def _change(a: Layout, mesh_a: Mesh, b: Layout, mesh_b: Mesh) -> str:
    """`B -> S(1) on model`; an axis that one of the meshes does not have leaves tensors whole."""
    before, after = dict(zip(mesh_a.names, a, strict=True)), dict(zip(mesh_b.names, b, strict=True))
    return ", ".join(
        f"{before.get(axis, B)} -> {after.get(axis, B)} on {axis}"
        for axis in dict.fromkeys((*mesh_a.names, *mesh_b.names))
        if before.get(axis, B) != after.get(axis, B)
    )


# -- text -----------------------------------------------------------------------------------------


def _plain(item: Item) -> dict[str, Any]:
    return {"name": item.name, "a": item.a, "b": item.b, "change": item.change}


def _breakdown(each: Breakdown) -> list[str]:
    """A table whose columns add up; items that do not change are one line."""
    total = each.total
    changed = sorted((i for i in each.items if i.change), key=lambda i: -abs(i.change))
    if not changed:
        return []
    shown, more = changed[:_SHOWN], changed[_SHOWN:]
    if len(more) > 1:
        shown.append(_together(f"... and {len(more)} more, together", more))
    else:
        shown += more
    same = [item for item in each.items if not item.change]
    if same:
        shown.append(_together(f"{len(same)} that do not change", same))
    text = _text_of(each)
    rows = [
        (item.name, text(item.a), text(item.b), f"{item.change:+}"[0] + text(abs(item.change)))
        if item.change
        else (item.name, text(item.a), text(item.b), "")
        for item in [*shown, total]
    ]
    heads = (each.title, ">first", ">second", ">change")
    first, *lines = table(rows, heads)
    return [first[2:], *lines, *(f"  {note}" for note in each.notes)]


def _together(name: str, items: Sequence[Item]) -> Item:
    return Item(name, sum(i.a for i in items), sum(i.b for i in items))


def _text_of(each: Breakdown) -> Any:
    """Counts as text: seconds in one unit for all, with the digits of the quantum; whole bytes."""
    if each.unit == "B":
        return lambda count: f"{count:,} B"
    largest = max(each.total.a, each.total.b) * each.quantum
    unit, size = next(
        (pair for pair in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if largest >= pair[1]),
        ("ns", 1e-9),
    )
    decimals = max(0, round(log10(size / each.quantum)))
    return lambda count: f"{count * each.quantum / size:,.{decimals}f} {unit}"


def _layouts(layouts: Sequence[Relaid]) -> list[str]:
    if not layouts:
        return []
    rows = []
    for each in layouts[:_SHOWN]:
        plural = "s" * (len(each.names) > 1)
        rows.append((each.change, f"{len(each.names)} {each.kind}{plural}", _some(each.names)))
    lines = ["layouts", *table(rows)]
    rest = layouts[_SHOWN:]
    if rest:
        count = sum(len(each.names) for each in rest)
        lines.append(f"  ... and {len(rest)} more changes, of {count} variables and tensors")
    return lines


def _some(names: Sequence[str]) -> str:
    """The first names, as many as fit in half a line."""
    shown: list[str] = []
    for name in names:
        if shown and len(", ".join([*shown, name])) > _WIDTH // 2:
            return f"{', '.join(shown)}, ... and {len(names) - len(shown)} more"
        shown.append(name)
    return ", ".join(shown)


def _lines(groups: Sequence[Sequence[str]]) -> list[str]:
    lines: list[str] = []
    for group in groups:
        shown = group if len(group) == _SHOWN + 1 else group[:_SHOWN]
        lines += map(_short, shown)
        if len(group) > _SHOWN + 1:
            lines.append(f"... and {len(group) - _SHOWN} more of this kind (all with --json)")
    return lines


def _short(line: str) -> str:
    """A line without the middle of each value, where they are long lists."""
    if len(line) <= 2 * _WIDTH:
        return line
    sides = line.split(" -> ", 1)
    room = 2 * _WIDTH // len(sides) - 4
    half = room // 2 - 3
    cut = (side if len(side) <= room else f"{side[:half]} ... {side[-half:]}" for side in sides)
    return " -> ".join(cut)
