"""What optimizers add to a graph, and what they refuse."""

import pytest

import mpiflow as mf
from mpiflow import nn
from mpiflow.compiler.differentiate import differentiate
from mpiflow.errors import GraphError, JobError
from mpiflow.graph.graph import Graph, building
from mpiflow.ops.step import graph_step


def traced(*names, dtype="float32"):
    """A graph with a loss of variables of these names: vectors, matrices where they say so."""
    graph = Graph("train")
    with building(graph):
        total = None
        for name in names:
            shape = (3, 2) if name.endswith("weight") else (3,)
            x = nn.variable(name, shape, nn.uniform(1.0), dtype=dtype)
            part = mf.reduce_sum(mf.square(x))
            total = part if total is None else total + part
        graph.outputs["loss"] = total
    return graph


def added(optimizer, *names, **more):
    graph = traced(*names, **more)
    differentiate(graph, optimizer)
    return graph


def update_of(graph, name):
    return graph.assigns[name].node.op


def nodes_of(graph, op):
    return [node for node in graph.nodes if node.op.name == op]


def test_what_is_kept_is_not_trainable_and_bears_the_weights_name():
    graph = added(mf.AdamW(0.1, ema=0.9), "a.weight", "a.bias")
    kept = [v.name for v in graph.variables.values() if not v.trainable]
    assert sorted(kept) == sorted([
        "step", *(f"a.{part}.{what}" for part in ("weight", "bias")
                  for what in ("moment1", "moment2", "average"))])  # fmt: skip
    assert set(graph.assigns) == set(graph.variables)


def test_the_numbers_of_a_step_are_made_once_for_all_variables():
    graph = added(mf.Adam(mf.Cosine(0.1, 10), clip=1.0), "a.weight", "a.bias", "b.weight")
    counts = {op: len(nodes_of(graph, op)) for op in ("Cosine", "BiasCorrection", "ClipFactor")}
    assert counts == {"Cosine": 1, "BiasCorrection": 2, "ClipFactor": 1}
    assert len(nodes_of(graph, "Shift")) == 1  # the step count
    assert len(nodes_of(graph, "Cast")) == 4  # rate, corrections and factor, to float32
    assert len(nodes_of(graph, "AdamUpdate")) == 3


def test_a_constant_rate_needs_no_step_count():
    for lr in (0.1, 1, mf.Constant(0.1)):
        graph = added(mf.SGD(lr, momentum=0.9), "a.weight", "a.bias")
        assert "step" not in graph.variables
        (rate,) = (n for n in nodes_of(graph, "Fill") if n.name == "update/fill")
        assert rate.op.value == (1 if lr == 1 else 0.1)
    assert "step" in added(mf.SGD(mf.Constant(0.1, warmup=5)), "a.weight").variables


def test_the_first_group_that_matches_gives_the_settings():
    groups = (
        mf.Group("a.*", weight_decay=0.5, lr_scale=0.1),
        mf.NO_DECAY,
        mf.Group("b.*", weight_decay=0.3),
    )
    optimizer = mf.SGD(0.2, weight_decay=0.1, groups=groups)
    names = ("a.weight", "a.bias", "b.weight", "b.bias", "c.weight")
    graph = added(optimizer, *names)
    assert [update_of(graph, n).weight_decay for n in names] == [0.5, 0.5, 0.3, 0.0, 0.1]
    rates = [graph.assigns[n].node.inputs[2].node.op.value for n in names]
    assert rates == pytest.approx([0.02, 0.02, 0.2, 0.2, 0.2])


def test_a_group_that_matches_nothing_is_refused_with_the_names_that_are_there():
    optimizer = mf.SGD(0.1, groups=(mf.Group("*.gamma", weight_decay=0.0),))
    with pytest.raises(JobError) as caught:
        added(optimizer, "a.weight", "a.bias")
    assert "Group(pattern='*.gamma', weight_decay=0.0) matches no trainable" in str(caught.value)
    assert "there are a.weight, a.bias" in str(caught.value)


def test_clipping_gives_the_norm_unless_the_model_has_an_output_of_that_name():
    graph = added(mf.SGD(0.1, clip=1.0), "a.weight")
    assert graph.outputs["gradient_norm"].node.op.name == "ClipFactor"
    assert "gradient_norm" not in added(mf.SGD(0.1), "a.weight").outputs
    graph = traced("a.weight")
    graph.outputs["gradient_norm"] = graph.outputs["loss"]
    differentiate(graph, mf.SGD(0.1, clip=1.0))
    assert graph.outputs["gradient_norm"] is graph.outputs["loss"]


