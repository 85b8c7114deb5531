"""Where an op of the user's own is written, and a digest of what it is written with.

The digest covers the class and what it uses of its file: base classes, functions, constants and
import lines, each with what it uses in turn. So a comment or a setting elsewhere in the file
changes nothing; nor does what the file imports, of which only the line counts.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from mpiflow.errors import GraphError


@dataclass(frozen=True, slots=True)
class Source:
    """The file of a class, and the SHA-256 of the part of it that the class uses."""

    file: Path
    digest: str

    @property
    def module(self) -> str:
        """What the op's name begins with: the file's name without its ending."""
        return self.file.stem


def find_source(cls: type) -> Source:
    """Where a class at the top of a file is written; GraphError for any other."""
    try:
        file = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        file = None
    if file is None or not Path(file).is_file():
        raise GraphError(
            f"op {cls.__name__} is written in no file; put it into a .py file and import that, so"
            " that every rank can load it"
        )
    if "." in cls.__qualname__:
        raise GraphError(
            f"op {cls.__qualname__} is written inside a function or class; move it to the top of"
            f" {Path(file).name}, where a rank that loads the file finds it"
        )
    path = Path(file).resolve()
    return Source(path, _digest(path.read_text(encoding="utf-8"), cls.__name__))


def _digest(text: str, name: str) -> str:
    lines = text.splitlines()
    parts = [lines[first - 1 : last] for first, last in used_lines(ast.parse(text), name)]
    return sha256("\n".join(line for part in parts for line in part).encode()).hexdigest()


def used_lines(tree: ast.Module, name: str) -> list[tuple[int, int]]:
    """(first, last) line of every top-level statement that `name` needs, in file order."""
    made_by: dict[str, list[int]] = {}
    for index, statement in enumerate(tree.body):
        for made in _names_made(statement):
            made_by.setdefault(made, []).append(index)
    waiting, seen, kept = [name], {name}, set[int]()
    while waiting:
        for index in made_by.get(waiting.pop(), ()):
            kept.add(index)
            read = {node.id for node in ast.walk(tree.body[index]) if isinstance(node, ast.Name)}
            waiting += sorted(read - seen)
            seen |= read
    return [_lines(tree.body[index]) for index in sorted(kept)]


def _names_made(statement: ast.stmt) -> Iterable[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    inner = [part for part in ast.iter_child_nodes(statement) if isinstance(part, ast.stmt)]
    return [
        *(node.id for node in names if isinstance(node.ctx, ast.Store)),
        *(name for part in inner for name in _names_made(part)),
    ]


def _lines(statement: ast.stmt) -> tuple[int, int]:
    first = [statement.lineno]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        first += [decorator.lineno for decorator in statement.decorator_list]
    return min(first), statement.end_lineno or statement.lineno
