from itertools import product

import numpy as np
import pytest

from mpiflow.compiler.deadends import without_dead_ends
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


@pytest.mark.parametrize("values", [[0.0, 1.0, 2.0, 5.0], [0.1, 0.3, 1e9], [0.0, 0.7, np.inf]])
def test_every_best_assignment_is_among_what_is_left(values):
    fewer = 0
    for seed in range(100):
        costs, pairs = random_problem(seed, values=values)
        _, kept = without_dead_ends(numbered(costs, pairs))
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


def test_what_is_left_has_the_costs_of_the_choices_that_are():
    costs, pairs = random_problem(1, values=[0.0, 1.0, 2.0, 5.0])
    left, kept = without_dead_ends(numbered(costs, pairs))
    for number, cost, k in zip(left.unary, costs, kept, strict=True):
        assert np.array_equal(left.tables[number], cost[k])
    for (a, b), number in left.pairs.items():
        assert np.array_equal(left.tables[number], pairs[a, b][np.ix_(kept[a], kept[b])])


def test_a_choice_is_a_dead_end_once_those_that_it_was_good_for_are():
    costs = [np.array([0.0, 0.0]), np.array([0.0, 0.0]), np.array([0.0, 9.0])]
    pairs = {(0, 1): np.array([[0.0, 3.0], [5.0, 0.0]]), (1, 2): np.array([[0.0, 0.0], [8.0, 0.0]])}
    _, kept = without_dead_ends(numbered(costs, pairs))
    assert [k.tolist() for k in kept] == [[0], [0], [0]]


def test_equally_cheap_choices_are_all_left():
    _, kept = without_dead_ends(numbered([np.full(3, 0.1 + 0.2), np.zeros(2)], {}))
    assert [len(k) for k in kept] == [3, 2]


def test_choices_without_any_conversion_are_left_out_unless_there_are_no_others():
    none = np.full((2, 2), np.inf)
    _, kept = without_dead_ends(numbered([np.zeros(2), np.zeros(2)], {(0, 1): none}))
    assert [len(k) for k in kept] == [2, 2]
    some = np.array([[np.inf, np.inf], [1.0, np.inf]])
    _, kept = without_dead_ends(numbered([np.zeros(2), np.zeros(2)], {(0, 1): some}))
    assert [k.tolist() for k in kept] == [[1], [0]]
