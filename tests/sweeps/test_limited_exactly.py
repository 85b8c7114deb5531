"""Layouts within a limit on memory are the best that there are, as trying everything tells."""

from functools import reduce

import numpy as np
import pytest
from brute_force import joint

from mpiflow.compiler import limited
from mpiflow.compiler.assignments import DoesNotFit, Listed
from mpiflow.compiler.elimination import minimise
from mpiflow.compiler.limited import minimise_within
from mpiflow.errors import CompileError


def random_problem(seed):
    """Up to 8 variables, some costs of zero, some pairs forbidden, some live sets."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 4, draw.integers(1, 9))
    costs = [draw.integers(0, 20, n).astype(float) for n in sizes]
    memory = [draw.integers(0, 9, n).astype(float) for n in sizes]
    every = [(a, b) for a in range(len(sizes)) for b in range(a + 1, len(sizes))]
    pairs = {}
    for a, b in every:
        if draw.random() < 0.4:
            table = draw.integers(0, 30, (sizes[a], sizes[b])).astype(float)
            table[draw.random(table.shape) < 0.1] = np.inf
            pairs[a, b] = table
    live = [np.flatnonzero(draw.random(len(sizes)) < 0.6).tolist() for _ in range(3)]
    return costs, pairs, memory, live


def everything(costs, pairs, memory, live):
    """What every assignment costs, and the memory of its largest live set."""
    sizes = [len(c) for c in costs]
    total = joint(sizes, [*(((v,), c) for v, c in enumerate(costs)), *pairs.items()])
    sets = [joint(sizes, [((v,), memory[v]) for v in variables]) for variables in live]
    return total, reduce(np.maximum, sets)


def limits(total, largest, seed):
    """What the free optimum needs, one of three between that and the least possible, and less."""
    possible = largest[np.isfinite(total)]
    free, least = largest.flat[total.argmin()], possible.min()
    return [free, [free - 1, (free + least) // 2, least][seed % 3], least - 1]


def hold_to_brute_force(seeds, *, exact):
    outcomes = {"free": 0, "limited": 0, "does not fit": 0}
    for seed in seeds:
        problem = random_problem(seed)
        total, largest = everything(*problem)
        if np.isinf(total).all():
            with pytest.raises(CompileError, match="impossible"):
                minimise_within(*problem, largest.max())
            continue
        for limit in limits(total, largest, seed):
            fitting = np.where(largest <= limit, total, np.inf)
            if np.isinf(fitting).all():
                with pytest.raises(DoesNotFit) as raised:
                    minimise_within(*problem, limit)
                least = largest[np.isfinite(total)].min()
                assert limit < raised.value.least <= least * (1 + 1e-6)
                outcomes["does not fit"] += 1
                continue
            found = minimise_within(*problem, limit)
            best = fitting.min()
            outcomes["free" if best == total.min() else "limited"] += 1
            assert found.total == pytest.approx(total[found.choice])
            assert found.memory == largest[found.choice] <= limit
            assert found.lower <= best * (1 + 1e-9) <= found.total * (1 + 1e-8)
            if exact:
                assert found.total == pytest.approx(best)
                assert found.gap <= 1e-6
    return outcomes


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 150, 50)], ids=str)
def test_it_finds_what_trying_everything_finds_and_proves_it(seeds):
    assert min(hold_to_brute_force(seeds, exact=True).values()) > 25


def test_prices_give_bounds_below_what_trying_everything_finds(monkeypatch):
    monkeypatch.setattr(limited, "_SMALL", 0)
    assert min(hold_to_brute_force(range(300, 330), exact=False).values()) > 12


def test_what_fits_when_it_is_the_cheapest_is_returned_at_once(monkeypatch):
    monkeypatch.setattr(limited.highs, "solve", None)
    costs, pairs, memory, live = random_problem(5)
    free = minimise(costs, pairs)
    found = minimise_within(costs, pairs, memory, live, 1e9)
    assert (found.choice, found.total, found.lower) == (free.choice, free.total, free.lower)


def transformer(layers, draw):
    """A ladder as of training: activations live from their forward to their backward variable.

    Of the eight choices of a variable those of less memory cost more, by a different price in each
    layer, and pairs of unequal choices are converted. Weights live all the time.
    """
    share = 1 / np.arange(1, 9)
    weights, forward, backward = (range(i * layers, (i + 1) * layers) for i in range(3))
    costs = [draw.random() * np.sort(draw.random(8)) for _ in range(3 * layers)]
    memory = [share * size for size in draw.integers(50, 200, 3 * layers)]
    edges = [*zip(weights, forward, strict=True), *zip(weights, backward, strict=True)]
    edges += zip(forward, backward, strict=True)
    edges += [(v + i, v + i + 1) for v in (layers, 2 * layers) for i in range(layers - 1)]
    pairs = {edge: 0.1 * draw.random((8, 8)) * (1 - np.eye(8)) for edge in edges}
    up = [[*weights, *forward[: i + 1]] for i in range(layers)]
    down = [[*weights, *forward[: i + 1], *backward[i : i + 2]] for i in range(layers)]
    return costs, pairs, memory, [*up, *down]


def test_a_transformer_fits_half_of_its_memory_within_one_percent_of_the_best():
    problem = transformer(100, np.random.default_rng(0))
    costs, pairs, memory, live = problem
    free = minimise(costs, pairs)
    needed = max(sum(memory[v][free.choice[v]] for v in variables) for variables in live)
    found = minimise_within(*problem, needed / 2)
    assert found.memory <= needed / 2
    assert free.total < found.lower < found.total
    assert found.gap < 0.01


class Parts(Listed):
    """Live sets of two parts, which have half of all sets and members each."""

    def parts(self):
        return (
            np.repeat([0, 1], len(self.sets) // 2),
            np.repeat([0, 1], self.count // 2),
        )


def test_parts_are_mixed_one_after_another_and_all_fit():
    one, other = (transformer(40, np.random.default_rng(seed)) for seed in (0, 1))
    first = len(one[0])
    costs, memory = one[0] + other[0], one[2] + other[2]
    moved = {(a + first, b + first): table for (a, b), table in other[1].items()}
    pairs = one[1] | moved | {(0, first): 0.1 * (1 - np.eye(8))}
    sets = one[3] + [[v + first for v in variables] for variables in other[3]]
    live = Parts(sets, len(memory))
    free = minimise(costs, pairs)
    needed = live.used(np.array([m[i] for m, i in zip(memory, free.choice, strict=True)]))
    found = minimise_within(costs, pairs, memory, live, needed.max() / 2)
    assert free.total < found.lower < found.total
    assert found.memory <= needed.max() / 2
    assert found.gap < 0.01


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_scale_of_costs_does_not_matter(scale):
    costs, pairs, memory, live = random_problem(5)
    total, largest = everything(costs, pairs, memory, live)
    limit = largest[np.isfinite(total)].min()
    found = minimise_within(
        [c * scale for c in costs], {p: t * scale for p, t in pairs.items()}, memory, live, limit
    )
    assert found.total == pytest.approx(scale * total[largest <= limit].min())


@pytest.mark.parametrize("small", [0, 2_000])
def test_the_same_problem_has_the_same_result(monkeypatch, small):
    monkeypatch.setattr(limited, "_SMALL", small)
    problem = transformer(5, np.random.default_rng(0))
    assert minimise_within(*problem, 1200.0) == minimise_within(*problem, 1200.0)
