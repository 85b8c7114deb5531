"""Conversions between layouts over real MPI."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.host("of messages alone")


@pytest.mark.ranks(6)
def test_every_pair_of_layouts_is_converted_by_mpi(mpiexec):
    program = Path(__file__).parent / "boxing_ranks.py"
    done = mpiexec(6, program, "data=2,model=3", 3, 7, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "529 conversions on 6 ranks by messages" in done.stdout
    assert "529 conversions on 6 ranks in shared memory" in done.stdout
