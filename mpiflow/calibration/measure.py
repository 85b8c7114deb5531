"""Calibrate: measure a machine on the ranks that were started, and describe it in a file.

rates and ops     kernels.py    every rank at once, the median over ranks
steps             steps.py      one rank alone, and every rank at once
links             links.py      every collective by size, within a host and between
storage           storage.py    the reader of training, every rank at once
fits              fit.py        lines and curves, and how good they are
"""

from __future__ import annotations

import json
import statistics
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpiflow.calibration import messages
from mpiflow.calibration.beside import (
    OVERHEAD,
    OVERHEAD_SIZES,
    QUICK_OVERHEAD_SIZES,
    fit_overhead,
    measure_overhead,
    measure_overlap,
)
from mpiflow.calibration.fit import Fit
from mpiflow.calibration.jobs import Pipeline, pipelines
from mpiflow.calibration.kernels import (
    Call,
    Rates,
    fit_ops,
    measure_ops,
    measure_rates,
    process_base,
)
from mpiflow.calibration.links import (
    QUICK_SIZES,
    SIZES,
    Series,
    fit_link,
    hosts_of,
    measure_links,
)
from mpiflow.calibration.steps import (
    fit_pipelines,
    fit_steps,
    measure_pipelines,
    measure_steps,
    reference_plans,
)
from mpiflow.calibration.storage import fit_storage, time_reads, write_rows
from mpiflow.compiler.machine import Curve, Link, Machine, find_machine
from mpiflow.compiler.machinefile import to_toml
from mpiflow.exec.transport import Transport
from mpiflow.plan.records import Plan
from mpiflow.plan.text import size_text, time_text
from mpiflow.version import __version__


@dataclass(frozen=True, slots=True)
class Options:
    """How to calibrate; `data` is the folder whose storage is measured, None for a cached file."""

    name: str
    quick: bool = False
    data: Path | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured, what was found, and how good the fit is."""

    what: str
    found: str
    fit: Fit | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The machine, its file, and the table of what was measured."""

    machine: Machine
    text: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]


def calibrate(transport: Transport, options: Options) -> Report | None:
    """Collective. Measure; gives rank 0 the report, the others None.

    TaskError on all ranks where a figure makes no sense.
    """
    base = process_base()
    hosts = hosts_of(transport)
    _meet(transport)
    rates = measure_rates(quick=options.quick)
    _meet(transport)
    calls = measure_ops(quick=options.quick)
    plans = reference_plans(quick=options.quick)
    steps = measure_steps(transport, plans)
    links = measure_links(transport, hosts, *_sizes(quick=options.quick))
    overlap = transport.size == 1 or measure_overlap(transport, hosts)
    shared = transport.size > 1 and overlap
    overheads = QUICK_OVERHEAD_SIZES if options.quick else OVERHEAD_SIZES
    beside = measure_overhead(transport, hosts, overheads) if shared else []
    staged = (
        pipelines(transport.size, quick=options.quick) if shared and transport.size % 2 == 0 else []
    )
    passed = measure_pipelines(transport, staged)
    # Once more, some time later: what else disturbs the machine only ever makes steps longer.
    again = measure_steps(transport, plans)
    steps = [list(map(min, *both)) for both in zip(steps, again, strict=True)]
    reads = _measure_reads(transport, hosts, options)
    mine = [base, rates.plain(), [call.seconds for call in calls], reads, steps, passed]
    gathered = transport.gather(json.dumps(mine).encode())
    reports: list[Report] = []

    def describe() -> None:
        ranks = [json.loads(data) for data in gathered or ()]
        bases, theirs, seconds, points, timed, through = zip(*ranks, strict=True)
        measured = _Measured(
            base=max(bases),
            rates=rates.over_ranks(theirs),
            calls=_over_ranks(calls, seconds),
            links=links,
            overlap=overlap,
            overhead=beside,
            pipelines=staged,
            passed=[_slowest(each) for each in zip(*through, strict=True)],
            reads=[(n, statistics.median(t)) for (n, *t) in _columns(points)],
            plans=plans,
            alone=timed[0][0],
            together=[max(each) for each in zip(*(own for _, own in timed), strict=True)],
        )
        reports.append(_report(measured, hosts, options))

    transport.on_root(describe)
    return reports[0] if reports else None


