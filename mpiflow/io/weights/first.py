"""The first values of variables: which tensors of a file give them, and reading a rank's part.

resolve    when the plan is made: every variable finds its tensors, or all problems are told
fill       when a run begins, on every rank: the part that it holds, in blocks
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np

from mpiflow.errors import CheckpointError
from mpiflow.graph.sbp import Box
from mpiflow.io.weights.names import NameMap, matches_any
from mpiflow.io.weights.pattern import Sizes, parse_pattern
from mpiflow.io.weights.tensors import TensorInfo, Tensors
from mpiflow.plan.first import Filled
from mpiflow.plan.slice import itemsize

_BLOCK_BYTES = 32 << 20
_LISTED = 12
_WITHOUT = " (leave variables out by without=, --without)"
_IGNORE = " (pass over tensors by ignore=, --ignore)"

AVERAGE = "average"
_BESIDE = ("momentum", "moment1", "moment2", "squares", AVERAGE)
_OF_THE_RUN = ("step", "loss_scale", "loss_scale.good_steps")


def is_of_model(name: str, names: Iterable[str]) -> bool:
    """Whether a variable is of the model; the optimizer's stand beside one, as NAME.momentum."""
    base, _, last = name.rpartition(".")
    return name not in _OF_THE_RUN and not (last in _BESIDE and base in names)


def resolve(
    source: Tensors,
    names: NameMap,
    variables: Iterable[TensorInfo],
    *,
    without: Sequence[str] = (),
    ignore: Sequence[str] = (),
    partly: bool = False,
) -> tuple[tuple[Filled, ...], list[str]]:
    """What fills each of the model's variables but those that fit `without`, and remarks.

    CheckpointError with all that is missing, of another shape or dtype, or needed by nobody.
    `ignore` are tensors of the file that may be left over; with `partly` any may.
    """
    wanted = {v.name: v for v in variables}
    left_out = [name for name in wanted if matches_any(without, name)]
    _check_patterns("without", without, wanted, "variable")
    _check_patterns("ignore", ignore, source.tensors, "tensor")
    filled, missing, unlike, narrowed = [], [], [], []
    used: set[str] = set()
    for name, variable in wanted.items():
        candidates = names.candidates(name)
        found = next((c for c in candidates if all(t in source.tensors for t in c.tensors)), None)
        if found is not None:
            used.update(found.tensors)
        if name in left_out:
            continue
        if found is None:
            missing.append(_missing(variable, candidates))
            continue
        problem = _problem(source, found, variable)
        if problem:
            unlike.append(problem)
        elif any(_narrows(source.tensors[t].dtype, variable.dtype) for t in found.tensors):
            narrowed.append(name)
        filled.append(found)
    extra = [
        f"{info.name}: {info}"
        for info in source.tensors.values()
        if not partly
        and info.name not in used
        and not names.ignores(info.name)
        and not matches_any(ignore, info.name)
        and is_of_model(info.name, source.tensors)
    ]
    hints = ("", "") if partly else (_WITHOUT, _IGNORE)
    _complain(source, names, (missing, unlike, extra), hints)
    remarks = [f"{len(narrowed)} variables lose digits: {_listed(narrowed)}"] if narrowed else []
    return tuple(filled), remarks


def _check_patterns(option: str, patterns: Sequence[str], names: Iterable[str], what: str) -> None:
    for pattern in patterns:
        if not any(matches_any([pattern], name) for name in names):
            raise CheckpointError(
                f"{option} {pattern!r} fits no {what}; there are {_listed(names)}"
            )


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return (", ".join(every[:_LISTED]) or "none") + more


def _missing(variable: TensorInfo, candidates: list[Filled]) -> str:
    wants = " or ".join(dict.fromkeys(" with ".join(c.tensors) for c in candidates))
    return f"{variable.name}: {variable}, {f'from {wants}' if wants else 'which no name is for'}"


