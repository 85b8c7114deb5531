from itertools import product

import numpy as np
import pytest

from mpiflow.compiler.contraction import Contraction
from mpiflow.compiler.tables import numbered


def random_problem(seed, *, variables, share, values):
    """Variables of one to four choices, of which a share of all pairs has a table."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, variables)
    costs = [draw.choice(values, n) for n in sizes]
    pairs = {
        (a, b): draw.choice(values, (sizes[a], sizes[b]))
        for b in range(variables) for a in range(b) if draw.random() < share
    }  # fmt: skip
    return costs, pairs


def cost(unary, pairs, choice):
    total = sum(costs[c] for costs, c in zip(unary, choice, strict=True))
    return total + sum(table[choice[a], choice[b]] for (a, b), table in pairs.items())


def cheapest(unary, pairs):
    """The best choices and their sum, by trying all."""
    every = product(*(range(len(costs)) for costs in unary))
    return min(((cost(unary, pairs, choice), choice) for choice in every), key=lambda x: x[0])


def costs_of(core):
    """The tables of what is left."""
    pairs = {pair: core.tables[number] for pair, number in core.pairs.items()}
    return [core.tables[number] for number in core.unary], pairs


@pytest.mark.parametrize("values", [[0.0, 1.0, 2.0, 5.0], [0.25, 3.0, np.inf]], ids=["few", "inf"])
@pytest.mark.parametrize("share", [0.3, 0.9], ids=["sparse", "dense"])
def test_the_best_of_what_is_left_tells_the_best_of_all(values, share):
    smaller = 0
    for seed in range(60):
        unary, pairs = random_problem(seed, variables=6, share=share, values=values)
        best, _ = cheapest(unary, pairs)
        left = Contraction(numbered(unary, pairs))
        rest, chosen = cheapest(*costs_of(left.core))
        choice = left.choice(chosen)
        assert rest + left.total == pytest.approx(best)
        assert cost(unary, pairs, choice) == pytest.approx(best)
        smaller += len(left.core.unary) < 6
    assert smaller > 30


def test_nothing_is_left_of_a_tree_and_of_a_ring():
    draw = np.random.default_rng(1)
    tree = {(draw.integers(b), b): draw.random((5, 5)) for b in range(1, 40)}
    ring = {(min(i, (i + 1) % 40), max(i, (i + 1) % 40)): draw.random((5, 5)) for i in range(40)}
    for pairs in (tree, ring):
        unary = [draw.random(5) for _ in range(40)]
        left = Contraction(numbered(unary, pairs))
        assert left.core.unary == []
        assert cost(unary, pairs, left.choice(())) == pytest.approx(left.total)


def test_what_has_three_neighbours_stays_but_without_its_dead_ends():
    draw = np.random.default_rng(2)
    pairs = {(a, b): draw.random((3, 3)) for b in range(4) for a in range(b)}
    left = Contraction(numbered([np.array([0.0, 9.0, 0.1])] * 4, pairs))
    assert left.core.sizes() == [2] * 4
    assert len(left.core.pairs) == 6
    assert left.choice([1] * 4) == (2,) * 4
    for (a, b), number in left.core.pairs.items():
        assert np.array_equal(left.core.tables[number], pairs[a, b][::2, ::2])


def test_a_variable_of_one_choice_is_added_to_any_number_of_neighbours():
    draw = np.random.default_rng(3)
    pairs = {(0, b): draw.random((1, 6)) for b in range(1, 6)}
    pairs |= {(a, b): np.eye(6) for b in range(1, 6) for a in range(1, b)}
    left = Contraction(numbered([np.array([7.0]), *np.zeros((5, 6))], pairs))
    assert left.total == 7.0
    assert len(left.core.unary) == 5
    for i, number in enumerate(left.core.unary):
        assert np.array_equal(left.core.tables[number], pairs[0, i + 1][0])


def test_a_choice_is_a_dead_end_once_those_that_it_was_good_for_are():
    unary = [np.array([0.0, 0.0]), np.array([0.0, 0.0]), np.array([0.0, 9.0])]
    pairs = {(0, 1): np.array([[0.0, 3.0], [5.0, 0.0]]), (1, 2): np.array([[0.0, 0.0], [8.0, 0.0]])}
    left = Contraction(numbered(unary, pairs))
    assert (left.choice(()), left.total) == ((0, 0, 0), 0.0)


def test_a_joint_table_that_would_be_large_is_left_to_others():
    draw = np.random.default_rng(4)
    sizes = [70, 70, 70, 70]
    pairs = {(0, 1): draw.random((70, 70)), (1, 2): draw.random((70, 70))}
    pairs |= {(2, 3): draw.random((70, 70)), (0, 3): draw.random((70, 70))}
    left = Contraction(numbered([draw.random(n) for n in sizes], pairs))
    assert left.core.sizes() == sizes
    assert sorted(left.core.pairs) == sorted(pairs)


def test_a_chain_of_equal_variables_takes_few_tables_however_long():
    draw = np.random.default_rng(5)
    costs, table = draw.random(6), draw.random((6, 6))
    made = {}
    for length in (2**7, 2**11):
        problem = numbered([costs] * length, {(i, i + 1): table for i in range(length - 1)})
        assert Contraction(problem).core.unary == []
        made[length] = problem.tables.number(np.array([length]))
    assert made[2**11] <= 2 * made[2**7]
