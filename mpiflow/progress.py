"""One line on a terminal that says how far something long has come."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_EVERY_SECONDS = 0.1
_WIDTH = 24


class Bar:
    """Shows what it is called with on standard error; nothing where that is no terminal.

    A line is rewritten until something else is counted, or the block ends.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = not self._stream.isatty()
        self._what, self._began, self._shown = "", 0.0, 0.0
        self._last: tuple[int, int | None] = (0, None)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_line()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """So many of `what` ("rows written", "bytes encoded") are done, of a total where known."""
        if self._quiet:
            return
        now = time.monotonic()
        if what != self._what:
            self._end_line()
            self._what, self._began = what, now
        self._last = done, total
        if now - self._shown >= _EVERY_SECONDS:
            self._shown = now
            self._show(now)

    def _end_line(self) -> None:
        if self._what:
            self._show(time.monotonic())
            self._stream.write("\n")
            self._what = ""

    def _show(self, now: float) -> None:
        text = line(self._what, *self._last, now - self._began)
        # The terminal is cleared to the end of the line: the one before may have been longer.
        self._stream.write(f"\r{text}\x1b[K")
        self._stream.flush()


def line(what: str, done: int, total: int | None, seconds: float) -> str:
    """What a bar shows after so many seconds: share, numbers, speed, time that is left."""
    unit, _, deed = what.partition(" ")
    speed = done / seconds if seconds > 0 else 0.0
    rate = f", {_amount(speed, unit)}/s" if speed else ""
    if not total:
        return f"{deed}  {_amount(done, unit)}{rate}"
    filled = _WIDTH * done // total
    bar = "#" * filled + "-" * (_WIDTH - filled)
    left = f", {_clock((total - done) / speed)} left" if speed and done < total else ""
    amount = f"{_amount(done, unit)} of {_amount(total, unit)}"
    return f"{deed}  [{bar}] {100 * done // total:3} %  {amount}{rate}{left}"


def _amount(number: float, unit: str) -> str:
    return f"{number / 2**20:,.1f} MiB" if unit == "bytes" else f"{number:,.0f} {unit}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
