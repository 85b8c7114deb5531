from itertools import product

import numpy as np
import pytest

from mpiflow.compiler.bounds import _colours, bounds
from mpiflow.compiler.elimination import minimise


def problem(seed, *, tree):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, draw.integers(2, 7))
    costs = [draw.integers(0, 9, n).astype(float) for n in sizes]
    every = [(a, b) for b in range(1, len(sizes)) for a in range(b)]
    pairs = [(int(draw.integers(b)), b) for b in range(1, len(sizes))]
    if not tree:
        pairs = [pair for pair in every if draw.random() < 0.6]
    return costs, {
        (a, b): draw.choice([0.0, 1.0, 2.0, 5.0, 7.0, np.inf], (sizes[a], sizes[b]))
        for a, b in pairs
    }


def sums(costs, pairs):
    """Of every assignment its choices and what they cost."""
    for choice in product(*(range(len(c)) for c in costs)):
        total = sum(c[i] for c, i in zip(costs, choice, strict=True))
        yield choice, total + sum(t[choice[a], choice[b]] for (a, b), t in pairs.items())


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "any"])
def test_every_choice_costs_the_bound_and_its_slack_or_more(tree):
    for seed in range(40):
        costs, pairs = problem(seed, tree=tree)
        found = bounds(costs, pairs)
        assert all((slack >= -1e-12).all() for slack in found.slack)
        for choice, total in sums(costs, pairs):
            worst = max(slack[i] for slack, i in zip(found.slack, choice, strict=True))
            assert found.lower + worst <= total + 1e-9


def test_the_bound_of_a_tree_is_what_the_best_costs():
    for seed in range(40):
        costs, pairs = problem(seed, tree=True)
        best = min(total for _, total in sums(costs, pairs))
        if np.isfinite(best):
            assert bounds(costs, pairs).lower == pytest.approx(best)


def test_the_bound_of_a_deep_chain_is_what_the_best_costs():
    draw = np.random.default_rng(5)
    costs = [draw.random(4) for _ in range(800)]
    pairs = {(i, i + 1): draw.random((4, 4)) for i in range(799)}
    best = minimise(costs, pairs).total
    assert best * 0.9999 <= bounds(costs, pairs).lower <= best * (1 + 1e-9)


def test_variables_of_a_colour_share_no_pairs_and_a_ladder_takes_four_however_long():
    pairs = [(i, i + step) for i in range(500) for step in (1, 2)]
    colours = _colours(502, pairs)
    assert all(colours[a] != colours[b] for a, b in pairs)
    assert set(colours.tolist()) <= set(range(4))
