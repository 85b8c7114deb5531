"""What a new run takes the first values of its variables from, as the plan records it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Filled:
    """A variable that begins with what a file holds: `tensors`, arranged as `pattern` says.

    Empty, the pattern leaves all dims as they are. Several tensors lie side by side along the
    letter `join`, with sizes `parts`. `sizes` are those of letters that no shape tells.
    """

    variable: str
    tensors: tuple[str, ...]
    pattern: str = ""
    join: str = ""
    parts: tuple[int, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class FirstValues:
    """A file of weights, relative to the data folder, its digest, and what it fills."""

    path: str = ""
    digest: str = ""
    filled: tuple[Filled, ...] = ()


NOTHING = FirstValues()
"""Every variable begins as the model says."""
