"""Typed access to JSON that was read from a checkpoint's files and may hold anything."""

from __future__ import annotations

import json
import re
from typing import Any

from mpiflow.errors import CheckpointError

_LARGEST = 2**62
_DIMS = 32


class Fields:
    """Typed access to a mapping that was read from a file; `where` begins each complaint."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise CheckpointError(f"{where}: a mapping is expected, not {short(data)}")
        self.data, self.where = data, where

    def _get(self, key: str, kind: type, words: str) -> Any:
        if key not in self.data:
            raise CheckpointError(f"{self.where}: {key!r} is missing")
        value = self.data[key]
        if type(value) is not kind:
            raise CheckpointError(f"{self.where}: {key!r} is {short(value)}, not {words}")
        return value

    def text(self, key: str, pattern: re.Pattern[str] | None = None) -> str:
        """A string of printable characters, of the form of `pattern`."""
        value = self._get(key, str, "a string")
        if not value.isprintable():
            raise CheckpointError(f"{self.where}: {key!r} is {short(value)}, not printable")
        if pattern and not pattern.fullmatch(value):
            raise CheckpointError(
                f"{self.where}: {key!r} is {short(value)}, not of the form {pattern.pattern}"
            )
        return value

    def integer(self, key: str) -> int:
        """A whole number from 0 to 2**62."""
        return self._size(key, self._get(key, int, "a whole number"))

    def integers(self, key: str) -> tuple[int, ...]:
        """At most 32 whole numbers from 0 to 2**62: a shape or a start."""
        values = self.items(key)
        if len(values) > _DIMS:
            raise CheckpointError(f"{self.where}: {key!r} has {len(values)} dims, {_DIMS} at most")
        return tuple(self._size(key, value) for value in values)

    def _size(self, key: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise CheckpointError(
                f"{self.where}: {key!r} holds {short(value)}, not a number from 0 to 2**62"
            )
        return value

    def items(self, key: str) -> list[Any]:
        """A list."""
        return self._get(key, list, "a list")

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping."""
        return self._get(key, dict, "a mapping")

    def records(self, key: str) -> list[Fields]:
        """A list of mappings."""
        return [Fields(v, f"{self.where}: {key}[{i}]") for i, v in enumerate(self.items(key))]


def short(value: Any) -> str:
    """A JSON value as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
