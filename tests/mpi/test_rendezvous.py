"""Random plans come to their ends by MPI that buffers nothing, whatever comes late.

`pytest tests/mpi/test_rendezvous.py --cases 300` has many of them.
"""

from pathlib import Path

import pytest


@pytest.mark.ranks(4)
def test_random_plans_end_where_sends_wait_for_receives_and_everything_is_late(mpiexec, request):
    options = request.config.option
    count, route = options.cases, [options.route] if options.device == "fake" else []
    program = Path(__file__).parent / "rendezvous_ranks.py"
    done = mpiexec(4, program, count, *route, timeout=60 + 20 * count)
    assert done.returncode == 0, done.stdout
    assert f"{count} plans came to their ends" in done.stdout
