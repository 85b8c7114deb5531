"""The order of kernels beside messages: what is exchanged goes first, updates in the midst."""

from dataclasses import replace

import pytest
from jobs import compile_for

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.machine import find_machine
from mpiflow.plan.simulator import simulate
from mpiflow.plan.verify import verify

LAYERS, WIDTH, BATCH = 5, 288, 1024
BASE = find_machine("cpu")


def machine(bandwidth=2e8, *, overlap=True):
    """A machine whose messages take a while."""
    link = replace(BASE.inner, bandwidth=bandwidth)
    return replace(BASE, inner=link, outer=link, overlap=overlap)


def job(clip=0.0):
    def model(batch):
        x = mf.cast(batch["image"], "float32")
        for i in range(LAYERS):
            x = mf.relu(nn.Dense(WIDTH, name=f"layer{i}")(x))
        return {"loss": mf.mean(mf.square(x))}

    return mf.Job(
        "layers",
        model,
        train=mf.Dataset("train-*.h5", batch=BATCH),
        optimizer=mf.SGD(lr=0.1, momentum=0.9, clip=clip),
    )


def plan_of(zero, on=None, clip=0.0):
    sizes = {"rows": 2 * BATCH, "features": WIDTH}
    return compile_for("data=2", job(clip), zero=zero, machine=on or machine(), **sizes)


def order_of(plan, stream="compute"):
    program = plan.program("train")
    return [program.tasks[i].name for i in dict(program.order)[stream]]


def place(names, *parts):
    (found,) = (i for i, name in enumerate(names) if all(part in name for part in parts))
    return found


def test_the_gradient_of_weights_comes_before_that_of_the_input_as_it_is_exchanged():
    names = order_of(plan_of(0))
    for i in range(1, LAYERS):
        weights = place(names, f"grad/layer{i}/linear", "product")
        assert weights < place(names, f"grad/layer{i}/linear/linear")


def test_without_overlap_the_order_is_that_of_the_backward_pass():
    names = order_of(plan_of(0, machine(overlap=False)))
    for i in range(1, LAYERS):
        weights = place(names, f"grad/layer{i}/linear", "product")
        assert weights > place(names, f"grad/layer{i}/linear/linear")


def test_parts_are_updated_in_the_midst_of_the_backward_pass_and_gathered_beside_it():
    plan = plan_of(1)
    verify(plan)
    names, messages = order_of(plan), order_of(plan, "comm.data")
    last = place(names, "grad/layer0/linear", "product")
    assert names.index(f"update/layer{LAYERS - 1}.weight/sgd_update") < last
    gathered = place(messages, f"update/layer{LAYERS - 1}.weight")
    assert gathered < place(messages, "grad/layer0/linear")
    simulation = simulate(plan)
    exchanges = [t.seconds for t in plan.program("train").tasks if t.stream == "comm.data"]
    exposed = simulation.step_seconds - dict(simulation.busy)["compute"]
    assert exposed < 3.2 * max(exchanges) < 0.35 * sum(exchanges)


def test_an_update_is_put_where_a_reduction_may_take_twice_as_long_as_predicted():
    plan = plan_of(1)
    program = plan.program("train")
    tasks = {task.name: task for task in program.tasks}
    names, last = order_of(plan), f"layer{LAYERS - 1}"
    made = place(names, f"grad/{last}/linear", "product")
    update = names.index(f"update/{last}.weight/sgd_update")
    between = sum(tasks[name].seconds for name in names[made + 1 : update])
    reduction = next(t for t in program.tasks if t.op == "reduce_scatter" and last in t.name)
    assert between >= 2 * reduction.seconds


def test_updates_that_wait_for_all_gradients_stay_at_the_end():
    names = order_of(plan_of(1, clip=1.0))
    last = place(names, "grad/layer0/linear", "product")
    assert all(i > last for i, name in enumerate(names) if name.endswith("sgd_update"))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_early_updates_leave_the_peak_of_memory_hardly_higher(zero):
    early, late = plan_of(zero), plan_of(zero, machine(overlap=False))  # at level 3 by 2.8 %
    assert early.arena() <= 1.03 * late.arena()
