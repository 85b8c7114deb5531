"""Machine files: TOML, checked value by value; docs/machines.md says what each key means.

name, nodes, devices_per_node, process_bytes
[device]        memory_bytes, memory_bandwidth, launch_seconds, matrix_flops, vector_flops,
                kernels, crowding
[links]         hierarchical, overlap, route
[links.inner]   latency_seconds, bandwidth, call_seconds, messages, overhead, [[collectives]];
                [links.outer] alike
[host_link]     latency_seconds, bandwidth; [storage] alike
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpiflow.compiler.machine import Curve, Kernel, Link, Machine, Measured, Piece
from mpiflow.compiler.tomltable import Table
from mpiflow.errors import UsageError
from mpiflow.graph.op import REGISTRY
from mpiflow.graph.tensor import DTYPES
from mpiflow.plan.places import ROUTES

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The collectives that a link may have curves for."""

_TOP = ("name", "nodes", "devices_per_node", "process_bytes", "device", "links", "host_link",
        "storage")  # fmt: skip
_DEVICE = ("memory_bytes", "memory_bandwidth", "launch_seconds", "matrix_flops", "vector_flops",
           "kernels", "crowding")  # fmt: skip
_LINKS = ("inner", "outer", "hierarchical", "overlap", "route")
_LINK = ("latency_seconds", "bandwidth", "call_seconds", "messages", "overhead", "collectives")
_COLLECTIVE = ("kind", "members", "curve")
_PORT = ("latency_seconds", "bandwidth")


