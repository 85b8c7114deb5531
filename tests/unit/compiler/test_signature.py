import pytest
from jobs import classifier, classifier_plan, compile_for, data_set

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.differentiate import differentiate
from mpiflow.compiler.machine import find_machine
from mpiflow.compiler.signature import choose
from mpiflow.compiler.trace import trace
from mpiflow.errors import SbpError
from mpiflow.graph.mesh import parse_mesh
from mpiflow.graph.sbp import B, P, S

MACHINE = find_machine("cpu")


def placed(job, mesh, batch=128):
    graph = trace(job, data_set("train", 1000, batch), name="train", rows=batch, training=True)
    differentiate(graph, job.optimizer)
    return choose(graph, parse_mesh(mesh), MACHINE)


def layouts_of(plan):
    return {v.name: v.layout for v in plan.variables}


@pytest.mark.parametrize("mesh", ["data=2", "data=5", "data=2,model=2"])
def test_variables_are_the_same_everywhere_on_the_data_axis(mesh):
    axis = parse_mesh(mesh).index("data")
    assert {layout[axis] for layout in layouts_of(classifier_plan(mesh)).values()} == {B}


@pytest.mark.parametrize("mesh", ["data=2", "data=5"])
def test_the_batch_is_split_on_the_data_axis(mesh):
    plan = classifier_plan(mesh)
    for program in plan.programs:
        assert all(r.layout == (S(0),) for r in program.registers if r.slots > 1)


def test_a_wide_layer_is_split_on_a_free_axis_without_a_hint():
    def model(batch):
        x = mf.cast(batch["image"], "float32")
        y = nn.Dense(5, name="out")(mf.relu(nn.Dense(20_000, name="wide")(x)))
        return {"loss": mf.mean(mf.cross_entropy(y, batch["label"]))}

    job = mf.Job("wide", model, train=mf.Dataset("x", batch=64), optimizer=mf.SGD(lr=0.1))
    layouts = {t.name: layout for t, layout in placed(job, "model=4", 64).sources.items()}
    assert layouts["wide.weight"] == (S(1),)
    assert layouts["wide.bias"] == (S(0),)
    assert layouts["out.weight"] == (S(0),)


def test_a_choice_is_never_predicted_slower_than_one_with_hints():
    free = placed(classifier(hidden=None, last=None), "model=2").seconds
    for hidden, last in [("S(1)", "S(0)"), ("S(1)", "B"), ("S(0)", "S(1)"), ("B", "B")]:
        job = classifier(hidden=hidden, last=last)
        assert placed(job, "model=2").seconds >= free * (1 - 1e-9)


@pytest.mark.parametrize("hidden", ["S(0)", "S(1)"])
def test_a_hint_on_a_variable_is_followed_and_so_by_its_momentum(hidden):
    layouts = layouts_of(classifier_plan("model=3", 130, hidden=hidden))
    assert str(layouts["fc1.weight"][0]) == hidden
    assert layouts["fc1.weight.momentum"] == layouts["fc1.weight"]


def hinted_job(hint, *, on="hidden"):
    def model(batch):
        x = mf.cast(batch["image"], "float32") / 16
        if on == "input":
            mf.hint(batch["image"], hint)
        h = mf.relu(nn.Dense(8, name="fc1", sbp=hint if on == "weight" else None)(x))
        if on == "hidden":
            mf.hint(h, hint)
        logits = nn.Dense(5, name="out")(h)
        top = mf.argmax(logits)
        if on == "top":
            mf.hint(top, hint)
        hits = mf.mean(mf.equal(top, batch["label"]))
        return {"loss": mf.mean(mf.cross_entropy(logits, batch["label"])), "hits": hits}

    return mf.Job("hinted", model, train=mf.Dataset("x", batch=64), optimizer=mf.SGD(lr=0.1))


@pytest.mark.parametrize(
    ("hint", "mesh", "layout"),
    [
        (S(0), "data=2", (S(0),)),
        (S(1), "data=2", (S(1),)),
        (B, "data=2", (B,)),
        ({"model": S(1)}, "data=2,model=2", (B, S(1))),
        ({"data": S(0), "model": S(1)}, "data=2,model=2", (S(0), S(1))),
        ({"elsewhere": S(1)}, "data=2", (B,)),
        (S(1), "data=2,model=1", (S(1), B)),
    ],
)
def test_a_hint_on_a_tensor_is_followed(hint, mesh, layout):
    for node, choice in placed(hinted_job(hint), mesh, 64).nodes:
        if node.name == "relu":
            assert choice.outputs[0] == layout


def test_a_hint_replicates_an_input():
    sources = placed(hinted_job(B, on="input"), "data=2", 64).sources
    layouts = {t.name: layout for t, layout in sources.items()}
    assert layouts["batch/image"] == (B,)
    assert layouts["batch/label"] == (S(0),)


@pytest.mark.parametrize(
    ("hint", "on", "message"),
    [
        (S(2), "weight", r"fc1.weight: shape \(6, 8\) cannot be S\(2\)"),
        (S(1, 3), "weight", r"fc1.weight: shape \(6, 8\) cannot be S\(1,unit=3\)"),
        (S(2), "hidden", r"relu: shape \(64, 8\) cannot be S\(2\)"),
        (P, "top", "arg_max: no signature of ArgMax gives the layout"),
    ],
)
def test_a_hint_that_cannot_be_is_refused_with_its_line(hint, on, message):
    with pytest.raises(SbpError, match=message) as caught:
        placed(hinted_job(hint, on=on), "data=2", 64)
    assert f"{__file__}:" in str(caught.value)


def test_a_variable_or_an_input_is_never_partial():
    for on, name in [("weight", "fc1.weight"), ("input", "batch/image")]:
        with pytest.raises(SbpError, match=f"{name} is stored, so it cannot be P"):
            placed(hinted_job(P, on=on), "data=2", 64)


def test_a_batch_smaller_than_the_ranks_that_split_it_is_noted():
    idle = "data set 'train': a batch of 2 rows is split over 3 ranks, so 1 of them have none"
    assert any(note.startswith(idle) for note in compile_for("data=3", classifier(2)).notes)
    assert not any("have none" in note for note in compile_for("data=2", classifier(2)).notes)
