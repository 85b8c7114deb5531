"""What a name that the user gave stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from mpiflow.errors import JobError

T = TypeVar("T")


def chosen(what: str, name: str, among: Mapping[str, T]) -> T:
    """The entry of that name; a JobError lists those that there are."""
    if name not in among:
        raise JobError(f"{what} {name!r} is none of {', '.join(among)}")
    return among[name]
