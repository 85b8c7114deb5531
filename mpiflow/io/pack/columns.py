"""Fields of a table: which columns they have, and how their cells become numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiflow.errors import DataError, UsageError
from mpiflow.io.pack.names import Numbering

CATEGORY = "category"
"""The type of a column of names, which are numbered as they appear."""

_DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
           "uint64", "bool")  # fmt: skip
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
_BOOL = {"0": False, "false": False, "1": True, "true": True}

Line = tuple[int, list[str]]
"""The number of a line in its file, and its cells."""


@dataclass(frozen=True, slots=True)
class TableField:
    """A field of some columns, each NAME or FIRST..LAST, in this order.

    Without a dtype it is int64 or float32, as its first row is; without a shape, that of a number
    for one column, and (columns,) for several.
    """

    name: str
    columns: tuple[str, ...]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


def parse_field(text: str) -> TableField:
    """A field from NAME[=COLUMN,FIRST..LAST,...][:DTYPE[:2x3]]; NAME is a column without any."""
    names, _, types = text.partition(":")
    name, equals, columns = names.partition("=")
    dtype, _, shape = types.partition(":")
    columns = columns if equals else name
    if not name or not all(columns.split(",")):
        raise UsageError(
            f"--field {text}: write NAME=COLUMN,FIRST..LAST:DTYPE, as in x=a,b:float32"
        )
    if dtype and dtype not in (*_DTYPES, CATEGORY):
        raise UsageError(f"--field {text}: {dtype!r} is none of {', '.join(_DTYPES)}, {CATEGORY}")
    if shape and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise UsageError(f"--field {text}: {shape!r} is not the shape of a row, as in 1x28x28")
    sizes = tuple(map(int, shape.split("x"))) if shape else None
    return TableField(name, tuple(columns.split(",")), dtype or None, sizes)


@dataclass(frozen=True, slots=True)
class FieldReader:
    """Turns the cells of lines into the rows of a field."""

    field: TableField
    head: list[str]
    places: list[int]
    dtype: str
    shape: tuple[int, ...]
    parse: Callable[[list[str]], NDArray[Any]]

    def read(self, path: Path, lines: list[Line]) -> NDArray[Any]:
        """The rows (lines, ...); DataError for the first cell that is not what it must be."""
        try:
            array = self.parse([cells[place] for _, cells in lines for place in self.places])
        except (ValueError, DataError) as problem:
            raise self._refusal(path, lines) from problem
        return array.reshape(len(lines), *self.shape)

    def _refusal(self, path: Path, lines: list[Line]) -> DataError:
        for number, cells in lines:
            for place in self.places:
                try:
                    self.parse([cells[place]])
                except (ValueError, DataError) as problem:
                    return DataError(
                        f"{path} line {number}, column {self.head[place]!r}: {problem}"
                        f"{self._advice(problem)}"
                    )
        raise AssertionError("the lines together cannot be read, but each of them can")

    def _advice(self, problem: Exception) -> str:
        if self.field.dtype or "missing" in str(problem):
            return ""
        name = self.field.name
        other = "category" if "is not a number" in str(problem) else "float64"
        return (
            f"; the first row makes field {name!r} {self.dtype}, give another type as in"
            f" --field {name}={','.join(self.field.columns)}:{other}"
        )


def field_reader(
    field: TableField, head: list[str], first: list[str], numbering: Callable[[str], Numbering]
) -> FieldReader:
    """How a field is read from lines with these names of columns and this first row."""
    places = [place for text in field.columns for place in _places(field.name, text, head)]
    sample = [first[place].strip() for place in places]
    whole = all(re.fullmatch(r"[+-]?\d+", text) for text in sample)
    dtype = field.dtype or ("int64" if whole else "float32")
    shape = field.shape or (() if len(places) == 1 else (len(places),))
    if prod(shape) != len(places):
        raise UsageError(
            f"field {field.name!r} has {len(places)} columns, its shape {shape} takes {prod(shape)}"
        )
    return FieldReader(field, head, places, dtype, shape, _parser(field.name, dtype, numbering))


def _places(field: str, text: str, head: list[str]) -> range:
    """Where a column, or FIRST..LAST, is among all of them; the name of a column goes first."""
    first, dots, last = text.partition("..")
    if text in head or not dots:
        first = last = text
    for name in (first, last):
        if name not in head:
            near = difflib.get_close_matches(name, head, 3) or head[:8]
            raise UsageError(
                f"field {field!r}: no column {name!r}; there are {', '.join(near)}, ..."
            )
    begin, end = head.index(first), head.index(last)
    if begin > end:
        raise UsageError(f"field {field!r}: column {first!r} comes after {last!r}")
    return range(begin, end + 1)


def _parser(
    field: str, dtype: str, numbering: Callable[[str], Numbering]
) -> Callable[[list[str]], NDArray[Any]]:
    """What makes an array of cells; ValueError or DataError where it cannot."""
    if dtype == CATEGORY:
        names = numbering(field)
        return lambda texts: np.array([names.number(_name(text)) for text in texts], np.int32)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return lambda texts: np.array([_truth(text) for text in texts], bool)
    return lambda texts: (_floats if kind.kind == "f" else _integers)(texts, kind)


def _name(text: str) -> str:
    if not text.strip():
        raise ValueError("the cell is missing; write a name there or remove the line")
    return text.strip()


def _truth(text: str) -> bool:
    truth = _BOOL.get(text.strip().lower())
    if truth is None:
        raise _not_a(text, "truth value (0, 1, false, true)")
    return truth


def _floats(texts: list[str], dtype: np.dtype) -> NDArray[Any]:
    try:
        values = np.array([float(text) for text in texts])
    except ValueError:
        raise _not_a(texts[0], "number") from None
    if np.isnan(values).any():
        raise _not_a(texts[0], "number")
    with np.errstate(over="ignore"):
        array = values.astype(dtype)
    if np.any(np.isinf(array) != np.isinf(values)):
        raise ValueError(f"{texts[0]} does not fit {dtype}")
    return array


def _integers(texts: list[str], dtype: np.dtype) -> NDArray[Any]:
    try:
        values = [int(text) for text in texts]
    except ValueError:
        raise _not_a(texts[0], "whole number") from None
    limits = np.iinfo(dtype)
    if min(values) < limits.min or max(values) > limits.max:
        raise ValueError(f"{texts[0]} does not fit {dtype} ({limits.min} to {limits.max})")
    return np.array(values, dtype)


def _not_a(text: str, what: str) -> ValueError:
    if text.strip().lower() in _MISSING:
        shown = f" ({text.strip()!r})" if text.strip() else ""
        return ValueError(f"the cell is missing{shown}; write a {what} there or remove the line")
    return ValueError(f"{text!r} is not a {what}")
