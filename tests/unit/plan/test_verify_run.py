"""What a run takes for granted is checked before it starts, whoever wrote the plan."""

from dataclasses import replace

import jobs
import pytest
from mutants import with_program

import mpiflow as mf
from mpiflow import nn
from mpiflow.errors import VerifyError
from mpiflow.graph.mesh import Mesh
from mpiflow.plan.verify_run import verify_run
from mpiflow.planning import make_plan

PLAN = jobs.digits_plan("data=2")


def with_data(place=0, **changes):
    data = list(PLAN.data)
    data[place] = replace(data[place], **changes)
    return replace(PLAN, data=tuple(data))


def with_settings(**changes):
    return replace(PLAN, settings=replace(PLAN.settings, **changes))


def without(name):
    return replace(PLAN, programs=tuple(p for p in PLAN.programs if p.name != name))


def changed_task(program, stream, place=0, **changes):
    found = PLAN.program(program)
    chosen = [task for task in found.tasks if task.stream == stream][place]
    tasks = tuple(replace(t, **changes) if t is chosen else t for t in found.tasks)
    return with_program(PLAN, found, replace(found, tasks=tasks))


def changed_program(name, **changes):
    found = PLAN.program(name)
    return with_program(PLAN, found, replace(found, **changes))


FAULTS = {
    "job that leaves its folder": (replace(PLAN, job="../../etc"), "'../../etc', which cannot"),
    "job that is an absolute path": (replace(PLAN, job="/etc"), "'/etc', which cannot"),
    "job that is the folder above": (replace(PLAN, job=".."), "named '..', which cannot"),
    "job without a name": (replace(PLAN, job=""), "named '', which cannot"),
    "no epochs": (with_settings(epochs=0), "epochs is 0, it must be 1 or more"),
    "no steps": (with_settings(steps_per_epoch=0), "steps_per_epoch is 0, it must be 11"),
    "nothing kept": (with_settings(keep=0), "keep is 0, it must be 1 or more"),
    "mode": (with_settings(mode="most"), "is 'most', not min or max"),
    "best": (with_settings(best="evaluate.nothing"), "'evaluate.nothing', which no evaluation"),
    "best of training": (with_settings(best="train.loss"), "'train.loss', which no evaluation"),
    "no data": (replace(PLAN, data=()), "first data set must be 'train'"),
    "other data first": (replace(PLAN, data=PLAN.data[::-1]), "first data set must be 'train'"),
    "no batch": (with_data(batch=0), "batch of data set train is 0"),
    "batch above the rows": (with_data(batch=1438), "is 1438, it must be from 1 to 1437"),
    "batch of another size": (with_data(1, batch=100), "needs a program for each of 100, 60 rows"),
    "no lanes": (with_data(lanes=0), "lanes of data set train is 0, it must be from 1 to 128"),
    "many lanes": (with_data(1, lanes=10**12), "lanes of data set evaluate is 1000000000000"),
    "no window": (with_data(window=0), "window of data set train is 0"),
    "no rows": (with_data(1, rows=0), "number of rows of data set evaluate is 0"),
    "no training": (without("train"), "no program 'train'"),
    "no saving": (without("save"), "no program 'save'"),
    "no tail": (without("evaluate_tail"), "128, 104 rows; the plan has evaluate of 128 rows"),
    "rows counted twice": (changed_program("evaluate", rows=256), "has evaluate of 256 rows"),
    "no loss": (changed_program("train", outputs=()), "has no output 'loss'"),
    "axis": (changed_task("train", "compute", axis="height"), "axis 'height', the mesh is"),
    "unknown field": (
        changed_task("train", "read", attributes={"fields": ["image", "mask"]}),
        "reads the field 'mask'; there are image, label",
    ),
    "fields swapped": (
        changed_task("train", "read", attributes={"fields": ["label", "image"]}),
        r"field label is uint8 \(128, 64\), it must be int64 \(128,\)",
    ),
    "no fields": (changed_task("train", "read", attributes={}), "of the fields None"),
    "limits": (
        changed_task("train", "read", attributes={"fields": ["image", "label"], "limits": ["9"]}),
        r"limits are \['9'\], not whole numbers",
    ),
    "ignored": (
        changed_task("train", "read", attributes={"fields": ["image", "label"], "ignored": [9]}),
        r"ignored values are \[9\], not lists of whole numbers",
    ),
    "variable of no name": (
        changed_task("save", "write", attributes={"variable": "../x"}),
        r"writes '\.\./x', no variable",
    ),
    "variable written twice": (
        changed_task("save", "write", 1, attributes={"variable": "fc1.weight"}),
        "one that is written already",
    ),
    "arena": (replace(PLAN, arenas=(("host", 2**62),)), "size of the arena is 4611686018427387904"),
}  # fmt: skip


def test_a_plan_of_the_compiler_is_accepted():
    verify_run(PLAN)


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_run_would_stumble_over_is_refused(name):
    plan, message = FAULTS[name]
    with pytest.raises(VerifyError, match=message):
        verify_run(plan)


def test_a_read_that_a_run_would_pass_over_is_refused():
    train = PLAN.program("train")
    second = next(replace(task, name="again") for task in train.tasks if task.kind == "read")
    with pytest.raises(VerifyError, match="train has 2 reads"):
        verify_run(with_program(PLAN, train, replace(train, tasks=(*train.tasks, second))))


def test_a_variable_that_is_not_saved_is_refused():
    save = PLAN.program("save")
    tasks = tuple(task for task in save.tasks if task.attributes.get("variable") != "out.bias")
    with pytest.raises(VerifyError, match=r"does not write variable out\.bias"):
        verify_run(with_program(PLAN, save, replace(save, tasks=tasks)))


def hinted(mesh, folder, **hints):
    def model(batch):
        x, y = (mf.hint(batch[n], sbp=hints[n]) if n in hints else batch[n] for n in "xy")
        return {"loss": mf.mean(mf.square(nn.Dense(1, name="fc")(x) - y))}

    fields = {"x": ((3,), "float32"), "y": ((1,), "float32")}
    data = mf.Dataset("x.h5", batch=6, fields=fields, rows=12)
    job = mf.Job("j", model, train=data, optimizer=mf.SGD(lr=0.1))
    return make_plan(job, folder, Mesh((mesh,)), folder)


def test_a_hint_on_one_input_of_several_is_refused_when_planning(tmp_path):
    hinted(("data", 1), tmp_path, x=mf.B)
    hinted(("data", 2), tmp_path, x=mf.B, y=mf.B)
    with pytest.raises(VerifyError, match=r"batch/x as B and batch/y as S\(0\).*the same one"):
        hinted(("data", 2), tmp_path, x=mf.B)


def test_a_hint_that_cuts_rows_is_refused_when_planning(tmp_path):
    with pytest.raises(VerifyError, match=r"batch/x as S\(1\), but a rank reads whole rows"):
        hinted(("model", 2), tmp_path, x={"model": mf.S(1)})