def load(path: Path, *, built_in: bool = False) -> Machine:
    """The machine of a file; UsageError, with file and key, for whatever it cannot mean.

    A plan keeps a machine's name only, so that of a file which is not built in ends with the first
    digits of its digest: figures that were changed in between show.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; a machine file is wanted") from error
    machine = parse(content, str(path))
    if built_in:
        return machine
    return replace(machine, name=f"{machine.name} {hashlib.sha256(content).hexdigest()[:8]}")


def parse(content: bytes, file: str) -> Machine:
    """The machine that TOML text describes; `file` is for messages."""
    try:
        values = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: this is no TOML: {error}") from error
    top = Table(values, _TOP, file)
    device, links = top.table("device", _DEVICE), top.table("links", _LINKS)
    storage = top.table("storage", _PORT)
    inner = _link(links.table("inner", _LINK))
    machine = Machine(
        name=top.text("name"),
        nodes=top.whole("nodes", 0),
        devices_per_node=top.whole("devices_per_node", 0),
        process_bytes=top.whole("process_bytes"),
        flops=_rates(device, "matrix_flops"),
        vector_flops=_rates(device, "vector_flops") if "vector_flops" in device.values else (),
        kernels=_kernels(device),
        memory=device.positive("memory_bandwidth"),
        memory_bytes=device.whole("memory_bytes", 0),
        launch=device.number("launch_seconds"),
        inner=inner,
        outer=_link(links.table("outer", _LINK)) if "outer" in links.values else inner,
        hierarchical=links.truth("hierarchical", default=False),
        overlap=links.truth("overlap", default=True),
        route=_route(links),
        crowding=_crowding(device),
        host_link=_port(top.table("host_link", _PORT)) if "host_link" in values else None,
        storage=storage.positive("bandwidth"),
        read_latency=storage.number("latency_seconds"),
    )
    if machine.nodes and not machine.devices_per_node:
        raise UsageError(
            f"{file}: nodes is {machine.nodes}, and devices_per_node is missing; say how many"
            " ranks a node takes"
        )
    return machine


def _route(links: Table) -> str:
    route = links.text("route") if "route" in links.values else ""
    if route and route not in ROUTES:
        raise links.wrong("route", route, f"one of {', '.join(ROUTES)}")
    return route


def _link(table: Table) -> Link:
    measured = tuple(_measured(entry) for entry in table.tables("collectives", _COLLECTIVE))
    port, call = _port(table), table.number("call_seconds", 0.0)
    messages, overhead = (
        _curve(table, key, free=key == "overhead") if key in table.values else None
        for key in ("messages", "overhead")
    )
    return replace(port, call=call, measured=measured, messages=messages, overhead=overhead)


def _port(table: Table) -> Link:
    return Link(table.number("latency_seconds"), table.positive("bandwidth"))


def _measured(table: Table) -> Measured:
    kind, members = table.text("kind"), table.whole("members")
    if kind not in KINDS:
        raise table.wrong("kind", kind, f"one of {', '.join(KINDS)}")
    if members < 2:
        raise table.wrong("members", members, "2 or more: one rank sends nothing")
    return Measured(kind, members, _curve(table, "curve"))


def _rates(device: Table, key: str) -> tuple[tuple[str, float], ...]:
    table = device.table(key, DTYPES)
    if not table.values:
        raise device.wrong(key, {}, "operations a second by dtype, such as { float32 = 6e10 }")
    return tuple((dtype, table.positive(dtype)) for dtype in table.values)


def _kernels(device: Table) -> dict[str, Kernel]:
    table = device.table("kernels", sorted(REGISTRY), needed=False)
    kernels = {}
    for op, value in table.values.items():
        if not isinstance(value, list) or len(value) != 2:
            raise table.wrong(op, value, "[seconds of a call, times the roofline]")
        kernels[op] = Kernel(*(table.checked(op, number) for number in value))
    return kernels


def _crowding(device: Table) -> tuple[tuple[int, float], ...]:
    if "crowding" not in device.values:
        return ()
    value = device.take("crowding")
    pairs = value if isinstance(value, list) else []
    if not pairs or not all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and pair[0] > 0
        for pair in pairs
    ):
        raise device.wrong("crowding", value, "pairs [ranks on a node, times longer]")
    found = tuple((ranks, device.checked("crowding", by)) for ranks, by in pairs)
    if not all(by for _, by in found):
        raise device.wrong("crowding", value, "above 0 for any number of ranks")
    return found


def _curve(table: Table, key: str, *, free: bool = False) -> Curve:
    """Pieces [start, seconds there, seconds for each more]; starts rise from 0.

    What bytes take rises with them in the end, unless they may be `free`.
    """
    value = table.take(key)
    if not isinstance(value, list) or not value:
        raise table.wrong(key, value, "pieces [start, seconds there, seconds for each more]")
    pieces = tuple(_piece(table, f"{key}[{i}]", entry) for i, entry in enumerate(value))
    starts = [piece.start for piece in pieces]
    if starts[0] or any(b <= a for a, b in pairwise(starts)):
        raise table.wrong(key, value, "pieces whose starts rise from 0")
    if not free and not (pieces[0].seconds and pieces[-1].each):
        raise table.wrong(key, value, "above 0 where it starts, and rise where it ends")
    return Curve(pieces)


def _piece(table: Table, key: str, entry: Any) -> Piece:
    if not isinstance(entry, list) or len(entry) != 3:
        raise table.wrong(key, entry, "[start, seconds there, seconds for each more]")
    return Piece(*(table.checked(key, number) for number in entry))


def to_toml(machine: Machine, remarks: Mapping[str, str] | None = None) -> str:
    """The file of a machine; `remarks` by table ("" is the top) stand above it as comments."""
    remarks = remarks or {}
    outer = None if machine.outer is machine.inner else machine.outer
    sections: list[tuple[str, dict[str, Any]]] = [
        ("", _top(machine)),
        ("device", _device(machine)),
        ("device.kernels", {op: [k.seconds, k.factor] for op, k in machine.kernels.items()}),
        ("links", _link_truths(machine)),
        *_link_sections("links.inner", machine.inner),
        *(_link_sections("links.outer", outer) if outer else ()),
        *((("host_link", _port_values(machine.host_link)),) if machine.host_link else ()),
        ("storage", {"latency_seconds": machine.read_latency, "bandwidth": machine.storage}),
    ]
    texts = [_section(name, values, remarks.get(name, "")) for name, values in sections if values]
    return "\n".join(texts)


def _top(machine: Machine) -> dict[str, Any]:
    values = {"name": machine.name, "nodes": machine.nodes,
              "devices_per_node": machine.devices_per_node}  # fmt: skip
    return {k: v for k, v in values.items() if v} | {"process_bytes": machine.process_bytes}


def _device(machine: Machine) -> dict[str, Any]:
    values = {
        "memory_bytes": machine.memory_bytes or None,
        "memory_bandwidth": machine.memory,
        "launch_seconds": machine.launch,
        "matrix_flops": dict(machine.flops),
        "vector_flops": dict(machine.vector_flops) or None,
        "crowding": [list(pair) for pair in machine.crowding] or None,
    }
    return {key: value for key, value in values.items() if value is not None}


def _link_truths(machine: Machine) -> dict[str, Any]:
    truths: dict[str, Any] = {"hierarchical": True} if machine.hierarchical else {}
    if machine.route:
        truths["route"] = machine.route
    return truths if machine.overlap else {**truths, "overlap": False}


def _link_sections(name: str, link: Link) -> list[tuple[str, dict[str, Any]]]:
    values: dict[str, Any] = {**_port_values(link), "call_seconds": link.call}
    for key, curve in (("messages", link.messages), ("overhead", link.overhead)):
        if curve is not None:
            values[key] = _plain(curve)
    return [(name, values)] + [
        (f"[{name}.collectives]", {"kind": m.kind, "members": m.members, "curve": _plain(m.curve)})
        for m in link.measured
    ]


def _port_values(link: Link) -> dict[str, Any]:
    return {"latency_seconds": link.latency, "bandwidth": link.bandwidth}


def _plain(curve: Curve) -> list[list[float]]:
    return [[piece.start, piece.seconds, piece.each] for piece in curve.pieces]


def _section(name: str, values: dict[str, Any], remark: str) -> str:
    lines = [f"# {line}".rstrip() for line in remark.splitlines()]
    lines += [f"[{name}]"] if name else []
    return "\n".join((*lines, *(f"{key} = {_text(value)}" for key, value in values.items()), ""))


def _text(value: Any) -> str:
    """A value in TOML; floats with four digits, as prices have."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.4g}" if "e" in f"{value:.4g}" or "." in f"{value:.4g}" else f"{value:.1f}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_text(item)}' for key, item in value.items())} }}"
    return str(value)
