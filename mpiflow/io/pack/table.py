"""Tables in CSV as a stream of rows, in which every cell is a number of its type.

A cell that is missing, or is no such number, is an error that names file, line and column.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from mpiflow.errors import DataError
from mpiflow.io.pack.columns import FieldReader, Line, TableField, field_reader
from mpiflow.io.pack.files import text_lines
from mpiflow.io.pack.names import Numbering
from mpiflow.io.pack.rows import Arrays

_BLOCK_CELLS = 1 << 18


def read_tables(
    files: Sequence[Path],
    fields: Sequence[TableField],
    numbering: Callable[[str], Numbering],
    *,
    delimiter: str = ",",
    header: bool = True,
) -> Iterator[Arrays]:
    """The rows of CSV files with the same columns, in pieces.

    Without `fields` every column is one; without a header columns are called 1, 2, ...
    `numbering` gives, by name of a field, the numbers of the names in it.
    """
    columns: list[str] = []
    readers: list[FieldReader] = []
    for path in files:
        lines = _lines(path, delimiter)
        head, lines = _header(path, lines, header)
        if not readers:
            columns = head
            first, lines = _peek(path, lines)
            chosen = fields or [TableField(name, (name,)) for name in head]
            readers = [field_reader(field, head, first, numbering) for field in chosen]
        elif head != columns:
            raise DataError(f"{path} has the columns {head}; {files[0]} has {columns}")
        while block := list(islice(lines, max(1, _BLOCK_CELLS // len(head)))):
            yield {reader.field.name: reader.read(path, block) for reader in readers}


def _lines(path: Path, delimiter: str) -> Iterator[Line]:
    """The lines of a file, blank ones left out; DataError where one is longer or shorter."""
    rows = csv.reader(text_lines(path), delimiter=delimiter, strict=True)
    width = 0
    try:
        for cells in rows:
            width = width or len(cells)
            if cells and len(cells) != width:
                raise DataError(
                    f"{path} line {rows.line_num} has {len(cells)} cells, the first line {width}"
                )
            if cells:
                yield rows.line_num, cells
    except csv.Error as problem:
        raise DataError(f"{path} line {rows.line_num}: {problem}") from problem


def _peek(path: Path, lines: Iterator[Line]) -> tuple[list[str], Iterator[Line]]:
    """The cells of the next line, and the lines with it."""
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path}: no rows")
    return first[1], chain([first], lines)


def _header(path: Path, lines: Iterator[Line], header: bool) -> tuple[list[str], Iterator[Line]]:
    """The names of the columns, and the lines with rows."""
    cells, lines = _peek(path, lines)
    if not header:
        return [str(number + 1) for number in range(len(cells))], lines
    next(lines)
    head = [cell.strip() for cell in cells]
    twice = sorted({name for name in head if head.count(name) > 1})
    if twice:
        raise DataError(f"{path}: the header names {twice[0]!r} twice")
    return head, lines
