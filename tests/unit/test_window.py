"""Which steps of a run are looked at closely."""

import pytest

from mpiflow.errors import UsageError
from mpiflow.window import Window, parse_window, window


@pytest.mark.parametrize(
    ("text", "steps"), [("10:20", range(9, 20)), ("7", range(6, 7)), ("90:200", range(89, 100))]
)
def test_steps_are_counted_from_one_and_both_ends_are_in(text, steps):
    assert window(parse_window(text), 0, 100) == steps


@pytest.mark.parametrize(
    ("begin", "total", "steps"),
    [(0, 100, range(2, 12)), (40, 100, range(42, 52)), (0, 5, range(2, 5)), (0, 1, range(0, 1))],
)
def test_without_steps_a_trace_is_of_the_third_to_the_twelfth_of_the_run(begin, total, steps):
    assert window(Window(), begin, total) == steps


def test_without_a_trace_the_fifth_to_the_eighth_step_are_timed():
    assert window(None, 10, 100) == range(14, 18)
    assert len(window(None, 10, 12)) == 0
    assert len(window(None, 10, 10)) == 0


@pytest.mark.parametrize("text", ["0:3", "5:4", "a:b", "3:", ":3", "1:2:3", "-1"])
def test_what_names_no_steps_is_a_usage_error(text):
    with pytest.raises(UsageError, match=r"--trace .*--trace=10:20"):
        parse_window(text)


def test_steps_that_the_run_does_not_do_are_a_usage_error():
    with pytest.raises(UsageError, match="--trace 10:20: this run does the steps 31 to 60"):
        window(parse_window("10:20"), 30, 60)