def _problem(source: Tensors, filled: Filled, variable: TensorInfo) -> str:
    """What is wrong with the tensors of a variable, or an empty string."""
    infos = [source.tensors[name] for name in filled.tensors]
    held = ", ".join(f"{info} in {info.name}" for info in infos)
    says = f"{variable.name}: {variable} in the job, {held}"
    kinds = {np.dtype(_plain(info.dtype)).kind for info in infos}
    if kinds != {np.dtype(_plain(variable.dtype)).kind}:
        return f"{says}: another kind of number"
    if not filled.pattern:
        return "" if infos[0].shape == variable.shape else says
    try:
        shape, _ = _arranged(filled, infos)
    except CheckpointError as problem:
        return f"{says}: {problem}"
    return "" if shape == variable.shape else f"{says}, which make {shape}"


def _plain(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def _narrows(source: str, target: str) -> bool:
    return not np.can_cast(_plain(source), _plain(target), "safe")


def _arranged(filled: Filled, infos: list[TensorInfo]) -> tuple[tuple[int, ...], list[Sizes]]:
    """The shape that the tensors make, and the sizes of the letters in each."""
    pattern = parse_pattern(filled.pattern)
    shapes = [info.shape for info in infos]
    each = pattern.sizes(shapes, dict(filled.sizes), filled.join, filled.parts)
    return pattern.shape(each, filled.join), each


def _complain(
    source: Tensors,
    names: NameMap,
    faults: tuple[list[str], list[str], list[str]],
    hints: tuple[str, str],
) -> None:
    missing, unlike, extra = faults
    parts = (
        (f"not in the file{hints[0]}", missing),
        ("of another shape or kind", unlike),
        (f"in the file, and used by nothing{hints[1]}", extra),
    )
    lines = [f"{source.path} does not fit the job by the names {names.name!r}:"]
    for title, rows in parts:
        lines += [f"  {title}:"] if rows else []
        lines += [f"    {row}" for row in rows[:_LISTED]]
        lines += [f"    and {len(rows) - _LISTED} more"] if len(rows) > _LISTED else []
    if len(lines) > 1:
        raise CheckpointError("\n".join(lines))


def with_averages(filled: tuple[Filled, ...], names: Iterable[str]) -> tuple[Filled, ...]:
    """What fills the variables also fills their averages, where the optimizer keeps some."""
    known = set(names)
    pairs = ((f, f"{f.variable}.{AVERAGE}") for f in filled)
    more = (
        Filled(name, f.tensors, f.pattern, f.join, f.parts, f.sizes)
        for f, name in pairs
        if name in known
    )
    return (*filled, *more)


def fill_all(
    source: Tensors,
    filled: Iterable[Filled],
    boxes: Mapping[str, Box],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Fill each variable that is here: its array, which is the part `boxes` of it."""
    for one in filled:
        if one.variable in arrays:
            fill(source, one, boxes[one.variable], arrays[one.variable])


def fill(source: Tensors, filled: Filled, box: Box, out: np.ndarray) -> None:
    """Fill `out` with the part `box` of a variable; some rows at a time where it is large."""
    missing = [name for name in filled.tensors if name not in source.tensors]
    if missing:
        raise CheckpointError(f"{source.path}: {missing[0]} is not there any more")
    if not box:
        out[...] = _read(source, filled, box)
        return
    start, stop = box[0]
    row_bytes = prod(b - a for a, b in box[1:]) * itemsize(out.dtype.name)
    rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for first in range(start, stop, rows):
        last = min(first + rows, stop)
        out[first - start : last - start] = _read(source, filled, ((first, last), *box[1:]))


def _read(source: Tensors, filled: Filled, box: Box) -> np.ndarray:
    infos = [source.tensors[name] for name in filled.tensors]
    if any(start == stop for start, stop in box):
        return np.empty([stop - start for start, stop in box], _plain(infos[0].dtype))
    if not filled.pattern:
        return source.read(infos[0].name, box)
    _, each = _arranged(filled, infos)
    return parse_pattern(filled.pattern).read(
        each, filled.join, box, lambda number, part: source.read(infos[number].name, part)
    )