def _sizes(*, quick: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of collectives, and of messages."""
    return (QUICK_SIZES, messages.QUICK_SIZES) if quick else (SIZES, messages.SIZES)


def _meet(transport: Transport) -> None:
    """Collective. Begin together, so that what ranks share is shared while it is measured."""
    transport.barrier().wait(transport.check)


def _over_ranks(calls: Sequence[Call], seconds: Sequence[Sequence[float]]) -> list[Call]:
    return [
        replace(call, seconds=statistics.median(values))
        for call, values in zip(calls, zip(*seconds, strict=True), strict=True)
    ]


def _slowest(ranks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A pipeline's seconds, in stages and alone, of the rank that takes longest."""
    staged, alone = zip(*ranks, strict=True)
    return max(staged), max(alone)


def _columns(points: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, ...]]:
    """Bytes of each batch, and the seconds of every rank."""
    return [
        (rank_points[0][0], *(seconds for _, seconds in rank_points))
        for rank_points in zip(*points, strict=True)
    ]


def _measure_reads(
    transport: Transport, hosts: Sequence[Sequence[int]], options: Options
) -> list[tuple[float, float]]:
    """Collective. Read files that rank 0 wrote into the folder, or one rank of each host here."""
    home = next(ranks for ranks in hosts if transport.rank in ranks)
    writer = 0 if options.data else home[0]
    with ExitStack() as stack:
        path = ""
        if transport.rank == writer:
            made = tempfile.TemporaryDirectory(prefix="mpiflow-calibrate-", dir=options.data)
            path = stack.enter_context(made)
            write_rows(Path(path), quick=options.quick)
        folder = Path(transport.all_gather(path.encode())[writer].decode())
        points = time_reads(folder, forget=options.data is not None)
        _meet(transport)  # before the writer removes the files
    return points


@dataclass(frozen=True, slots=True)
class _Measured:
    """What all ranks measured, the median over them; `base` is the largest."""

    base: int
    rates: Rates
    calls: list[Call]
    links: Mapping[str, Sequence[Series]]
    overlap: bool
    overhead: Sequence[tuple[int, float]]
    pipelines: Sequence[Pipeline]
    passed: Sequence[tuple[float, float]]
    reads: list[tuple[float, float]]
    plans: Sequence[Plan]
    alone: Sequence[float]
    together: Sequence[float]


def _report(measured: _Measured, hosts: Sequence[Sequence[int]], options: Options) -> Report:
    rates, storage = measured.rates, fit_storage(measured.reads)
    levels = {level: fit_link(level, s) for level, s in measured.links.items() if s}
    if measured.overhead:
        outermost = "outer" if "outer" in levels else "inner"
        levels[outermost] = fit_overhead(outermost, levels[outermost], measured.overhead)
    guess = find_machine("cpu").inner
    inner = levels["inner"][0] if "inner" in levels else guess
    several = len(hosts) > 1
    bare = Machine(
        name=options.name,
        devices_per_node=max(map(len, hosts)) if several else 0,
        flops=tuple(rates.matrix.items()),
        vector_flops=tuple(rates.vector.items()),
        memory=rates.memory,
        launch=rates.launch,
        inner=inner,
        outer=levels["outer"][0] if several else inner,
        overlap=measured.overlap,
        storage=storage.bandwidth,
        read_latency=storage.latency,
        process_bytes=measured.base,
    )
    kernels, op_fit = fit_ops(bare, measured.calls)
    machine, step_rows = _with_steps(replace(bare, kernels=kernels), measured, hosts)
    machine, pipeline_rows = _with_pipelines(machine, measured)
    remarks = _remarks(hosts, levels, options)
    rows = (
        *_rate_rows(rates),
        Row("ops", f"{len(kernels)} of them, over {len(measured.calls)} kernels", op_fit),
        *step_rows,
        *(row for level, (link, fits) in levels.items() for row in _link_rows(level, link, fits)),
        *_overlap_rows(levels, measured.overlap),
        *pipeline_rows,
        Row("reading", _port_text(storage.latency, storage.bandwidth), storage.fit),
        Row("a rank's process", size_text(measured.base)),
    )
    return Report(machine, _file(machine, rows, remarks, options), rows, remarks)


