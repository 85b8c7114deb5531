from itertools import product

import numpy as np
import pytest

from mpiflow.compiler.elimination import minimise, undominated


def cost(unary, pairs, choice):
    total = sum(costs[c] for costs, c in zip(unary, choice, strict=True))
    return total + sum(table[choice[a], choice[b]] for (a, b), table in pairs.items())


def random_problem(seed):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 4, draw.integers(1, 8))
    unary = [draw.integers(0, 20, n).astype(float) for n in sizes]
    every = [(a, b) for a in range(len(sizes)) for b in range(a + 1, len(sizes))]
    chosen = [pair for pair in every if draw.random() < 0.4]
    pairs = {(a, b): draw.integers(0, 30, (sizes[a], sizes[b])).astype(float) for a, b in chosen}
    return unary, pairs


@pytest.mark.parametrize("seeds", [range(i, i + 100) for i in range(0, 300, 100)], ids=str)
def test_elimination_finds_what_trying_everything_finds(seeds):
    for seed in seeds:
        unary, pairs = random_problem(seed)
        choice, total = minimise(unary, pairs)
        best = min(cost(unary, pairs, c) for c in product(*(range(len(u)) for u in unary)))
        assert total == pytest.approx(best)
        assert cost(unary, pairs, choice) == pytest.approx(best)


def test_ties_go_to_the_earlier_choice():
    assert minimise([np.zeros(3), np.zeros(2)], {(0, 1): np.zeros((3, 2))})[0] == (0, 0)


def test_a_long_ladder_is_solved():
    draw = np.random.default_rng(0)
    unary = [draw.random(8) for _ in range(200)]
    pairs = {(i, i + step): draw.random((8, 8)) for step in (1, 2) for i in range(200 - step)}
    choice, total = minimise(unary, pairs)
    assert cost(unary, pairs, choice) == pytest.approx(total)
    assert total < cost(unary, pairs, (0,) * 200)


def test_choices_that_cannot_be_best_are_left_out_and_the_best_stays():
    draw = np.random.default_rng(3)
    for _ in range(100):
        sizes = draw.integers(1, 5, draw.integers(2, 6))
        costs = [draw.integers(0, 6, n).astype(float) for n in sizes]
        tables = {
            (i, j): draw.integers(0, 3, (sizes[i], sizes[j])).astype(float)
            for i in range(len(sizes)) for j in range(i + 1, len(sizes)) if draw.random() < 0.6
        }  # fmt: skip
        kept = undominated(costs, tables)

        def total(choice, costs=costs, tables=tables):
            pairs = sum(t[choice[a], choice[b]] for (a, b), t in tables.items())
            return sum(c[i] for c, i in zip(costs, choice, strict=True)) + pairs

        best = min(map(total, product(*map(range, sizes))))
        assert min(map(total, product(*kept))) == best
        assert all(len(k) for k in kept)


def test_of_equal_choices_the_first_stays():
    kept = undominated([np.zeros(3), np.zeros(2)], {(0, 1): np.zeros((3, 2))})
    assert [k.tolist() for k in kept] == [[0], [0]]


def test_a_choice_that_cannot_be_converted_is_never_taken():
    table = np.array([[np.inf, 1.0], [np.inf, 5.0]])
    assert minimise([np.array([3.0, 0.0]), np.array([0.0, 0.0])], {(0, 1): table})[0] == (0, 1)
