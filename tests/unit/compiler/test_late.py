"""Kernels that nobody in the step waits for let others pass while ranks wait for one another."""

from jobs import compile_for

import mpiflow as mf
from mpiflow import nn
from mpiflow.plan.verify import verify

BATCH, LAYERS, WIDTH = 8192, 3, 64


def job(group=BATCH // 2, micro_batches=1, width=WIDTH):
    def model(batch):
        x = mf.cast(batch["image"], "float32")
        for i in range(LAYERS):
            x = nn.Dense(width, name=f"dense{i}")(x)
            x = mf.relu(nn.BatchNorm(group=group, name=f"norm{i}")(x))
        return {"loss": mf.mean(mf.square(x))}

    return mf.Job(
        "normed",
        model,
        train=mf.Dataset("train-*.h5", batch=BATCH),
        optimizer=mf.SGD(lr=0.1, momentum=0.9),
        micro_batches=micro_batches,
    )


def plan_of(mesh="data=2", **settings):
    return compile_for(mesh, job(**settings), rows=2 * BATCH, features=WIDTH)


def order_of(program, stream):
    return [program.tasks[i] for i in dict(program.order)[stream]]


def place_of_first(kernels):
    return min(i for i, task in enumerate(kernels) if task.op == "RunningMoments")


def test_running_moments_come_behind_every_kernel_that_others_wait_for():
    plan = plan_of()
    verify(plan)
    kernels = order_of(plan.program("train"), "compute")
    first = place_of_first(kernels)
    assert {task.op for task in kernels[first:]} <= {"RunningMoments", "SgdUpdate", "Scale"}


def test_sums_that_only_running_moments_take_from_other_ranks_are_one_message():
    gathers = [task for task in plan_of().program("train").tasks if task.op == "all_gather"]
    assert [len(task.inputs) for task in gathers] == [LAYERS]


def test_sums_that_the_step_itself_waits_for_are_not_put_together():
    tasks = plan_of(group=None).program("train").tasks
    sums = [task for task in tasks if task.op == "all_reduce" and "batch_sums" in task.name]
    assert [len(task.inputs) for task in sums] == [1] * LAYERS


def test_what_would_hold_much_memory_is_not_put_off():
    kernels = order_of(plan_of(width=16384).program("train"), "compute")
    first = place_of_first(kernels)
    assert "RowProduct" in {task.op for task in kernels[first:]}


def test_in_a_loop_over_micro_batches_nothing_leaves_the_loop():
    plan = plan_of(micro_batches=2, group=BATCH // 4)
    verify(plan)
    in_loop = [task for task in plan.program("train").tasks if task.phase == 1]
    assert any(task.op == "BatchSums" for task in in_loop)
