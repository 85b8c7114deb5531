"""The first task that makes nan or infinity is named, with rank, step and line."""

import numpy as np
import pytest
from jobs import classifier_plan, readers_of

from mpiflow.errors import TaskError
from mpiflow.exec.failure import Failure
from mpiflow.exec.local import run_local
from mpiflow.exec.session import Session


def run(plan, steps=2, *, poison=None, check_finite=True):
    def rank(transport):
        session = Session(
            plan, transport, readers_of(plan), check_finite=check_finite,
            start_thread=Failure(transport).start_thread,
        )  # fmt: skip
        session.run("initialise")
        if poison and transport.rank == poison[0]:
            session.variables[poison[1]].flat[0] = poison[2]
        session.expect("train", range(steps))
        return [session.run("train", step)["loss"] for step in range(steps)]

    return run_local(plan.mesh.size, rank)


@pytest.mark.ranks(2)
def test_a_job_whose_values_are_finite_gives_the_same_numbers():
    plan = classifier_plan("data=2")
    assert run(plan) == run(plan, check_finite=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("value", "what"), [(np.nan, "nan"), (np.inf, "inf")])
def test_the_first_task_that_makes_no_finite_number_is_named(value, what):
    plan = classifier_plan("data=2")
    name = next(v.name for v in plan.variables if v.name.endswith("weight"))
    with pytest.raises(TaskError) as caught:
        run(plan, poison=(1, name, value))
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 on ")
    assert "program train, step 1, task " in text
    assert f" {what} of " in text
    assert f"input {name}: float32 from " in text
    assert "jobs.py:" in text.splitlines()[-1]
    assert caught.value.__cause__ is None