def test_variables_of_several_dtypes_share_one_rate_and_one_norm():
    graph = traced("a.weight")
    with building(graph):
        b = nn.variable("b", (4,), nn.uniform(1.0), dtype="float64")
        graph.outputs["loss"] = graph.outputs["loss"] + mf.cast(mf.reduce_sum(b * b), "float32")
    differentiate(graph, mf.LAMB(mf.Cosine(0.1, 10), clip=1.0))
    assert len(nodes_of(graph, "Cosine")) == len(nodes_of(graph, "SumScalars")) == 1
    assert {t.dtype for t in graph.assigns["b"].node.inputs} == {"float64"}


def test_variables_that_the_loss_does_not_need_stay_and_are_not_averaged():
    graph = traced("a.weight")
    with building(graph):
        nn.variable("idle", (3,), nn.uniform(1.0))
    (remark,) = differentiate(graph, mf.Adam(0.1, ema=0.9))
    assert remark == "the loss does not depend on variable idle; it stays"
    assert [n for n in graph.variables if n.startswith("idle")] == ["idle"]


def test_an_optimizer_is_written_as_what_is_not_the_default():
    assert repr(mf.SGD(0.1)) == "SGD(lr=0.1)"
    optimizer = mf.LAMB(mf.Cosine(0.1, warmup=5), groups=(mf.NO_DECAY,), clip=1.0, ema=0.99)
    assert repr(optimizer.over(40)) == (
        "LAMB(lr=Cosine(lr=0.1, steps=40, end=0.0, warmup=5), groups=(Group(pattern='*',"
        " weight_decay=0.0, adapt=False, dims=1),), clip=1.0, ema=0.99)"
    )


REFUSED = [
    (lambda: mf.SGD(-0.1), "SGD: lr must be a number that is not negative, not -0.1"),
    (lambda: mf.SGD("0.1"), "SGD: lr must be a number"),
    (lambda: mf.SGD(True), "SGD: lr must be a number"),
    (lambda: mf.SGD(float("nan")), "SGD: lr must be a number"),
    (lambda: mf.SGD(0.1, nesterov=True), "nesterov needs a momentum above 0"),
    (lambda: mf.Adam(0.1, clip=-1.0), "Adam: clip must be a number that is not negative"),
    (lambda: mf.Adam(0.1, betas=(0.9, 1.0)), "betas must be at least 0 and below 1"),
    (lambda: mf.Adam(0.1, ema=1.0), "Adam: ema must be below 1, not 1.0"),
    (lambda: mf.LARS(0.1, groups=(0.9,)), "groups is a tuple of mf.Group"),
    (lambda: mf.SGD(0.1, groups=mf.NO_DECAY), "groups is a tuple of mf.Group"),
    (lambda: mf.Group("*", lr_scale=-1.0), "Group: lr_scale must be a number"),
    (lambda: mf.Cosine(-0.1), "Cosine: lr must be a number that is not negative"),
    (lambda: mf.Cosine(0.1, warmup=0.5), "Cosine: warmup must be a whole number"),
    (lambda: mf.Cosine(0.1, 10, warmup=10), "the decay ends at step 10, within the warm-up of 10"),
    (
        lambda: mf.Cosine(0.1, warmup=10).over(8),
        "the run has 8 steps, and the warm-up alone 10; take",
    ),
    (lambda: mf.StepDecay(0.1, 0), "StepDecay: every must be at least 1"),
    (lambda: mf.InverseSqrt(0.1, 0), "InverseSqrt: warmup must be at least 1"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_settings_that_mean_nothing_are_refused(make, message):
    with pytest.raises(JobError, match=message.replace("(", r"\(")):
        make()


def test_the_step_count_is_one_variable_whoever_asks():
    graph = Graph("train")
    with building(graph):
        assert graph_step() is graph_step()
    assert list(graph.assigns) == ["step"]
    evaluation = Graph("evaluate", training=False)
    with building(evaluation):
        graph_step()
    assert not evaluation.assigns


def test_a_variable_of_the_users_named_step_is_not_taken_for_the_count():
    graph = Graph("train")
    with building(graph):
        nn.variable("step", (), nn.constant(0.0))
        with pytest.raises(GraphError, match="a variable named 'step' counts the steps"):
            graph_step()
