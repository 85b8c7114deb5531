from itertools import product

import numpy as np
import pytest

from mpiflow.compiler.deadends import DeadEnds
from mpiflow.compiler.elimination import minimise
from mpiflow.compiler.tables import numbered


def random_problem(seed, *, values):
    """Costs of few values, so that many assignments are equal; 1e9 and inf may be among them."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, draw.integers(2, 7))
    costs = [draw.choice(values, n) for n in sizes]
    pairs = {
        (a, b): draw.choice(values, (sizes[a], sizes[b]))
        for b in range(len(sizes)) for a in range(b) if draw.random() < 0.6
    }  # fmt: skip
    return costs, pairs


def sums(costs, pairs):
    """Of every assignment its choices and what they cost."""
    for choice in product(*(range(len(c)) for c in costs)):
        total = sum(c[i] for c, i in zip(costs, choice, strict=True))
        yield choice, total + sum(t[choice[a], choice[b]] for (a, b), t in pairs.items())


def alive(unary, pairs):
    """The choices of each variable that are no dead ends."""
    costs = numbered(unary, pairs)
    tables, dead_ends = costs.tables, DeadEnds(costs.tables)
    for variable, number in enumerate(costs.unary):
        first = [n for (a, _), n in costs.pairs.items() if a == variable]
        second = [tables.transposed(n) for (_, b), n in costs.pairs.items() if b == variable]
        left = dead_ends.alive((number, *first, *second))
        yield tuple(range(len(unary[variable]))) if left is None else left


@pytest.mark.parametrize("values", [[0.0, 1.0, 2.0, 5.0], [0.1, 0.3, 1e9], [0.0, 0.7, np.inf]])
def test_every_best_assignment_is_among_what_is_left(values):
    fewer = 0
    for seed in range(100):
        costs, pairs = random_problem(seed, values=values)
        kept = list(alive(costs, pairs))
        assert all(len(k) for k in kept)
        fewer += sum(map(len, kept)) < sum(map(len, costs))
        every = list(sums(costs, pairs))
        best = min(total for _, total in every)
        for choice, total in every:
            if total == best < np.inf:
                assert all(i in k for i, k in zip(choice, kept, strict=True))
    assert fewer > 50


@pytest.mark.parametrize("values", [[0.0, 1.0, 2.0, 5.0], [0.0, 0.7, np.inf]])
def test_without_dead_ends_the_solution_is_still_the_best(values):
    for seed in range(100):
        costs, pairs = random_problem(seed, values=values)
        best = min(total for _, total in sums(costs, pairs))
        assert minimise(costs, pairs).total == pytest.approx(best)


def test_equally_cheap_choices_are_all_left():
    assert [*alive([np.full(3, 0.1 + 0.2), np.zeros(2)], {})] == [(0, 1, 2), (0, 1)]


def test_choices_without_any_conversion_are_left_out_unless_there_are_no_others():
    none = np.full((2, 2), np.inf)
    assert [*alive([np.zeros(2), np.zeros(2)], {(0, 1): none})] == [(0, 1), (0, 1)]
    some = np.array([[np.inf, np.inf], [1.0, np.inf]])
    assert [*alive([np.zeros(2), np.zeros(2)], {(0, 1): some})] == [(1,), (0,)]
