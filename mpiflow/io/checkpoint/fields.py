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

    def text(self, key: str) -> str:
        """A string of printable characters."""
        value: str = self._get(key, str, "a string")
        if not value.isprintable():
            raise CheckpointError(f"{self.where}: {key!r} is {short(value)}, not printable")
        return value

    def integer(self, key: str) -> int:
        """A whole number from 0 to 2**62."""
        value: int = self._get(key, int, "a whole number")
        if not is_size(value):
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


def is_size(value: Any) -> bool:
    """Whether a value is a whole number from 0 to 2**62."""
    return type(value) is int and 0 <= value <= _LARGEST


def are_sizes(value: Any) -> bool:
    """Whether a value is a list of at most 32 such numbers: a shape or a start."""
    return type(value) is list and len(value) <= _DIMS and all(map(is_size, value))


def matches(value: Any, pattern: re.Pattern[str]) -> bool:
    """Whether a value is a string of the form of `pattern`."""
    return type(value) is str and pattern.fullmatch(value) is not None


def short(value: Any) -> str:
    """A JSON value as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
