"""What a run tells the person who watches it: progress, and the table at the end."""

from __future__ import annotations

import sys
import time
from typing import IO, Any

from mpiflow.plan.text import size_text, time_text

_BAR_SECONDS = 0.1
_LINE_SECONDS = 10.0
_BAR = 24
_RESULTS = 8


class Progress:
    """A bar on a terminal, a line now and then in a batch log. Only rank 0 has one."""

    def __init__(self, first: int, total: int, rows: int, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._first, self._total, self._rows = first, total, rows
        self._began = self._shown = time.monotonic()
        self._wide = 0

    def step(self, done: int, epoch: int, loss: float) -> None:
        """Step number `done` is over."""
        now = time.monotonic()
        every = _BAR_SECONDS if self._terminal else _LINE_SECONDS
        if now - self._shown < every and done < self._total:
            return
        self._shown = now
        speed = (done - self._first) / max(now - self._began, 1e-9)
        left = (self._total - done) / max(speed, 1e-9)
        text = (
            f"step {done}/{self._total}  epoch {epoch}  loss {loss:.4g}"
            f"  {speed * self._rows:,.0f} rows/s  {_clock(left)} left"
        )
        if self._terminal:
            full = _BAR * done // max(self._total, 1)
            text = f"[{'#' * full}{'.' * (_BAR - full)}] {text}"
            self._stream.write("\r" + text.ljust(self._wide))
            self._wide = len(text)
            self._stream.flush()
        else:
            self.say(text)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._wide:
            self._stream.write("\r" + " " * self._wide + "\r")
            self._wide = 0
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """End the bar's line."""
        if self._wide:
            self._stream.write("\n")
            self._wide = 0


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def results_text(row: dict[str, Any]) -> str:
    """The results of an evaluation; of many, as a histogram gives, the first."""
    known = ("evaluation", "step", "epoch", "rows")
    values = [f"{key} {value:.4f}" for key, value in row.items() if key not in known]
    if len(values) > _RESULTS:
        values[_RESULTS:] = [f"{len(values) - _RESULTS} more in metrics.jsonl"]
    return ", ".join(values)


def final_table(results: dict[str, dict[str, Any]], last: dict[str, Any]) -> str:
    """The evaluation results, and predicted against measured."""
    lines = []
    for name, row in results.items():
        text = results_text(row)
        lines.append(f"{name}: {text} over {row['rows']:,} rows after step {row['step']}")
    predicted = last["predicted"]
    rows = [("", "predicted", "measured", "measured/predicted")]
    for label, key, form in (
        ("step time", "step_seconds", time_text),
        ("arena memory, largest rank", "peak_bytes", size_text),
        ("process memory, largest rank", "process_bytes", size_text),
        ("bytes sent a step, largest rank", "bytes_sent", size_text),
    ):
        if key not in last:
            continue
        expected, seen = (d[key]["host"] if key == "peak_bytes" else d[key]
                          for d in (predicted, last))  # fmt: skip
        ratio = f"{seen / expected:.2f}" if expected else ("1.00" if seen == expected else "-")
        rows.append((label, form(expected), form(seen), ratio))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for label, *cells in rows:
        aligned = "  ".join(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
        lines.append(f"  {label.ljust(widths[0])}  {aligned}")
    return "\n".join(lines)
