"""Every pair of signatures of every op, nested on two mesh axes, joins to the whole."""

import pytest
from op_examples import EXAMPLES

import mpiflow.ops  # noqa: F401  (registers the ops)
from mpiflow import testing


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_pair_of_signatures_nested_on_two_axes_joins_to_the_whole(name):
    for op, arrays in EXAMPLES[name]:  # a pair of equal ones divides among six
        testing.check_signatures(op, arrays, (2, 3))
