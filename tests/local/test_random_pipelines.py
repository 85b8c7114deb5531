"""Random jobs on random meshes take the memory that their plans say, and no more with time.

`pytest tests/local/test_random_pipelines.py --cases 200` has many of them.
"""

import threading
import tracemalloc

import numpy as np
import pytest
from jobs import MemoryReader, evaluate, on_ranks
from micro_jobs import arrays
from pipeline_jobs import BATCH, STEPS, Measured, of_stages, plan_of, predicted, ran, random_case

from mpiflow.plan.rows import FETCH, SEND

STEADY = 4


def measured(plan):
    """What each rank measured, and the bytes of arrays that steps behind the first ones keep."""
    together = threading.Barrier(plan.mesh.size, timeout=60)
    kept = []

    def work(session):
        session.expect("train", range(STEPS + STEADY))
        outputs = [session.run("train", step) for step in range(STEPS)]
        alone(session, tracemalloc.start)
        sent = [session.sent]
        for step in range(STEPS, STEPS + STEADY):
            session.run("train", step)
            sent.append(session.sent)
        alone(session, note)
        return Measured(outputs, evaluate(session), session.arena.peak, np.diff(sent).tolist())

    def alone(session, function):
        together.wait()
        if session.transport.rank == 0:
            function()
        together.wait()

    def note():
        only_arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        traces = tracemalloc.take_snapshot().filter_traces([only_arrays]).traces
        kept.append(sum(trace.size for trace in traces))
        tracemalloc.stop()

    found = on_ranks(plan, work, {d.name: MemoryReader(arrays(BATCH), BATCH) for d in plan.data})
    return found, kept


@pytest.mark.ranks(2)
def test_a_random_job_does_what_its_plan_says(seed_of_case):
    case = random_case(seed_of_case)
    plan = plan_of(case)
    found, kept = measured(plan)
    assert kept == [0]
    for stage, ranks in of_stages(plan, found):
        arena, sent = predicted(stage)
        assert max(rank.peak for rank in ranks) == arena
        most = {max(step) for step in zip(*(rank.sent for rank in ranks), strict=True)}
        if any(task.op in (FETCH, SEND) for task in stage.program("train").tasks):
            assert (
                max(most) <= sent
            )  # rows that differ, of which the plan has the most there can be
        else:
            assert most == {sent}
    (alone,) = ran(case.alone)
    for ours, theirs in zip(found[0].outputs, alone.outputs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-8)
