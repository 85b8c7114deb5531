"""Every task of a plan is an op that exists, with attributes and tensors that fit it."""

from dataclasses import replace

import jobs
import pytest
from mutants import with_program

from mpiflow.errors import VerifyError
from mpiflow.plan.verify_ops import verify_ops

PLAN = jobs.digits_plan("data=2")


def with_task(program, kind, **changes):
    found = PLAN.program(program)
    chosen = next(task for task in found.tasks if task.op == kind)
    tasks = tuple(replace(t, **changes) if t is chosen else t for t in found.tasks)
    return with_program(PLAN, found, replace(found, tasks=tasks))


LINEAR = next(task for task in PLAN.program("train").tasks if task.op == "Linear")
FAULTS = {
    "unknown op": (("train", "Relu", {"op": "Nope"}), "an op 'Nope' that this mpiflow does not"),
    "name of Python": (("train", "Relu", {"op": "__import__"}), "an op '__import__' that"),
    "foreign attribute": (("train", "Relu", {"attributes": {"x": 1}}), "no attribute 'x'"),
    "missing attribute": (("train", "Cast", {"attributes": {}}), "Cast does not go with its 1 in"),
    "attribute of another kind": (
        ("train", "Cast", {"attributes": {"dtype": [3]}}),
        r"dtype is \(3,\), not of str",
    ),
    "another op": (
        ("train", "Relu", {"op": "ArgMax", "attributes": {"dim": 1}}),
        r"gives int64 \(128,\); the plan has float32 \(128, 256\)",
    ),
    "too few inputs": (("train", "Linear", {"inputs": LINEAR.inputs[:1]}), "fc1/linear"),
    "inputs swapped": (("train", "Linear", {"inputs": LINEAR.inputs[::-1]}), "do not fit"),
}


@pytest.mark.parametrize("mesh", ["data=2", "data=2,model=2"])
def test_a_plan_of_the_compiler_is_accepted(mesh):
    verify_ops(jobs.digits_plan(mesh))


@pytest.mark.parametrize("name", FAULTS)
def test_a_task_that_does_not_fit_its_op_is_refused(name):
    (program, kind, changes), message = FAULTS[name]
    with pytest.raises(VerifyError, match=message) as caught:
        verify_ops(with_task(program, kind, **changes))
    assert "program train: " in str(caught.value)
