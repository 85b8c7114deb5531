"""What a run tells the person who watches it: progress, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, Any

from mpiflow.plan.text import size_text, table, time_text

_BAR_SECONDS = 0.1
_LINE_SECONDS = 10.0
_BAR = 24
_RESULTS = 8
_LEAST = 5e-4
"""Share of a step below which an item of it is not shown."""


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


_TITLES = {
    "compute": "compute", "communication": "exposed communication", "copies": "exposed copies",
    "input": "exposed input", "stages": "bubble", "overhead": "overhead",
}  # fmt: skip


def final_table(results: dict[str, dict[str, Any]], last: dict[str, Any]) -> str:
    """The evaluation results, predicted against measured, and the tasks that differ most."""
    lines = []
    for name, row in results.items():
        text = results_text(row)
        lines.append(f"{name}: {text} over {row['rows']:,} rows after step {row['step']}")
    slowest = last["slowest"] if last.get("ranks", 1) > 1 else None
    heads = ["", "predicted", "measured", "measured/predicted"]
    rows = [*_step_rows(last, slowest["items"] if slowest else {}), *_size_rows(last)]
    if slowest:
        heads.append(f"rank {slowest['rank']}")
        rows = [[*row, *[""] * (len(heads) - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for label, *cells in (heads, *rows):
        aligned = "  ".join(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
        lines.append(f"  {label.ljust(widths[0])}  {aligned}".rstrip())
    if slowest:
        lines.append(
            f"  rank {slowest['rank']} computes longest; measured is the mean of all ranks"
        )
    return "\n".join([*lines, *different_tasks(last.get("tasks", []))])


def _step_rows(last: dict[str, Any], slowest: dict[str, float]) -> list[list[str]]:
    """The step, and the items that it is made of; those of which there is nothing are left out."""
    if "step_seconds" not in last:
        return []
    predicted = last["predicted"]
    rows = [_compared("step time", predicted["step_seconds"], last["step_seconds"], time_text)]
    if slowest:
        rows[0].append(time_text(sum(slowest.values())))
    for name, title in _TITLES.items():
        expected, seen = predicted["items"][name], last["items"][name]
        mine = slowest.get(name, 0.0)
        if max(expected, seen, mine) > _LEAST * last["step_seconds"]:
            rows.append(_compared(f"  {title}", expected, seen, time_text))
            rows[-1] += [time_text(mine)] if slowest else []
    return rows


def _size_rows(last: dict[str, Any]) -> list[list[str]]:
    predicted, arenas = last["predicted"], last["peak_bytes"]
    rows = [
        _compared(
            f"{name if len(arenas) > 1 else 'arena'} memory, largest rank",
            predicted["peak_bytes"][name], seen, size_text,
        )
        for name, seen in arenas.items()
    ]  # fmt: skip
    for label, key in (
        ("process memory, largest rank", "process_bytes"),
        ("bytes sent a step, largest rank", "bytes_sent"),
    ):
        if key in last:
            rows.append(_compared(label, predicted[key], last[key], size_text))
    return rows


def _compared(label: str, expected: Any, seen: Any, form: Callable[[Any], str]) -> list[str]:
    """A row of the table: what was expected, what was seen, and how they compare."""
    ratio = f"{seen / expected:.2f}" if expected else ("1.00" if seen == expected else "-")
    return [label, form(expected), form(seen), ratio]


def different_tasks(tasks: list[dict[str, Any]]) -> list[str]:
    """Lines on the tasks whose seconds of a step differ most from the prediction."""
    if not tasks:
        return []
    rows = [
        (
            each["task"], each["op"],
            time_text(each["predicted"]), time_text(each["measured"]),
            f"rank {each['rank']}", each["where"].rpartition("/")[2],
        )
        for each in tasks
    ]  # fmt: skip
    heads = ("", "", ">predicted", ">measured", "on", "line")
    return ["tasks whose time in a step differs most from the prediction:", *table(rows, heads)]