def _with_steps(
    machine: Machine, measured: _Measured, hosts: Sequence[Sequence[int]]
) -> tuple[Machine, list[Row]]:
    """The machine with what steps take of one rank of a host, and of all."""
    most = max(map(len, hosts))
    factors, rows = {}, []
    # All at work come first: where hosts have a rank each, jobs on several have all of them busy.
    for ranks, seconds in ((most, measured.together), (1, measured.alone)):
        if ranks not in factors:
            factors[ranks], fit = fit_steps(machine, measured.plans, seconds)
            what = f"steps of {ranks} rank{'s' * (ranks > 1)} of a host"
            rows.append(Row(what, f"{factors[ranks]:.2f} times their kernels", fit))
    return replace(machine, crowding=tuple(sorted(factors.items()))), rows[::-1]


def _with_pipelines(machine: Machine, measured: _Measured) -> tuple[Machine, list[Row]]:
    """The machine with what its messages take from kernels in steps of several stages."""
    if not measured.pipelines:
        return machine, []
    machine, seconds, fit = fit_pipelines(machine, measured.pipelines, measured.passed)
    return machine, [Row("each message in a step", f"{time_text(seconds)} more", fit)]


def _remarks(
    hosts: Sequence[Sequence[int]], levels: Mapping[str, Any], options: Options
) -> tuple[str, ...]:
    """What the file does not know."""
    remarks = []
    if len(hosts) == 1:
        remarks.append(
            "one host: what joins several is not known, and they are priced as if they were one;"
            " calibrate on ranks of two hosts, or set devices_per_node and [links.outer]"
        )
    if "inner" not in levels:
        remarks.append(
            "no host has two ranks: links within a host are not measured, but those of the built-in"
            " machine cpu; calibrate on two ranks of a host"
        )
    if options.data is None:
        remarks.append(
            "reading was measured on files in the system's cache; --data FOLDER measures storage"
        )
    return tuple(remarks)


def _rate_rows(rates: Rates) -> list[Row]:
    matrix = [(f"products in {dtype}", rate) for dtype, rate in rates.matrix.items()]
    vector = [(f"other operations in {dtype}", rate) for dtype, rate in rates.vector.items()]
    return [
        *(
            Row(what, f"{rate / 1e9:.3g} GFLOP/s", rates.fits[what])
            for what, rate in matrix + vector
        ),
        Row("memory", f"{rates.memory / 1e9:.3g} GB/s"),
        Row("launch of a kernel", time_text(rates.launch)),
    ]


def _overlap_rows(levels: Mapping[str, Any], overlap: bool) -> list[Row]:
    text = "beside computation" if overlap else "only while a rank waits for it"
    return [Row("communication", text)] if levels else []


def _link_rows(level: str, link: Link, fits: Mapping[str, Fit]) -> list[Row]:
    curves = {f"messages, {level}": link.messages} if link.messages else {}
    curves |= {f"{OVERHEAD}, {level}": link.overhead} if link.overhead else {}
    curves |= {f"{one.kind} on {one.members} ranks, {level}": one.curve for one in link.measured}
    return [Row(what, _curve_text(curve), fits[what]) for what, curve in curves.items()]


def _curve_text(curve: Curve) -> str:
    """The latency where it starts, and the bandwidth where it ends, if bytes were found to cost."""
    latency, each = curve.pieces[0].seconds, curve.pieces[-1].each
    return _port_text(latency, 1 / each) if each else time_text(latency)


def _port_text(latency: float, bandwidth: float) -> str:
    return f"{time_text(latency)} + n / {bandwidth / 1e9:.3g} GB/s"


def _file(machine: Machine, rows: Sequence[Row], remarks: Sequence[str], options: Options) -> str:
    """The TOML text, with what was measured and how well it fits as comments at its head."""
    how = "mpiflow calibrate --quick" if options.quick else "mpiflow calibrate"
    head = [f"Made by {how}, mpiflow {__version__}."]
    head += [
        part
        for remark in remarks
        for part in textwrap.wrap(f"{remark[0].upper()}{remark[1:]}.", 97)
    ]
    return to_toml(machine, {"": "\n".join([*head, "", *table(rows)])})


def table(rows: Sequence[Row]) -> list[str]:
    """Lines: what, figure, errors of the fit."""
    width = max(len(row.what) for row in rows)
    wide = max(len(row.found) for row in rows)
    return [f"{row.what:{width}}  {row.found:{wide}}  {row.fit or ''}".rstrip() for row in rows]
