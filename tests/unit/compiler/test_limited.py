import subprocess
import sys

import numpy as np
import pytest

from mpiflow.compiler.assignments import DoesNotFit, Limited
from mpiflow.compiler.limited import minimise_within
from mpiflow.errors import CompileError


def live_at_odds():
    """Each set alone fits 10 bytes, but a variable that is small in one makes the other large."""
    memory = [np.array([10.0, 4.0]), np.array([4.0, 10.0])]
    forbidden = np.array([[0.0, np.inf], [np.inf, 0.0]])
    return [np.zeros(2), np.zeros(2)], {(0, 1): forbidden}, memory, [[0], [1]]


def test_sets_that_fit_alone_but_not_together_say_which_limit_they_need():
    with pytest.raises(DoesNotFit, match="needs 10 bytes or more, 1 above the limit of 9") as e:
        minimise_within(*live_at_odds(), 9.0)
    assert e.value.least == pytest.approx(10.0)
    assert minimise_within(*live_at_odds(), 10.0).memory == 10.0


def test_a_set_too_large_is_named():
    costs, memory = [np.zeros(2)] * 3, [np.array([8.0, 5.0])] * 3
    with pytest.raises(DoesNotFit, match="live set 1, of 2 members, needs 10 bytes") as raised:
        minimise_within(costs, {}, memory, [[0], [1, 2]], 9.0)
    assert (raised.value.live, raised.value.least, raised.value.limit) == (1, 10.0, 9.0)


def test_choices_of_infinite_cost_are_not_the_least_memory():
    costs, memory = [np.array([1.0, np.inf])], [np.array([8.0, 1.0])]
    with pytest.raises(DoesNotFit, match="needs 8 bytes"):
        minimise_within(costs, {}, memory, [[0]], 5.0)


def test_nothing_is_chosen_where_every_choice_is_forbidden():
    with pytest.raises(CompileError, match="impossible"):
        minimise_within([np.array([np.inf])], {}, [np.zeros(1)], [[0]], 5.0)


def test_a_byte_above_the_limit_is_above_it():
    costs, memory = [np.array([0.0, 3.0])] * 2, [np.array([5e10 + 1, 1e10])] * 2
    assert minimise_within(costs, {}, memory, [[0, 1]], 6e10 + 1).total == 3.0
    found = minimise_within(costs, {}, memory, [[0, 1]], 6e10)
    assert (found.total, found.memory) == (6.0, 2e10)


def test_a_problem_without_live_sets_or_variables_is_solved():
    assert minimise_within([], {}, [], [], 0.0) == Limited((), 0.0, 0.0, 0.0)
    assert minimise_within([np.ones(2)], {}, [np.ones(2)], [], 0.0).memory == 0.0


WITHOUT_SCIPY = """
import sys
sys.modules["scipy"] = None
import numpy as np
from mpiflow.compiler.limited import minimise_within

costs, memory = [np.array([1.0, 2.0])], [np.array([8.0, 1.0])]
assert minimise_within(costs, {}, memory, [[0]], 8.0).choice == (0,)
minimise_within(costs, {}, memory, [[0]], 7.0)
"""


def test_without_scipy_what_fits_is_found_and_otherwise_the_error_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_SCIPY], capture_output=True, text=True)
    assert "CompileError: the layouts do not fit the memory limit" in done.stderr
    assert "pip install scipy" in done.stderr
