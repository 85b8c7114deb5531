"""A bar: what it says, that it rewrites one line, and that it is silent where nobody looks."""

import io

import pytest

from mpiflow.progress import Bar, line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("rows written", 25, 100, 10), "written  [######------------------]  25 %  25 rows of "
         "100 rows, 2 rows/s, 0:30 left"),
        (("bytes read", 3 << 20, 3 << 20, 1), "read  [########################] 100 %  3.0 MiB of "
         "3.0 MiB, 3.0 MiB/s"),
        (("rows read", 12345, None, 2), "read  12,345 rows, 6,172 rows/s"),
        (("rows read", 0, 10, 0), "read  [------------------------]   0 %  0 rows of 10 rows"),
        (("rows read", 1, 36001, 1), "read  [------------------------]   0 %  1 rows of 36,001"
         " rows, 1 rows/s, 10:00:00 left"),
    ],
)  # fmt: skip
def test_a_line_says_share_speed_and_time_left(arguments, text):
    assert line(*arguments) == text


def test_each_thing_that_is_counted_has_a_line_which_ends_with_all_of_it():
    terminal = Terminal()
    with Bar(terminal) as bar:
        for what in ("rows read", "rows written"):
            for done in range(1, 1001):
                bar(what, done, 1000)
    lines = terminal.getvalue().split("\n")
    assert len(lines) == 3
    assert "read  [########################] 100 %  1,000 rows of" in lines[0]
    assert "written  [########################] 100 %  1,000 rows of" in lines[1]
    assert lines[2] == ""
    assert terminal.getvalue().count("\r") < 100


def test_nothing_is_written_where_there_is_no_terminal():
    stream = io.StringIO()
    with Bar(stream) as bar:
        bar("rows read", 1, 2)
    assert stream.getvalue() == ""
