"""Starts the tests that are marked `mpi`; conftest.py explains."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.host("of messages alone")


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.ranks(ranks)) for ranks in (2, 3)]
)
def test_the_marked_tests_pass_on_every_rank(mpiexec, ranks):
    options = ["-m", "pytest", "-q", "--with-mpi", "-m", "mpi", "-p", "no:cacheprovider", HERE]
    done = mpiexec(ranks, *options, timeout=120)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
