"""What every assignment of choices costs, to hold solvers against."""

import numpy as np


def joint(sizes, terms):
    """The sum of tables, by scope, for every assignment: an array with a dim for each variable."""
    total = np.zeros(sizes)
    for scope, table in terms:
        total = total + table.reshape([n if i in scope else 1 for i, n in enumerate(sizes)])
    return total
