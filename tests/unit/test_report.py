"""What a run says: a bar on a terminal, lines in a log, one table at the end."""

import io

import pytest

from mpiflow import report
from mpiflow.exec.meter import ITEMS
from mpiflow.report import Progress, final_table, results_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move."""
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then_and_at_the_end(clock):
    log = io.StringIO()
    progress = Progress(0, 100, 32, log)
    for step in range(1, 101):
        clock[0] += 0.25
        progress.step(step, 1, 1 / step)
    progress.close()
    lines = log.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["40/100", "80/100", "100/100"]
    assert lines[0] == "step 40/100  epoch 1  loss 0.025  128 rows/s  0:15 left"


def test_a_resumed_run_counts_its_own_steps_for_the_speed(clock):
    log = io.StringIO()
    progress = Progress(50, 100, 10, log)
    clock[0] = 20.0
    progress.step(60, 2, 0.5)
    assert "5 rows/s  1:20 left" in log.getvalue()


def test_a_terminal_gets_one_bar_that_words_do_not_tear(clock):
    terminal = Terminal()
    progress = Progress(0, 8, 32, terminal)
    for step in range(1, 5):
        clock[0] += 1
        progress.step(step, 1, 0.5)
    progress.say("evaluated")
    clock[0] += 3600 * 4
    progress.step(5, 1, 0.5)
    progress.close()
    text = terminal.getvalue()
    assert "\r[############............] step 4/8" in text
    before = text.partition("evaluated\n")[0]
    assert before.endswith("\r")
    assert before.rpartition("\r")[0].endswith(" ")
    assert text.endswith("left\n")
    assert "2:24:02 left" in text


def items(compute, communication=0.0, stages=0.0, overhead=0.0):
    given = {
        "compute": compute, "communication": communication, "stages": stages, "overhead": overhead
    }  # fmt: skip
    return {name: given.get(name, 0.0) for name in ITEMS}


def measured_run(**changes):
    """The last object of the metrics of a run on one rank."""
    return {
        "peak_bytes": {"host": 2048},
        "process_bytes": 3 << 20,
        "bytes_sent": 0,
        "ranks": 1,
        "step_seconds": 0.003,
        "items": items(0.002, 0.0005, overhead=0.0005),
        "slowest": {"rank": 0, "items": items(0.002, 0.0005, overhead=0.0005)},
        "tasks": [],
        "predicted": {
            "peak_bytes": {"host": 2048},
            "process_bytes": 2 << 20,
            "bytes_sent": 0,
            "step_seconds": 0.002,
            "items": items(0.0015, 0.0005),
        },
        **changes,
    }


def test_the_step_is_shown_with_the_items_that_make_it_up():
    lines = final_table({}, measured_run()).splitlines()
    table = {line[:33].strip(): line[33:].split() for line in lines[1:]}
    assert table["compute"] == ["1.50", "ms", "2.00", "ms", "1.33"]
    assert table["exposed communication"] == ["500", "us", "500", "us", "1.00"]
    assert table["overhead"] == ["0", "s", "500", "us", "-"]
    assert "exposed input" not in table
    assert "bubble" not in table
    assert "computes longest" not in lines[-1]


def test_of_several_ranks_the_one_that_computes_longest_has_a_column():
    slowest = {"rank": 5, "items": items(0.0025, stages=0.0005)}
    task = {
        "task": "fc1/linear", "op": "MatMul", "where": "/home/me/job.py:12", "rank": 3,
        "predicted": 1e-4, "measured": 4e-4,
    }  # fmt: skip
    last = measured_run(ranks=8, slowest=slowest, tasks=[task])
    lines = final_table({}, last).splitlines()
    assert lines[0].split() == ["predicted", "measured", "measured/predicted", "rank", "5"]
    assert lines[1].split()[-2:] == ["3.00", "ms"]
    assert lines[2].split()[-2:] == ["2.50", "ms"]
    assert "  rank 5 computes longest; measured is the mean of all ranks" in lines
    assert lines[-1].split() == [
        "fc1/linear", "MatMul", "100", "us", "400", "us", "rank", "3", "job.py:12"
    ]  # fmt: skip


def test_the_table_compares_what_was_predicted_with_what_was_measured():
    results = {
        "test": {"evaluation": "test", "step": 9, "epoch": 2, "rows": 1234, "loss": 0.25},
    }
    lines = final_table(results, measured_run()).splitlines()
    assert lines[0] == "test: loss 0.2500 over 1,234 rows after step 9"
    table = {line[:34].strip(): line[34:].split() for line in lines[2:]}
    assert table["step time"] == ["2.00", "ms", "3.00", "ms", "1.50"]
    assert table["arena memory, largest rank"] == ["2.00", "KiB", "2.00", "KiB", "1.00"]
    assert table["bytes sent a step, largest rank"] == ["0", "B", "0", "B", "1.00"]


def test_of_many_results_the_first_are_shown_and_the_file_of_all_is_named():
    histogram = {f"click{i:02}": float(i) for i in range(64)}
    row = {"evaluation": "test", "step": 9, "epoch": 2, "rows": 10, "loss": 0.25, **histogram}
    text = results_text(row)
    assert text.startswith("loss 0.2500, click00 0.0000, click01 1.0000")
    assert text.endswith("click06 6.0000, 57 more in metrics.jsonl")


def test_a_run_without_steps_has_no_step_time():
    last = {
        "peak_bytes": {"host": 8},
        "process_bytes": 9,
        "predicted": {"peak_bytes": {"host": 8}, "process_bytes": 9},
    }
    assert "step time" not in final_table({}, last)
