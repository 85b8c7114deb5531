"""Window: the steps of a run that look closely at the clock, for a trace or for its last table."""

from __future__ import annotations

from dataclasses import dataclass

from mpiflow.errors import UsageError

_TIMED = 4, 8
"""Of a run without a trace, the steps whose kernels are timed, counted from its first."""
_TRACED = 2, 12
"""Of one with a trace, unless steps are named: the first ones touch new memory."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which steps to trace: from `first` to `last`, counted from 1; without any, see `window`."""

    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        return f"--trace {self.first}:{self.last}"


def parse_window(text: str) -> Window:
    """`10:20`, or one step, or nothing. UsageError where it is none of these."""
    first, colon, last = text.partition(":")
    if not text:
        return Window()
    try:
        made = Window(int(first), int(last if colon else first))
    except ValueError:
        made = Window()
    if not 1 <= made.first <= made.last:
        raise UsageError(f"--trace {text}: name steps from 1, as in --trace=10:20 or --trace=10")
    return made


def window(asked: Window | None, begin: int, total: int) -> range:
    """The steps to record, counted from 0, of a run that does those from `begin` to `total`.

    UsageError where it does none of those that are asked for.
    """
    if asked is None:
        return range(min(begin + _TIMED[0], total), min(begin + _TIMED[1], total))
    if not asked.first:
        return range(max(begin, min(begin + _TRACED[0], total - 1)), min(begin + _TRACED[1], total))
    found = range(max(begin, asked.first - 1), min(asked.last, total))
    if not found and begin < total:
        raise UsageError(f"{asked}: this run does the steps {begin + 1} to {total}")
    return found


def parse_numbers(text: str, option: str) -> list[int]:
    """Numbers from 0 and spans of them, both ends in: `0,5,8:12`. UsageError where it is none."""
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        try:
            span = range(int(first), int(last if colon else first) + 1)
        except ValueError:
            span = range(0)
        if not span or span[0] < 0:
            raise UsageError(f"{option} {text}: give numbers and spans, as in {option} 0,5,8:12")
        found += [number for number in span if number not in found]
    return sorted(found)
