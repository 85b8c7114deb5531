"""A table of a TOML file, whose values are checked where they are taken.

Every error is a UsageError that names the file and the key, and says what the value must be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mpiflow.errors import UsageError


class Table:
    """A table that may have `keys` and no others; `where` is its name with a dot, or empty."""

    def __init__(
        self, values: Mapping[str, Any], keys: Sequence[str], file: str, where: str = ""
    ) -> None:
        self.values, self.file, self.where = values, file, where
        for key in values:
            if key not in keys:
                near = get_close_matches(key, keys, 1)
                advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(keys)}"
                raise UsageError(f"{file}: {where}{key} is no key that is known; {advice}")

    def wrong(self, key: str, value: Any, wanted: str) -> UsageError:
        """The error for a value that is not what is wanted."""
        return UsageError(f"{self.file}: {self.where}{key} is {value!r}; it must be {wanted}")

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; without a default it must be there."""
        value = self.values.get(key, default)
        if value is None:
            raise UsageError(f"{self.file}: {self.where}{key} is missing; see docs/machines.md")
        return value

    def text(self, key: str) -> str:
        """A text that is not empty."""
        value = self.take(key)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, value, "text in quotes")
        return value

    def truth(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more, which may be written 80e9."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self.wrong(key, value, "a whole number of 0 or more")
        if not math.isfinite(value) or value != int(value):
            raise self.wrong(key, value, "a whole number of 0 or more")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number of 0 or more."""
        return self.checked(key, self.take(key, default))

    def positive(self, key: str) -> float:
        """A number above 0."""
        value = self.number(key)
        if not value:
            raise self.wrong(key, self.values[key], "above 0")
        return value

    def checked(self, key: str, value: Any) -> float:
        """The value as a float, if it is a number of 0 or more."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        if not math.isfinite(value) or value < 0:
            raise self.wrong(key, value, "a finite number of 0 or more")
        return float(value)

    def table(self, key: str, keys: Sequence[str], *, needed: bool = True) -> Table:
        """The table below a key; an empty one where it is missing and not needed."""
        value = self.take(key, None if needed else {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, f"a table, [{self.where}{key}]")
        return Table(value, keys, self.file, f"{self.where}{key}.")

    def tables(self, key: str, keys: Sequence[str]) -> list[Table]:
        """The tables of a list, [[key]]; none where it is missing."""
        value = self.take(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.wrong(key, value, f"tables, each [[{self.where}{key}]]")
        return [
            Table(entry, keys, self.file, f"{self.where}{key}[{i}].")
            for i, entry in enumerate(value)
        ]
