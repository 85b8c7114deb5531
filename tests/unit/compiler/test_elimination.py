from itertools import product

import numpy as np
import pytest

from mpiflow.compiler import elimination
from mpiflow.compiler.elimination import minimise
from mpiflow.compiler.tables import numbered


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
        found = minimise(unary, pairs)
        best = min(cost(unary, pairs, c) for c in product(*(range(len(u)) for u in unary)))
        assert found.lower == found.total == pytest.approx(best)
        assert cost(unary, pairs, found.choice) == pytest.approx(best)


def test_ties_go_to_the_earlier_choice():
    assert minimise([np.zeros(3), np.zeros(2)], {(0, 1): np.zeros((3, 2))}).choice == (0, 0)


def test_a_long_ladder_is_solved():
    draw = np.random.default_rng(0)
    unary = [draw.random(8) for _ in range(200)]
    pairs = {(i, i + step): draw.random((8, 8)) for step in (1, 2) for i in range(200 - step)}
    found = minimise(unary, pairs)
    assert cost(unary, pairs, found.choice) == pytest.approx(found.total)
    assert found.total < cost(unary, pairs, (0,) * 200)


def repeated_problem(layers):
    """Layers that all have the same costs, joined by their first and last variables."""
    draw = np.random.default_rng(3)
    sizes = [6, 3, 3, 3, 6, 6]
    costs = [draw.random(n) for n in sizes[:-1]]
    joined = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (4, 5)]
    tables = {(a, b): draw.random((sizes[a], sizes[b])) for a, b in joined}
    unary = [cost for _ in range(layers) for cost in costs]
    pairs = {
        (a + 5 * i, b + 5 * i): table
        for i in range(layers)
        for (a, b), table in tables.items()
        if b + 5 * i < 5 * layers
    }
    return unary, pairs


def test_layers_that_are_alike_are_as_cheap_as_when_each_is_worked_out():
    unary, pairs = repeated_problem(40)
    found = minimise(unary, pairs)
    changed = [cost.copy() for cost in unary]
    for i in range(40):  # equal but for the last bits, and so no two alike
        changed[5 * i] *= 1 + i * 1e-15
    assert found.total == pytest.approx(minimise(changed, pairs).total)
    assert found.total == pytest.approx(cost(unary, pairs, found.choice))


def test_layers_that_are_alike_are_eliminated_once(monkeypatch):
    made = []
    joint = elimination._joint
    monkeypatch.setattr(elimination, "_joint", lambda *args: made.append(0) or joint(*args))
    calls = {}
    for layers in (20, 40):
        made.clear()
        costs = numbered(*repeated_problem(layers))
        elimination._eliminate_all(costs, elimination._order(costs, 10**6))
        calls[layers] = len(made)
    assert calls[20] == calls[40] <= 12


def complete_problem(variables, choices, seed):
    """Every variable with a table beside every other: as wide as can be."""
    draw = np.random.default_rng(seed)
    unary = [draw.random(choices) for _ in range(variables)]
    pairs = {
        (a, b): draw.random((choices, choices))
        for a in range(variables) for b in range(a + 1, variables)
    }  # fmt: skip
    return unary, pairs


@pytest.mark.parametrize("seed", range(3))
def test_a_wide_problem_is_solved_among_the_choices_that_bounds_leave(seed):
    unary, pairs = complete_problem(5, 12, seed)
    joint = np.zeros([12] * 5)
    for v, costs in enumerate(unary):
        joint += costs.reshape([12 if i == v else 1 for i in range(5)])
    for pair, table in pairs.items():
        joint += table.reshape([12 if i in pair else 1 for i in range(5)])
    found = minimise(unary, pairs)
    assert found.choice == np.unravel_index(joint.argmin(), joint.shape)
    assert found.lower == found.total == pytest.approx(joint.min())


def test_what_is_too_wide_to_prove_has_a_solution_and_a_bound_below_it():
    unary, pairs = complete_problem(10, 12, 0)
    found = minimise(unary, pairs)
    assert found.total == pytest.approx(cost(unary, pairs, found.choice))
    assert 0 < found.lower < found.total < cost(unary, pairs, (0,) * 10)


def test_a_choice_that_cannot_be_converted_is_never_taken():
    table = np.array([[np.inf, 1.0], [np.inf, 5.0]])
    assert minimise([np.array([3.0, 0.0]), np.array([0.0, 0.0])], {(0, 1): table}).choice == (0, 1)
