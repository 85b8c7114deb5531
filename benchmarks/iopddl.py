"""The solver under a memory limit, on public instances of a contest (google/iopddl, 2025).

    python benchmarks/iopddl.py FOLDER [NAME ...]

Each instance is a large model's graph with the strategies of every op, their costs and memory, and
what pairs of strategies cost; the memory of all that is alive at any time is limited. The folder
holds NAME.json.gz; without names, G and B are solved, whose best known costs are proven.

Measured on a busy 2-core virtual machine with Python 3.11 and SciPy 1.17, November 2026:

    instance       cost  best known  lower bound      gap  memory / limit  seconds
    G           217,039     217,039      217,039  0.0000%          0.9992      7.0
    B           532,843     532,843      532,843  0.0000%          0.9839      8.7
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpiflow.compiler.assignments import Limited
from mpiflow.compiler.limited import minimise_within

BEST = {"B": 532_843, "G": 217_039, "V": 1_632_051}
FORBIDDEN = 1e15
"""Costs from here on mean that a strategy, or a pair, must not be taken."""


def read(path: Path) -> tuple[Any, ...]:
    """The costs, pairs, memory, live sets and limit of an instance."""
    with gzip.open(path) as file:
        problem = json.load(file)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    costs = [table(c) for c in nodes["costs"]]
    pairs: dict[tuple[int, int], Any] = {}
    for (a, b), given in zip(edges["nodes"], edges["costs"], strict=True):
        prices = table(given).reshape(len(costs[a]), len(costs[b]))
        key, prices = ((a, b), prices) if a < b else ((b, a), prices.T)
        pairs[key] = pairs.get(key, 0.0) + prices
    memory = [np.array(usage, np.float64) for usage in nodes["usages"]]
    return costs, pairs, memory, live_sets(nodes["intervals"]), problem["usage_limit"]


def table(given: list[float]) -> Any:
    """The costs, infinite where they mean that something is forbidden."""
    costs = np.array(given, np.float64)
    return np.where(costs >= FORBIDDEN, np.inf, costs)


def live_sets(intervals: list[list[int]]) -> list[list[int]]:
    """The nodes alive at any time, without the sets that are part of another."""
    starts = sorted({start for start, stop in intervals if start < stop})
    sets = dict.fromkeys(
        frozenset(i for i, (start, stop) in enumerate(intervals) if start <= now < stop)
        for now in starts
    )
    return [sorted(live) for live in sets if not any(live < other for other in sets)]


def solve(path: Path) -> tuple[Limited, float, float]:
    """The result, its share of the limit, and the seconds that it took without reading."""
    instance = read(path)
    start = time.perf_counter()
    found = minimise_within(*instance)
    return found, found.memory / instance[-1], time.perf_counter() - start


def main() -> None:
    """Solve the instances and print a row for each."""
    parser = argparse.ArgumentParser(description="Solve instances of google/iopddl.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=["G", "B"])
    options = parser.parse_args()
    print("instance       cost  best known  lower bound      gap  memory / limit  seconds")
    for name in options.names:
        found, share, seconds = solve(options.folder / f"{name}.json.gz")
        print(
            f"{name:8}{found.total:11,.0f}{BEST.get(name, 0):12,}{found.lower:13,.0f}"
            f"{found.gap:9.4%}{share:16.4f}{seconds:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
