"""The seconds of each kernel of a step, on the host and on devices."""

import pytest
from gpu_jobs import on_gpus
from jobs import classifier, compile_for, on_ranks

from mpiflow.plan.records import COMPUTE


def losses(session, first):
    """Of two steps, the first of which `first` runs."""
    session.expect("train", range(2))
    found = first(session)
    return found, session.run("train", 1)["loss"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["host", "fake", "cuda"])
def test_each_kernel_of_a_step_is_timed_once_in_their_order(device):
    plan = compile_for("data=2", classifier(48), route="" if device == "host" else "staged")
    run = on_gpus if device == "cuda" else on_ranks
    (_, second), _ = run(plan, lambda session: losses(session, lambda s: s.run("train")))
    program = plan.program("train")
    kernels = [program.tasks[i].name for i in dict(program.order)[COMPUTE]]
    for found, loss in run(plan, lambda session: losses(session, lambda s: s.timed("train"))):
        assert [task.name for task, _ in found] == kernels
        assert all(seconds > 0 for _, seconds in found)
        assert loss == second
