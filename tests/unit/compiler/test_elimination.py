from itertools import product

import numpy as np
import pytest

from mpiflow.compiler.elimination import minimise


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
