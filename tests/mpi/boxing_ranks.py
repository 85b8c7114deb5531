"""The program of `test_boxing_mpi.py`: every pair of layouts on a mesh of these ranks.

By messages, and in memory that the ranks share.
"""

import pickle
import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit")]

from conversions import MAX, cases_of, check, execute, groups_of, layouts  # noqa: E402

from mpiflow.exec.launch import connect  # noqa: E402
from mpiflow.graph.mesh import parse_mesh  # noqa: E402


def main(mesh, *shape):
    mesh, shape = parse_mesh(mesh), tuple(map(int, shape))
    whole = np.random.default_rng(1).integers(-50, 50, shape).astype("float64")
    found = layouts(mesh, shape, more=(MAX,))
    cases = cases_of([(source, found) for source in found], whole, mesh)
    transport = connect()
    groups = groups_of(transport, cases)
    for shared in (False, True):
        results = [execute(transport, groups, case, shared=shared) for case in cases]
        everywhere = transport.gather(pickle.dumps(results))
        if transport.rank == 0:
            ranks = [pickle.loads(data) for data in everywhere]
            for i, case in enumerate(cases):
                check(case, whole, [results[i] for results in ranks])
            how = "in shared memory" if shared else "by messages"
            print(f"{len(found) ** 2} conversions on {transport.size} ranks {how}")
    transport.close()


main(*sys.argv[1:])
